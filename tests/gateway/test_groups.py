"""Requests at the members of a group: what takes no new ones any more still ends what it has."""

from __future__ import annotations

from dataclasses import replace

from bus.messages import Submit
from gateway.delivery.request import RequestState, RetryReason
from tests.support.gateway_core import Core, Ear
from tests.support.metrics_samples import metrics_of


def core_of(*workers: str) -> Core:
    core = Core()
    for name in workers:
        core.worker(name)
    core.poll()
    return core


def join(core: Core, *group: str) -> None:
    """The members' cards tell of the group, in the order of its shards, and are read."""
    for name in group:
        (instance,) = core.cards[name].instances
        joined = replace(instance, workers=list(group), tp=len(group))
        core.cards[name] = replace(core.cards[name], instances=[joined])
    core.poll()


def at(state: RequestState) -> str:
    assert state.target is not None
    return state.target.worker


def by_worker(states: list[RequestState]) -> dict[str, RequestState]:
    return {at(state): state for state in states}


def test_members_end_what_they_have_and_nothing_of_it_is_submitted_or_cancelled_again() -> None:
    core = core_of("w0", "w1")
    states = by_worker(core.submit("a", "b"))
    for state in states.values():
        core.deliver(state, [1, 2])
    core.written()
    for group in (("w1", "w0"), ("w0", "w1"), ("w0",), ("w1",)):
        join(core, *group)
        for state in states.values():
            core.deliver(state, [3])
        core.losses.tick()
    for state in states.values():
        core.deliver(state, [4], finish="length")
        assert isinstance(state.sink, Ear)
        assert (state.attempt, state.sink.tokens, state.sink.error) == (1, [1, 2, 3, 3, 3, 3, 4], None)
        assert state.sink.has_ended
    assert core.written() == [] and not core.delivery.table.requests
    core.gateway.check_integrity()


def test_what_a_member_has_not_begun_stays_in_its_queue() -> None:
    core = core_of("w0", "w1")
    states = by_worker(core.submit("a", "b", begun=False))
    core.written()
    join(core, "w0", "w1")
    for _ in range(8):
        core.report(metrics_of("m@w1", waiting=1))
        core.poll(after_s=1.0)
        core.losses.tick()
    assert (at(states["w1"]), states["w1"].attempt) == ("w1", 1)
    core.deliver(states["w1"], [1], finish="length")
    assert isinstance(states["w1"].sink, Ear) and states["w1"].sink.has_ended


def test_a_member_that_works_may_be_silent_and_one_that_is_idle_has_lost_its_request() -> None:
    core = core_of("w0", "w1")
    states = by_worker(core.submit("a", "b"))
    join(core, "w0", "w1")
    for steps in range(1, 9):
        core.now += 1.0
        core.report(metrics_of("m@w1", running=1, steps=steps))
        core.losses.tick()
    assert states["w1"].attempt == 1
    core.now += 1.0
    core.report(metrics_of("m@w1", running=0, steps=9))
    core.losses.tick()
    assert states["w1"].attempt == 2 and states["w0"].attempt == 1


def test_new_requests_go_to_all_members_in_turn() -> None:
    core = core_of("w0", "w1")
    join(core, "w1", "w0")
    assert [at(state) for state in core.submit(*"abcdef")] == ["w0", "w1"] * 3
    submits = [message for message in core.written() if isinstance(message, Submit)]
    assert [message.epoch for message in submits] == [1] * 6
    join(core, "w0")
    join(core, "w1")
    assert {at(state) for state in core.submit(*"ghi")} == {"w0", "w1"}


def test_when_a_member_dies_its_requests_go_to_the_group_and_the_others_stay() -> None:
    core = core_of("w0", "w1")
    states = by_worker(core.submit("a", "b"))
    for state in states.values():
        core.deliver(state, [1, 2])
    join(core, "w0", "w1")
    core.losses.on_worker_gone("w1", 1, RetryReason.WORKER_LOST)
    assert (at(states["w1"]), states["w1"].attempt) == ("w0", 2)
    assert (at(states["w0"]), states["w0"].attempt) == ("w0", 1)
    again = [message for message in core.written() if isinstance(message, Submit) and message.attempt == 2]
    assert [message.sent_token_ids for message in again] == [[1, 2]]


def test_when_the_leader_dies_only_its_own_requests_are_replayed() -> None:
    core = core_of("w0", "w1")
    states = by_worker(core.submit("a", "b"))
    join(core, "w0", "w1")
    core.losses.on_worker_gone("w0", 1, RetryReason.WORKER_LOST)
    del core.cards["w0"]
    assert states["w0"].target is None and states["w1"].attempt == 1  # nobody leads: it waits
    join(core, "w1")
    assert (at(states["w0"]), states["w0"].attempt) == ("w1", 2)
    core.deliver(states["w1"], [1], finish="length")
    assert isinstance(states["w1"].sink, Ear) and states["w1"].sink.has_ended

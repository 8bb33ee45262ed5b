"""When a request counts as lost, who is to blame, and what its old attempt is told."""

from __future__ import annotations

import pytest

from bus.client import Restart
from bus.messages import Submit
from gateway.delivery.cluster import FORGET_S, Cluster
from gateway.delivery.request import RequestState, RetryReason
from tests.support.gateway_core import Core, Ear
from tests.support.metrics_samples import metrics_of
from tests.support.parallelism_groups import live, worker_card


def core_of(*workers: str, **settings: object) -> Core:
    core = Core(**settings)
    for name in workers:
        core.worker(name)
    core.poll()
    return core


def error_of(state: RequestState) -> str:
    assert isinstance(state.sink, Ear)
    return state.sink.error.code or "" if state.sink.error else ""


@pytest.mark.parametrize("dies_at_once", [True, False])
def test_of_those_beside_a_request_that_kills_its_workers_only_it_fails(dies_at_once: bool) -> None:
    core = core_of("w0", max_attempts=3)
    states = core.submit("innocent-1", "poison", "innocent-2", begun=not dies_at_once)
    poison = states[1]
    for epoch in range(2, 40):
        if poison.target is not None:  # its worker dies, with all that had begun there
            core.worker("w0", epoch=epoch, pid=epoch)
            core.poll()
        for state in states:
            if state.target is None or not core.delivery.table.has(state):
                continue
            at_poison = state.target == poison.target
            if not state.is_sent:
                core.sent(state, begun=not (at_poison and dies_at_once))
            if not at_poison:
                core.deliver(state, [7], finish="length")
        core.poll()
        if not core.delivery.table.requests:
            break
    assert [error_of(state) for state in states] == ["", "worker_lost", ""]
    core.gateway.check_integrity()


def test_a_request_that_was_not_sent_yet_is_not_to_blame() -> None:
    core = core_of("w0")
    state = core.state("r")
    core.delivery.submit(state)
    core.worker("w0", epoch=2, pid=2)
    core.poll()
    assert (state.attempt, state.strikes) == (2, 0)


def test_a_worker_that_left_or_lost_its_lease_did_not_die_of_its_requests() -> None:
    core = core_of("w0", "w1")
    (state,) = core.submit("r")
    core.losses.on_worker_gone("w0", 1, RetryReason.WORKER_LEFT)
    core.sent(state)
    assert state.target is not None and (state.target.worker, state.strikes) == ("w1", 0)
    core.worker("w1", epoch=5)  # the same process
    core.poll()
    assert (state.attempt, state.strikes) == (3, 0)
    core.sent(state)
    core.worker(state.target.worker, epoch=9, pid=2)
    core.poll()
    assert (state.attempt, state.strikes) == (4, 1)


def test_an_epoch_before_the_last_one_is_another_incarnation_too() -> None:
    core = core_of("w0")
    core.worker("w0", epoch=1000, pid=2)
    core.poll()
    (state,) = core.submit("r")
    core.worker("w0", epoch=500, pid=3)  # its clock was set back
    core.poll()
    assert state.target is not None and state.target.epoch == 500
    core.poll()
    assert state.attempt == 2


def test_a_lease_that_was_seen_with_another_epoch_and_is_gone_is_missing_for_good() -> None:
    core = core_of("w0")
    core.worker("w0", epoch=2)
    core.poll()
    core.cards.clear()
    core.poll()
    assert core.cluster.missing_for("w0", 1) > 1e9
    assert core.cluster.missing_for("w0", 2) < 1


def test_workers_that_have_been_gone_for_long_are_forgotten() -> None:
    cluster = Cluster(stale_s=5.0)
    for number in range(100):  # a new name with each poll
        cluster.update(live(worker_card(f"w{number}")), now=number * FORGET_S / 10)
    assert [*cluster.seen] == [f"w{number}" for number in range(89, 100)]
    assert cluster.missing_for("w0", 1) > 1e9 and cluster.missing_for("w99", 1) == 0.0


def test_an_attempt_that_may_still_run_is_cancelled_when_its_replay_goes_elsewhere() -> None:
    core = core_of("w0", "w1")
    (state,) = core.submit("r")
    core.cluster.drop("w0", 1)
    core.written()
    core.deliver(state, [3], at=5)  # a gap
    assert state.target is not None and state.target.worker == "w1"
    assert core.cancels() == [(["r"], 1)]


def test_a_replay_at_the_same_worker_or_after_its_death_needs_no_cancellation() -> None:
    core = core_of("w0")
    (state,) = core.submit("r")
    core.deliver(state, [3], at=5)
    assert state.attempt == 2 and core.cancels() == []
    core.worker("w1")
    core.poll()
    core.sent(state)
    core.losses.on_worker_gone("w0", 1, RetryReason.WORKER_LOST)
    assert state.attempt == 3 and core.cancels() == []


@pytest.mark.parametrize("data_lost", [True, False])
def test_after_a_restart_of_redis_only_workers_that_kept_their_lease_are_told(data_lost: bool) -> None:
    core = core_of("w0")
    core.submit("r")
    core.cluster.drop("w0", 1)
    core.written()
    core.losses.on_restart(Restart(data_lost=data_lost, run_id="x"))
    assert core.cancels() == ([] if data_lost else [(["r"], 1)])


def test_a_gateway_whose_lease_had_run_out_submits_everything_again() -> None:
    core = core_of("w0")
    (state,) = core.submit("r")
    core.written()
    core.losses.on_own_lease_lost()
    (again,) = core.written()
    assert isinstance(again, Submit) and (again.attempt, state.strikes) == (2, 0)


def test_silence_beside_an_instance_that_goes_on_is_no_loss() -> None:
    core = core_of("w0")
    (state,) = core.submit("r")
    core.deliver(state, [1])
    for step in range(150):
        core.now += 1
        core.report(metrics_of(running=1, steps=step))
        core.losses.tick()
    assert state.attempt == 1
    for _ in range(100):  # it reports, and does nothing
        core.now += 1
        core.report(metrics_of(running=1, steps=149))
        core.losses.tick()
    assert state.attempt == 2


def test_the_largest_kv_cache_bounds_what_one_request_may_ask_for() -> None:
    core = Core()
    core.worker("w0", max_model_len=1000)
    core.worker("w1", max_model_len=1000)
    core.poll()
    card = core.cards["w0"].instances[0]
    assert core.gateway.request_builder.context(card) == 1000
    core.cluster.drop("w1", 1)
    core.report(metrics_of(kv_blocks=20))
    assert core.gateway.request_builder.context(card) == 320
    assert core.gateway.placement.candidates("m")[0].max_tokens == 320

"""Eight simulated GPUs: their costs give the table that they are made from, and nothing is lost in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.scheduler import costs
from bench.scheduler.policies import Modelled, least_load_first, modelled, round_robin
from instar.replay.outcomes import RequestOutcome
from instar.replay.schemas import Arrival
from instar.simulate.cluster import TOO_LONG
from instar.simulate.dispatcher import Dispatcher
from instar.simulate.gateway import ActiveInstance
from instar.simulate.grouped import GroupedCluster

DISPATCHERS: dict[str, Callable[[], Dispatcher | None]] = {
    "ours": lambda: None,
    "round-robin": round_robin,
    "least-load-first": least_load_first,
}


def short(at_s: float) -> Arrival:
    return Arrival(at_s, costs.SHORT_PROMPT, costs.SHORT_OUTPUT)


def long(at_s: float, output: int = 512) -> Arrival:
    return Arrival(at_s, costs.LONG_PROMPT, output)


def ours(arrivals: Sequence[Arrival], seconds: float, degrees: Sequence[int] = (1,) * 8) -> Modelled:
    return modelled(None, arrivals, seconds, degrees)


def degrees_of(run: Modelled) -> list[int]:
    return [group.tp for group in run.cluster.groups.values()]


@pytest.mark.parametrize("tp", costs.RATE)
def test_short_requests_alone_get_the_rates_of_the_table(tp: int) -> None:
    run = modelled(None, [short(0.0) for _ in range(100)], 1000, (tp,), is_static=True)
    ended_s = max(one.last_s or 0.0 for one in run.record.outcomes)
    assert 100 * (costs.SHORT_PROMPT + costs.SHORT_OUTPUT) / ended_s == pytest.approx(
        costs.RATE[tp], rel=0.01
    )


@pytest.mark.parametrize("name", DISPATCHERS)
@settings(max_examples=3, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 120), st.sampled_from([False, False, False, True])), max_size=25))
@example([(45.0, True), (45.0, True)])  # each was ahead of the other, and both waited
def test_every_request_ends_once_whatever_comes(name: str, mix: list[tuple[float, bool]]) -> None:
    arrivals = [(long if is_long else short)(at_s) for at_s, is_long in mix] or [short(0.0)]
    run = modelled(DISPATCHERS[name](), arrivals, 2000)
    assert all(one.is_served and one.events == one.output_asked for one in run.record.outcomes)
    # The prompt's last token gives one.
    assert run.num_tokens == sum(one.prompt_tokens + one.output_tokens - 1 for one in arrivals)
    groups = run.cluster.groups.values()
    assert sorted(number for group in groups for number in group.numbers) == list(range(8))
    for one in run.cluster.instances.values():
        one.instance.scheduler.check_integrity()
        assert one.instance.scheduler.blocks.num_used == 0 and one.num_own == 0
    if name == "ours":  # and the shape is what it was
        assert degrees_of(run) == [1] * 8
        assert run.transforms("scale_up") == run.transforms("scale_down")


def test_consecutive_long_requests_share_one_group() -> None:
    run = ours([long(30.0 * i) for i in range(5)], 400)
    assert (run.transforms("scale_up"), run.transforms("scale_down")) == (1, 1)


@pytest.mark.slow
def test_a_long_request_every_minute_does_not_swing_the_shape_with_it() -> None:
    run = ours([long(60.0 * i) for i in range(20)], 1200)
    assert run.transforms("scale_up") <= 14
    assert max(groups for _, _, groups in run.rates) == 1


def test_static_instances_refuse_what_they_cannot_hold() -> None:
    run = modelled(None, [short(0.0), long(0.0)], 100, is_static=True)
    assert [one.error == TOO_LONG for one in run.record.outcomes] == [False, True]


@pytest.mark.slow
def test_shapes_beat_round_robin_and_least_load_first_where_long_requests_meet() -> None:
    def tokens(dispatcher: Dispatcher | None) -> int:
        arrivals = [short(float(i)) for i in range(600)]
        arrivals += [long(30.0 + 60 * i, costs.LONG_OUTPUT) for i in range(10)]
        return modelled(dispatcher, arrivals, 600).num_tokens

    most = tokens(None)
    assert most > 1.1 * tokens(round_robin()) and most > 1.1 * tokens(least_load_first())


def test_a_group_that_every_worker_is_needed_for_parts_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """More comes than it gets done, so it is never empty; four workers alone get more done than comes."""
    homes: dict[int, int] = {}  # by request: the worker that it was sent to last
    send = GroupedCluster._send

    def counting(cluster: GroupedCluster, one: ActiveInstance, outcome: RequestOutcome) -> None:
        homes[outcome.number] = one.instance.number
        send(cluster, one, outcome)

    monkeypatch.setattr(GroupedCluster, "_send", counting)
    run = ours([*(short(i * 1.0) for i in range(240)), long(20.0, 64)], 240, (1,) * 4)
    assert (run.transforms("scale_up"), run.transforms("scale_down")) == (1, 1)
    assert degrees_of(run) == [1] * 4
    assert sum(groups for _, _, groups in run.rates) / len(run.rates) < 0.6
    counts = [list(homes.values()).count(number) for number in range(4)]
    assert max(counts) - min(counts) <= 12, counts

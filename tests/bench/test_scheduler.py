"""The model of eight GPUs: its costs give the table it is made from, and nothing is lost in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scheduler import costs
from bench.scheduler.model import Cluster, Request, Scheduler
from bench.scheduler.policies import LeastLoad, Ours, RoundRobin
from bus.policy import Policy

SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "ours": lambda: Ours(Policy()),
    "round-robin": lambda: RoundRobin(Policy()),
    "least-load-first": lambda: LeastLoad(Policy()),
}


def short(number: int, at_s: float) -> Request:
    return Request(number, at_s, costs.SHORT_PROMPT, costs.SHORT_OUTPUT)


def long(number: int, at_s: float, output: int = 512) -> Request:
    return Request(number, at_s, costs.LONG_PROMPT, output)


@pytest.mark.parametrize("tp", costs.RATE)
def test_short_requests_alone_get_the_rates_of_the_table(tp: int) -> None:
    cluster = Cluster(Ours(), (tp,))
    requests = [short(i, 0.0) for i in range(100)]
    cluster.run(requests, 1000)
    ended_s = max(one.end_s or 0.0 for one in requests)
    assert 100 * (costs.SHORT_PROMPT + costs.SHORT_OUTPUT) / ended_s == pytest.approx(
        costs.RATE[tp], rel=0.01
    )


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 120), st.sampled_from([False, False, False, True])), max_size=25))
def test_every_request_ends_once_whatever_comes(name: str, mix: list[tuple[float, bool]]) -> None:
    requests = [(long if is_long else short)(i, at_s) for i, (at_s, is_long) in enumerate(mix)]
    cluster = Cluster(SCHEDULERS[name]())
    cluster.run(requests, 2000)
    assert all(one.end_s is not None and one.generated == one.output for one in requests)
    assert cluster.num_tokens == sum(one.num_tokens - 1 for one in requests)  # the prompt's last gives one
    assert sorted(worker for unit in cluster.units.values() for worker in unit.workers) == [
        f"w{i}" for i in range(8)
    ]
    if name == "ours":  # and the shape is what it was
        assert [unit.tp for unit in cluster.units.values()] == [1] * 8
        assert cluster.num_transforms["up"] == cluster.num_transforms["down"]


def test_consecutive_long_requests_share_one_group() -> None:
    cluster = Cluster(Ours(Policy()))
    cluster.run([long(i, 30.0 * i) for i in range(5)], 400)
    assert cluster.num_transforms == {"up": 1, "down": 1}


def test_a_long_request_every_minute_does_not_swing_the_shape_with_it() -> None:
    cluster = Cluster(Ours(Policy()))
    cluster.run([long(i, 60.0 * i) for i in range(20)], 1200)
    assert cluster.num_transforms["up"] <= 14
    assert max(groups for _, _, groups in cluster.rates) == 1


def test_static_instances_refuse_what_they_cannot_hold() -> None:
    cluster = Cluster(Ours())
    requests = [short(0, 0.0), long(1, 0.0)]
    cluster.run(requests, 100)
    assert [one.is_refused for one in requests] == [False, True]


def test_shapes_beat_round_robin_and_least_load_first_where_long_requests_meet() -> None:
    def tokens(scheduler: Scheduler) -> int:
        requests = [short(i, float(i)) for i in range(600)]
        requests += [long(600 + i, 30.0 + 60 * i, costs.LONG_OUTPUT) for i in range(10)]
        cluster = Cluster(scheduler)
        cluster.run(requests, 600)
        return cluster.num_tokens

    ours = tokens(Ours(Policy()))
    assert ours > 1.1 * tokens(RoundRobin(Policy())) and ours > 1.1 * tokens(LeastLoad(Policy()))


def test_a_group_that_every_worker_is_needed_for_parts_under_load() -> None:
    """More comes than it gets done, so it is never empty; four workers alone get more done than comes."""
    cluster = Cluster(Ours(Policy()), (1,) * 4)
    requests = [short(i, i * 1.0) for i in range(240)]
    cluster.run([*requests, long(240, 20.0, 64)], 240)
    assert cluster.num_transforms == {"up": 1, "down": 1}
    assert [unit.tp for unit in cluster.units.values()] == [1] * 4
    assert sum(groups for _, _, groups in cluster.rates) / len(cluster.rates) < 0.6
    homes = [sum(one.home == f"w{i}" for one in requests) for i in range(4)]
    assert max(homes) - min(homes) <= 12

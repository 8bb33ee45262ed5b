"""The costs of morphs on these devices, learned from their reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bus.morphs import MorphReport
from controller.planning.lever_costs import (
    ALONE,
    ASSUMED_COSTS,
    GROUP_SPEED,
    HOLD_S,
    MOST_PREDICTED,
    WEIGHT,
    LeverCosts,
    observe_cost,
    observe_speed,
    predict,
)


def report(
    kind: Any, seconds: float, state: Any = "applied", at_s: float = 100.0, **numbers: float
) -> MorphReport:
    started_ms = round(1000 * (at_s - seconds))
    return MorphReport(
        id="m1",
        kind=kind,
        target="m@w0",
        worker="w0",
        epoch=1,
        state=state,
        reason="",
        started_ms=started_ms,
        ended_ms=round(1000 * at_s),
        numbers=dict(numbers),
    )


def transform(before: int, after: int, seconds: float, at_s: float = 100.0) -> MorphReport:
    return report(
        "transform",
        seconds,
        at_s=at_s,
        tp_before=before,
        tp_after=after,
        layers=8,
        layers_done=8,
        moving_seconds=0.2,
    )


def test_a_cost_is_assumed_until_it_is_measured_and_a_mean_from_then_on() -> None:
    costs = LeverCosts()
    assert costs.kinds["swap"] == ASSUMED_COSTS["swap"] and costs.kinds["swap"].basis == "assumed"
    costs = observe_cost(
        costs,
        report("swap", 9.0, halves_applied=4, copy_seconds=1.6, boundary_seconds=0.4, bytes_copied=4000),
    )
    first = costs.kinds["swap"]
    assumed = ASSUMED_COSTS["swap"]
    assert first.duration_s == pytest.approx(assumed.duration_s + WEIGHT * (0.5 - assumed.duration_s))
    assert first.stalled_s == pytest.approx(assumed.stalled_s + WEIGHT * (0.1 - assumed.stalled_s))
    assert first.nbytes == pytest.approx(WEIGHT * 1000)
    assert first.basis == "measured"
    costs = observe_cost(costs, report("swap", 9.0, halves_applied=4, copy_seconds=6.0))
    assert costs.kinds["swap"].duration_s == pytest.approx(
        first.duration_s + WEIGHT * (1.5 - first.duration_s)
    )


def test_a_load_is_expected_to_take_as_long_as_its_bytes_say() -> None:
    costs = LeverCosts()
    assert costs.load_s(0) == costs.load_s(10**9) == ASSUMED_COSTS["load"].duration_s
    costs = observe_cost(costs, report("deploy", 4.0, bytes_copied=2e9))
    assert costs.load_s(0) == 4.0
    assert (costs.load_s(10**9), costs.load_s(8 * 10**9)) == (2.0, 16.0)
    for _ in range(20):  # a small model many times: the rate is a mean, and the large one as slow as before
        costs = observe_cost(costs, report("deploy", 0.2, bytes_copied=1e8))
    assert costs.load_s(8 * 10**9) == pytest.approx(16.0)


def test_one_half_at_leisure_says_little_of_a_whole_swap() -> None:
    costs = observe_cost(LeverCosts(), report("swap", 0.32, halves_applied=1, copy_seconds=0.32))
    assert costs.kinds["swap"].duration_s < 0.04
    costs = observe_cost(costs, report("swap", 4.0, halves_applied=40, copy_seconds=4.0))
    assert costs.kinds["swap"].duration_s == pytest.approx(0.1, rel=0.05)


def test_a_swap_lasts_as_its_work_by_the_share_of_the_time() -> None:
    costs = observe_cost(LeverCosts(), report("swap", 8.0, halves_applied=40, copy_seconds=4.0))
    assert costs.seconds("swap", 10) == pytest.approx(1.0, rel=0.05)
    assert costs.seconds("swap", 10, share=0.25) == 4 * costs.seconds("swap", 10)


def test_a_swap_from_a_disk_lasts_as_its_reads_unless_its_work_takes_longer() -> None:
    numbers = {"halves_applied": 40, "copy_seconds": 4.0, "bytes_copied": 4e9}
    costs = observe_cost(LeverCosts(), report("swap", 40.0, **numbers, disk_seconds=40.0))
    assert costs.kinds["swap"].disk_s == pytest.approx(1.0, rel=0.05)
    assert costs.seconds("swap", 10) == costs.seconds("swap", 10, share=0.25) == pytest.approx(10.0, rel=0.05)
    assert costs.seconds("swap", 10, share=0.05) == pytest.approx(20.0, rel=0.05)
    for _ in range(3):  # from memory again
        costs = observe_cost(costs, report("swap", 4.0, **numbers))
    assert costs.seconds("swap", 10) == pytest.approx(1.0, rel=0.05)


def test_a_kind_of_morph_that_was_late_promises_more() -> None:
    costs = LeverCosts()
    for seconds in (3.0, 3.0, 3.0):
        costs = observe_cost(
            predict(costs, "m1", costs.missed.get("merge", 0.0) * 2.0 + 2.0), transform(1, 2, seconds)
        )
    assert costs.missed == {"merge": pytest.approx(0.5 * (1 - (1 - WEIGHT) ** 3))} and not costs.predicted
    assert costs.seconds("merge") == 3.0 * (1 + costs.missed["merge"])
    assert costs.seconds("part") == ASSUMED_COSTS["part"].duration_s
    costs = observe_cost(predict(costs, "m1", 2.0 * (1 + costs.missed["merge"])), transform(1, 2, 3.0))
    assert costs.missed["merge"] == pytest.approx(0.5 * (1 - (1 - WEIGHT) ** 4))  # against the costs alone
    soon = observe_cost(predict(costs, "m1", 9.0), transform(1, 2, 3.0))
    assert soon.missed["merge"] == pytest.approx(costs.missed["merge"] * (1 - WEIGHT))
    waited = report("swap", 2.0, halves_applied=1, wait_seconds=1.5)  # for pages: not its fault
    assert observe_cost(predict(costs, "m1", 0.5), waited).missed["swap"] == 0.0


def test_what_never_ends_is_forgotten_in_the_end() -> None:
    costs = LeverCosts()
    for number in range(500):
        costs = predict(costs, f"m{number}", 1.0)
    assert len(costs.predicted) == MOST_PREDICTED and "m499" in costs.predicted
    failed = replace(report("swap", 1.0, "failed"), id="m499")
    assert observe_cost(costs, failed).missed == {} and "m499" not in observe_cost(costs, failed).predicted


def test_up_and_down_are_kinds_of_their_own_and_a_group_is_held_in_between() -> None:
    costs = observe_cost(LeverCosts(), transform(1, 2, 3.0, at_s=100.0))
    assert (costs.kinds["merge"].duration_s, costs.kinds["merge"].stalled_s) == (3.0, 0.2)
    assert costs.kinds["part"] == ASSUMED_COSTS["part"]
    costs = observe_cost(costs, transform(2, 1, 1.0, at_s=110.0))
    assert costs.kinds["part"].duration_s == 1.0
    assert costs.hold_s == pytest.approx(HOLD_S + WEIGHT * (10.0 - HOLD_S)) and not costs.merged_s


@pytest.mark.parametrize(
    "useless",
    [
        report("swap", 1.0, "deferred", halves_applied=2),
        report("swap", 1.0, halves_applied=0),
        transform(2, 2, 1.0),
        report("transform", 1.0, tp_before=1, tp_after=2, layers=8, layers_done=3),
        report("retire", 1.0),
    ],
)
def test_a_morph_that_changed_nothing_says_nothing(useless: MorphReport) -> None:
    assert observe_cost(LeverCosts(), useless) == LeverCosts()


def test_the_speed_of_a_group_is_assumed_until_both_were_busy_here() -> None:
    costs = observe_speed(LeverCosts(), 2, 300.0)
    assert costs.speed(2) == (GROUP_SPEED[2], "assumed")
    costs = observe_speed(costs, 1, 200.0)
    assert costs.speed(2) == (1.5, "measured")
    assert observe_speed(costs, 1, 0.0) == costs


def test_the_throughput_of_an_instance_is_assumed_until_one_was_busy() -> None:
    none = LeverCosts()
    assert none.tokens_per_s(1) == (ALONE, "assumed")
    assert none.tokens_per_s(2) == (ALONE * GROUP_SPEED[2], "assumed")
    alone = observe_speed(none, 1, 200.0)
    assert alone.tokens_per_s(1) == (200.0, "measured")
    assert alone.tokens_per_s(2) == (200 * GROUP_SPEED[2], "assumed")
    assert observe_speed(alone, 2, 250.0).tokens_per_s(2) == (250.0, "measured")


def test_the_time_to_load_an_instance_is_that_of_the_last_deployments() -> None:
    costs = observe_cost(LeverCosts(), report("deploy", 4.0, bytes_copied=1000))
    assert (costs.kinds["load"].duration_s, costs.kinds["load"].basis) == (4.0, "measured")
    assert observe_cost(costs, report("deploy", 9.0, "failed")) == costs

"""The policy under ten simulated minutes: it neither flaps nor gets stuck, whatever the load does."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import MorphOutcome
from bus.policy import Mode, Policy
from tests.support.policy_simulator import Shape, Simulated, Window, simulate, steady

MINUTES_10 = 600.0
HOLD_S, BLOCKS = 4.0, 16  # of a request: at full precision 768 blocks hold 12 a second

MODES: tuple[Mode, ...] = ("manual", "accuracy", "default", "performance")
Rate = Callable[[float], float]


def run(
    rate: Rate, policy: Policy | None = None, seconds: float = MINUTES_10
) -> tuple[Simulated, list[Window]]:
    instance = Simulated("m@w0", steady(rate, seconds, BLOCKS, HOLD_S))
    return instance, simulate([instance], policy or Policy(), seconds)


def burst(at_s: float) -> float:
    """Half of what full precision holds, and for a minute a third more than it does."""
    return 16.0 if 60 <= at_s < 120 else 5.0


def pauses(instance: Simulated) -> list[float]:
    return [later - earlier for (earlier, _), (later, _) in pairwise(instance.morphs)]


def pauses_before_returns(instance: Simulated) -> list[float]:
    """Seconds from a morph to the return of layers that follows it; relief waits for no cool-down."""
    pairs = pairwise(instance.morphs)
    return [later - earlier for (earlier, _), (later, one) in pairs if one.lever == "swap_up"]


@pytest.mark.parametrize("period_s", [0.5, 1, 2, 3, 5, 7, 10, 20, 45, 120])
@pytest.mark.parametrize("mode", MODES[1:])
def test_a_load_that_oscillates_around_the_threshold_returns_at_most_once_in_a_cool_down(
    period_s: float, mode: Mode
) -> None:
    def oscillating(at_s: float) -> float:
        return 10.5 + 3 * math.sin(2 * math.pi * at_s / period_s)

    instance, _ = run(oscillating, Policy(mode=mode))
    assert all(pause >= 5.0 for pause in pauses_before_returns(instance))
    assert len(instance.morphs) <= 40  # of 120 cool-downs: a way back that was too early is not hurried again


@pytest.mark.parametrize("level", [0.4, 0.5, 0.6, 0.75, 0.85, 0.9])
def test_noise_around_a_steady_load_makes_the_shape_settle(level: float) -> None:
    """After the first minute a load that stays where it is asks for nothing more."""

    def noisy(at_s: float) -> float:
        return 12 * level * (1 + 0.04 * math.sin(at_s * 7) + 0.03 * math.sin(at_s * 1.3))

    instance, _ = run(noisy)
    assert [at_s for at_s, _ in instance.morphs if at_s > 60] == []


def test_a_burst_is_met_and_afterwards_every_layer_is_back_at_full() -> None:
    instance, windows = run(burst)
    first, _ = instance.morphs[0]
    assert 60 < first < 66
    during = [window for window in windows if 80 < window.at_s < 120]
    assert min(window.kv_blocks for window in during) > 768 * 1.3
    assert max(window.layers_below_full for window in during) <= 16
    assert windows[-1].layers_below_full == 0
    assert windows[-1].kv_blocks == 768
    assert sum(decision.count for _, decision in instance.morphs if decision.lever == "swap_up") == sum(
        decision.count for _, decision in instance.morphs if decision.lever == "swap_down"
    )


def test_the_modes_are_points_on_one_trade_off() -> None:
    def cost(mode: Mode) -> tuple[float, float]:
        """Layers below full on average, seconds waited in all."""
        instance, windows = run(burst, Policy(mode=mode))
        below = sum(window.layers_below_full for window in windows) / len(windows)
        return below, sum(instance.waits)

    manual, accuracy, default, performance = (cost(mode) for mode in MODES)
    # Relief is as large as the queue needs, so the mode that may go further does not go further here.
    assert 0 == manual[0] < accuracy[0] < min(default[0], performance[0])
    assert manual[1] > accuracy[1] > default[1] >= performance[1]


def test_a_burst_shorter_than_the_windows_changes_nothing() -> None:
    instance, _ = run(lambda at_s: 40.0 if 60 <= at_s < 60.7 else 3.0)
    assert instance.morphs == []


def test_silence_of_the_monitor_in_the_middle_of_a_burst_changes_nothing() -> None:
    instance = Simulated("m@w0", steady(burst, 300, BLOCKS, HOLD_S), is_silent=lambda at_s: 50 < at_s < 118)
    simulate([instance], Policy(), 300)
    assert all(not 50 < at_s < 118 for at_s, _ in instance.morphs)


@pytest.mark.parametrize("outcome", ["deferred", "failed", "conflict"])
def test_a_worker_that_refuses_is_asked_ever_more_seldom(outcome: MorphOutcome) -> None:
    instance = Simulated("m@w0", steady(lambda _: 20.0, MINUTES_10, BLOCKS, HOLD_S), answer=outcome)
    simulate([instance], Policy(), MINUTES_10)
    assert 8 <= len(instance.morphs) <= 15
    assert max(pauses(instance)) >= 60


def test_free_pages_go_first_and_come_without_a_layer() -> None:
    shape = Shape(free_pages=52 + 10 * 32)
    instance = Simulated("m@w0", steady(lambda _: 11.0, 60, BLOCKS, HOLD_S), shape)
    windows = simulate([instance], Policy(), 60)
    assert [decision.lever for _, decision in instance.morphs] == ["resize"]
    assert windows[-1].kv_blocks == 768 + 80
    assert windows[-1].layers_below_full == 0


def test_a_cluster_is_judged_instance_by_instance() -> None:
    rates = (2.0, 14.0, 5.0, 20.0)
    cluster = [
        Simulated(f"m@w{i}", steady(lambda _, rate=rate: rate, 60, BLOCKS, HOLD_S))  # type: ignore[misc]
        for i, rate in enumerate(rates)
    ]
    simulate(cluster, Policy(), 60)
    assert [bool(instance.morphs) for instance in cluster] == [False, True, False, True]


@settings(max_examples=25, deadline=None)
@given(
    levels=st.lists(st.floats(0, 30), min_size=1, max_size=12),
    mode=st.sampled_from(MODES[1:]),
    windows=st.integers(1, 5),
    cooldown_s=st.floats(0, 20),
)
def test_any_load_keeps_to_the_limits_and_the_cool_down_and_ends_at_full_precision(
    levels: list[float], mode: Mode, windows: int, cooldown_s: float
) -> None:
    busy_s, calm_s = 10.0 * len(levels), 600.0
    policy = Policy(mode=mode, windows=windows, cooldown_s=cooldown_s)
    instance = Simulated(
        "m@w0",
        steady(lambda at_s: levels[int(at_s // 10)] if at_s < busy_s else 0.0, busy_s, BLOCKS, HOLD_S),
    )
    seen = simulate([instance], policy, busy_s + calm_s)
    limit = {"accuracy": 8, "default": 16, "performance": 32}[mode]
    assert max(window.layers_below_full for window in seen) <= limit
    assert all(pause >= cooldown_s for pause in pauses_before_returns(instance))
    assert seen[-1].layers_below_full == 0
    assert instance.num_waiting == 0

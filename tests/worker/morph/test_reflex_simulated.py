"""The reflex under simulated hours: it neither flaps nor gets stuck, whatever the load does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.policy import Mode, Policy
from instar.replay.schemas import Arrival
from instar.simulate.calibration import StepCosts
from instar.simulate.cluster import SimulatedCluster
from tests.support.reflex_simulator import KV_PAGES, STEP_S, Simulated, instance, steady
from tests.support.simulations import SMALL

MODES: tuple[Mode, ...] = ("manual", "accuracy", "default", "performance")
MINUTES_10, HOUR = 600.0, 3600.0


def burst(at_s: float) -> float:
    """Half of what full precision holds, and for a minute a third more than it does."""
    return 16.0 if 60 <= at_s < 120 else 5.0


PERIODS_S = (10, 20, 45, 90, 120, 240, 400, 600, 1200, 3600)  # an hour of each
LONG_STEPS = msgspec.structs.replace(SMALL, step=StepCosts(0.2, 0.0001, 0.0002, 1e-7, SMALL.step.slowdowns))


def oscillating() -> Iterator[Arrival]:
    """Between nothing and 0.8 requests per second, where full precision has room for 0.5."""
    due = 0.0
    for tick in range(10 * 36_000):
        at_s = tick / 10
        due += 0.04 * (1 - math.cos(2 * math.pi * at_s / PERIODS_S[tick // 36_000]))
        if due >= 1:
            due -= 1
            yield Arrival(at_s, 100, 50)


def test_ten_hours_of_an_oscillating_load_do_not_swing_the_shape() -> None:
    """The scheduler and the reflex that serve: layers go back once in a period, and never for a moment."""
    cluster = SimulatedCluster(LONG_STEPS, 1, Policy())
    record = cluster.run(list(oscillating()), drain_s=60.0)
    assert {outcome for _, outcome in record.levers} == {"applied"}
    turns = [(one.started_ms / 1000, "the loss by the profile falls" in one.reason) for one in record.morphs]
    for hour, period_s in enumerate(PERIODS_S):
        of_hour = [turn for turn in turns if hour * HOUR <= turn[0] < (hour + 1) * HOUR]
        ways_back = sum(now and not before for (_, before), (_, now) in pairwise(of_hour))
        assert ways_back <= HOUR / period_s
        regretted = [
            later - earlier
            for (earlier, is_return), (later, is_again) in pairwise(of_hour)
            if is_return and not is_again
        ]
        assert min(regretted, default=HOUR) > min(10, period_s / 3)
    assert ways_back == 1 and all(one.is_served for one in record.outcomes)
    assert all(one.instance.shape.is_at_rest for one in cluster.instances.values())


@pytest.mark.parametrize("level", [0.4, 0.5, 0.6, 0.75, 0.85, 0.9])
def test_noise_around_a_steady_load_makes_the_shape_settle(level: float) -> None:
    """After the first minute a load that stays where it is asks for nothing more."""

    def noisy(at_s: float) -> float:
        return 12 * level * (1 + 0.04 * math.sin(at_s * 7) + 0.03 * math.sin(at_s * 1.3))

    assert [at_s for at_s, _ in instance(noisy, MINUTES_10).morphs if at_s > 60] == []


def test_a_burst_is_met_within_a_second_and_soon_after_it_every_layer_is_back() -> None:
    one = instance(burst, 240.0)
    first, _ = one.morphs[0]
    assert 60 < first < 64  # the cache fills first
    assert max(one.waits) < 1.0
    last_pressure = max(at_s for at_s, decision in one.morphs if decision.lever != "swap_up")
    assert last_pressure < 121
    full_again = max(i for i, loss in enumerate(one.losses) if loss) * STEP_S
    assert full_again < 120 + 4 + 10  # the last requests end 4 s after they came
    assert one.blocks[-1] == KV_PAGES // 4 and one.loss == 0.0


def test_the_modes_are_points_on_one_trade_off() -> None:
    def hard(at_s: float) -> float:
        return 40.0 if 60 <= at_s < 120 else 5.0

    def cost(mode: Mode) -> tuple[float, float]:
        """The mean loss, and the seconds waited in all."""
        one = instance(hard, MINUTES_10, Policy(mode=mode))
        return sum(one.losses) / len(one.losses), sum(one.waits)

    manual, accuracy, default, performance = (cost(mode) for mode in MODES)
    assert 0 == manual[0] < accuracy[0] <= default[0] < performance[0]
    assert manual[1] > accuracy[1] >= default[1] > performance[1]


def test_a_burst_that_the_cache_holds_changes_nothing() -> None:
    assert instance(lambda at_s: 40.0 if 60 <= at_s < 60.7 else 3.0, 120.0).morphs == []


def test_a_worker_that_refuses_is_asked_ever_more_seldom() -> None:
    one = Simulated(steady(lambda _: 20.0, MINUTES_10), is_refusing=True).run(MINUTES_10)
    pauses = [later - earlier for (earlier, _), (later, _) in pairwise(one.morphs)]
    assert len(one.morphs) < MINUTES_10 / 8 + 12
    assert max(pauses) >= 8.0


def test_free_pages_go_first_and_come_without_a_layer() -> None:
    one = Simulated(steady(lambda _: 11.0, 60), pages_spare=10 * 32).run(60)
    assert [decision.lever for _, decision in one.morphs] == ["resize"]
    assert one.blocks[-1] == 768 + 80 and one.loss == 0.0


@settings(max_examples=25, deadline=None)
@given(
    levels=st.lists(st.floats(0, 30), min_size=1, max_size=12),
    mode=st.sampled_from(MODES[1:]),
    windows=st.integers(1, 5),
    cooldown_s=st.floats(0, 20),
    loss_budget=st.sampled_from([None, 0.0, 0.0001, 0.01, 1.0]),
)
def test_any_load_keeps_to_the_budget_and_ends_at_full_precision(
    levels: list[float], mode: Mode, windows: int, cooldown_s: float, loss_budget: float | None
) -> None:
    busy_s, calm_s = 10.0 * len(levels), 600.0
    policy = Policy(mode=mode, windows=windows, cooldown_s=cooldown_s, loss_budget=loss_budget)
    jobs = steady(lambda at_s: levels[int(at_s // 10)] if at_s < busy_s else 0.0, busy_s)
    one = Simulated(jobs, policy).run(busy_s + calm_s)
    in_force = policy.in_force()
    assert in_force and max(one.losses) <= in_force.most_loss + 1e-6
    assert one.loss == 0.0 and one.num_waiting == 0 and one.blocks[-1] == KV_PAGES // 4

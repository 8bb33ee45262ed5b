"""The reflex under simulated hours: it neither flaps nor gets stuck, whatever the load does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.policy import Mode, Policy
from instar.replay.schemas import Arrival
from instar.simulate.calibration import (
    CalibratedMemory,
    EngineCalibration,
    EngineLimits,
    MorphCosts,
    StepCosts,
)
from instar.simulate.cluster import Record, SimulatedCluster
from instar.simulate.engine import SimulatedInstance
from instar.simulate.morphs import SimulatedMorph
from tests.support.simulations import SMALL

MODES: tuple[Mode, ...] = ("manual", "accuracy", "default", "performance")
MINUTES_5, HOUR = 300.0, 3600.0
STEP_S = 0.05

# About a 7B model on a 24 GB device, pages of 2 MiB. A request holds 16 blocks for 4 s, so that there is room
# for 11 a second in full precision.
KV_BLOCKS, PROMPT, OUTPUT = 768, 944, 80
LARGE = msgspec.structs.replace(
    SMALL,
    num_layers=32,
    order=list(range(32)),
    limits=EngineLimits(max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=16384, block_tokens=64),
    memory=CalibratedMemory(
        page_bytes=2 << 20,
        kv_pages=4 * KV_BLOCKS,
        kv_blocks=KV_BLOCKS,
        spare_pages=0,
        layer_pages={"full": 192, "int8": 96, "int4": 52},
        attention_pages={"full": 96, "int8": 48, "int4": 26},
    ),
    step=StepCosts(STEP_S, 0.0, 0.0, 0.0),
    below_full=dict.fromkeys(["int8", "int4"], StepCosts(STEP_S, 0.0, 0.0, 0.0)),
    morph=MorphCosts(half_s=0.01, byte_s=0.0, share=1.0),
    transit_s=0.0,
)


def steady(rate: Callable[[float], float], seconds: float) -> list[Arrival]:
    """Requests of one size at `rate(at_s)` a second, evenly spaced."""
    found, at_s = list[Arrival](), 0.0
    while at_s < seconds:
        per_second = rate(at_s)
        if per_second > 0:
            found.append(Arrival(at_s, PROMPT, OUTPUT))
        at_s += 1 / per_second if per_second > 0 else STEP_S
    return found


def simulated(
    rate: Callable[[float], float],
    seconds: float,
    policy: Policy | None = None,
    calibration: EngineCalibration = LARGE,
    drain_s: float = 300.0,
) -> tuple[Record, SimulatedInstance]:
    """Run one worker under a load."""
    cluster = SimulatedCluster(calibration, 1, policy or Policy())
    record = cluster.run(steady(rate, seconds), drain_s)
    return record, cluster.instances[0].instance


def starts_s(record: Record) -> list[float]:
    return [one.started_ms / 1000 for one in record.morphs]


def burst(at_s: float) -> float:
    """Half of what full precision holds, and for a minute a third more than it does."""
    return 16.0 if 60 <= at_s < 120 else 5.0


PERIODS_S = (10, 20, 45, 90, 120, 240, 400, 600, 1200, 3600)  # an hour of each
LONG_STEPS = msgspec.structs.replace(
    SMALL,
    step=StepCosts(0.2, 0.0001, 0.0002, 1e-7),
    below_full={
        "int8": StepCosts(0.24, 0.00011, 0.00024, 1e-7),
        "int4": StepCosts(0.4, 0.00015, 0.0004, 1e-7),
    },
)


def oscillating() -> Iterator[Arrival]:
    """Between nothing and 0.8 requests per second, where full precision has room for 0.5."""
    due = 0.0
    for tick in range(10 * 36_000):
        at_s = tick / 10
        due += 0.04 * (1 - math.cos(2 * math.pi * at_s / PERIODS_S[tick // 36_000]))
        if due >= 1:
            due -= 1
            yield Arrival(at_s, 100, 50)


@pytest.mark.slow
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


MORE_LEVELS = [pytest.param(level, marks=pytest.mark.slow) for level in (0.5, 0.75, 0.85, 0.9)]


@pytest.mark.parametrize("level", [0.4, 0.6, *MORE_LEVELS])
def test_noise_around_a_steady_load_makes_the_shape_settle(level: float) -> None:
    """After the first minute a load that stays where it is asks for nothing more."""

    def noisy(at_s: float) -> float:
        return 12 * level * (1 + 0.04 * math.sin(at_s * 7) + 0.03 * math.sin(at_s * 1.3))

    record, _ = simulated(noisy, MINUTES_5)
    assert [at_s for at_s in starts_s(record) if 60 < at_s < MINUTES_5] == []


def test_a_burst_is_met_within_a_second_and_soon_after_it_every_layer_is_back() -> None:
    record, instance = simulated(burst, 240.0)
    assert 60 < starts_s(record)[0] < 64  # the cache fills first
    assert max(one.ttft_s or math.inf for one in record.outcomes) < 1.0 + STEP_S
    reliefs = [one for one in record.morphs if "the loss by the profile falls" not in one.reason]
    assert max(one.started_ms for one in reliefs) < 121_000
    below = [one["at_s"] for one in record.samples if one["instances"]["small@w0"]["layers_below_full"]]
    assert max(below) < 120 + 4 + 10  # the last requests end 4 s after they came
    assert instance.is_as_made


def test_the_modes_are_points_on_one_trade_off() -> None:
    def hard(at_s: float) -> float:
        return 40.0 if 20 <= at_s < 40 else 5.0

    def cost(mode: Mode) -> tuple[float, float]:
        """The loss by the profile, summed over tokens, and the seconds waited in all."""
        record, _ = simulated(hard, 60.0, Policy(mode=mode))
        return record.tally.lost_quality, sum(one.ttft_s or math.inf for one in record.outcomes)

    manual, accuracy, default, performance = (cost(mode) for mode in MODES)
    assert 0 == manual[0] < accuracy[0] <= default[0] < performance[0]
    assert manual[1] > accuracy[1] >= default[1] > performance[1]


def test_a_burst_that_the_cache_holds_changes_nothing() -> None:
    record, _ = simulated(lambda at_s: 40.0 if 60 <= at_s < 60.7 else 3.0, 120.0)
    assert record.morphs == []


@pytest.mark.slow
def test_a_worker_that_refuses_is_asked_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedMorph, "_prepare", lambda self, instance, turn: False)
    record, _ = simulated(lambda _: 13.0, MINUTES_5, drain_s=0.0)
    assert {one.state for one in record.morphs} == {"deferred"}
    pauses = [later - earlier for earlier, later in pairwise(starts_s(record))]
    assert len(record.morphs) < MINUTES_5 / 8 + 12
    assert max(pauses) >= 8.0


def test_free_pages_go_first_and_come_without_a_layer() -> None:
    memory = msgspec.structs.replace(LARGE.memory, spare_pages=10 * 32)
    calibration = msgspec.structs.replace(LARGE, memory=memory)
    record, instance = simulated(lambda _: 10.5, 60.0, calibration=calibration)
    assert [one.kind for one in record.morphs] == ["resize"]
    assert instance.blocks.capacity == KV_BLOCKS + 80 and record.tally.lost_quality == 0.0


@contextmanager
def losses_noted() -> Iterator[list[float]]:
    """Note the loss by the profile after each half that is swapped."""
    found, reshaped = list[float](), SimulatedInstance.reshaped

    def noting(instance: SimulatedInstance, now_s: float) -> None:
        reshaped(instance, now_s)
        found.append(instance.shape.loss)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedInstance, "reshaped", noting)
        yield found


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    levels=st.lists(st.floats(0, 30), min_size=1, max_size=6),
    mode=st.sampled_from(MODES[1:]),
    windows=st.integers(1, 5),
    cooldown_s=st.floats(0, 20),
    loss_budget=st.sampled_from([None, 0.0, 0.0001, 0.01, 1.0]),
)
def test_any_load_keeps_to_the_budget_and_ends_at_full_precision(
    levels: list[float], mode: Mode, windows: int, cooldown_s: float, loss_budget: float | None
) -> None:
    policy = Policy(mode=mode, windows=windows, cooldown_s=cooldown_s, loss_budget=loss_budget)
    busy_s = 10.0 * len(levels)
    levels = [max(level, 0.1) if i == 0 else level for i, level in enumerate(levels)]
    with losses_noted() as losses:
        record, instance = simulated(lambda at_s: levels[int(at_s // 10)], busy_s, policy, drain_s=600.0)
    in_force = policy.in_force()
    assert in_force and max(losses, default=0.0) <= in_force.most_loss + 1e-6
    assert all(one.is_served for one in record.outcomes) and instance.is_as_made

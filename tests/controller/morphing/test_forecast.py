"""Forecasts of the need of KV blocks: what is claimed, how it is scored, and when it is acted on."""

from __future__ import annotations

import math
from collections.abc import Callable

from bus.client import LiveWorker
from bus.link import Restart
from bus.messages import InstanceCard, WorkerCard
from bus.policy import Policy
from bus.settings import MonitorSettings
from controller.failures import Failures
from controller.morphing.forecast import Forecast, Score, expected_blocks, observe, observe_all
from controller.morphing.morpher import Morpher
from tests.support.metrics_samples import metrics_of

LIMIT = 80.0
EVERY_S = 0.5


def follow(needed: Callable[[float], float], seconds: float) -> tuple[Forecast, list[Score], list[float]]:
    """Return the forecast in the end, all scores, and the times at which it is acted on."""
    forecast, scores, acted = Forecast(), list[Score](), list[float]()
    for number in range(round(seconds / EVERY_S)):
        at_s = number * EVERY_S
        forecast, score = observe(forecast, needed(at_s), LIMIT, 100.0 + at_s)
        scores += [score] if score else []
        acted += [at_s] if forecast.expected else []
    return forecast, scores, acted


def ramps(at_s: float) -> float:
    """Every 20 s: calm, from the 5th second on ten blocks more each second, and calm from the 17th on."""
    in_turn = at_s % 20
    return 10.0 + (10 * (in_turn - 5) if 5 < in_turn < 17 else 0.0)


def saw(at_s: float) -> float:
    """Let the load rise, and turn back below the limit."""
    return 20.0 + at_s % 6 * 9


def test_a_load_that_always_rises_to_pressure_is_foreseen_and_acted_on_after_some_right_claims() -> None:
    forecast, scores, acted = follow(ramps, 200.0)
    assert scores.count("right") >= 9 and scores.count("right") > 3 * scores.count("wrong")
    assert forecast.is_trusted
    assert min(acted) > 25, "the first ramps are only scored"
    crossed = [20 * number + 12 for number in range(3, 10)]
    assert all(any(at_s - 3 <= one < at_s for one in acted) for at_s in crossed)


def test_claims_that_do_not_come_true_are_never_acted_on() -> None:
    forecast, scores, acted = follow(saw, 300.0)
    assert len(scores) > 10 and set(scores) == {"wrong"}
    assert not forecast.is_trusted and acted == []


def test_trust_is_lost_again_with_wrong_claims() -> None:
    _, _, before = follow(ramps, 200.0)
    forecast, _, acted = follow(lambda at_s: ramps(at_s) if at_s < 200 else saw(at_s), 400.0)
    assert before == [at_s for at_s in acted if at_s < 200]
    assert not forecast.is_trusted and max(acted) < 300


def test_a_steady_load_claims_nothing_nor_does_one_above_the_limit() -> None:
    for level in (0.0, 50.0, 90.0):
        assert follow(lambda at_s, level=level: level, 60.0)[1] == []  # type: ignore[misc]
    assert follow(lambda at_s: 50 + 2 * math.sin(7 * at_s), 60.0)[1] == []


def test_after_a_gap_the_trend_is_forgotten() -> None:
    forecast = Forecast()
    for number in range(8):
        forecast, _ = observe(forecast, 10.0 * number, LIMIT, 100 + number * EVERY_S)
    assert forecast.trend > 5
    forecast, _ = observe(forecast, 70.0, LIMIT, 110.0)
    assert (forecast.trend, forecast.level) == (0.0, 70.0)


def test_instances_are_followed_by_their_metrics_and_forgotten_with_their_workers() -> None:
    card = InstanceCard(
        id="m@w0",
        model="m",
        model_path="",
        max_model_len=64,
        vocab_size=9,
        num_layers=2,
        dtype="float32",
        block_tokens=16,
    )
    worker = WorkerCard(
        id="w0", epoch=1, host="h", pid=1, device="cpu", page_bytes=1, state="serving", instances=[card]
    )
    live = LiveWorker(worker, 1, 1000)
    forecasts: dict[str, Forecast] = {}
    for at_s, used in enumerate((10, 40, 60, 78, 95)):
        metrics = metrics_of(kv_used=used, kv_blocks=100)
        forecasts, scored = observe_all(forecasts, metrics, [live], 0.8, float(at_s))
    (one,) = scored
    assert (one.instance, one.score, one.numbers["is_right"]) == ("m@w0", "right", 1)
    assert one.words == "a need of more than 80 KV blocks was forecast, and came"
    assert observe_all(forecasts, metrics, [], 0.8, 9.0) == ({}, [])


def test_what_is_expected_is_told_in_whole_steps_and_only_with_trust() -> None:
    forecast, _ = observe(Forecast(at_s=1.0, level=70.0, trend=20.0), 75.0, LIMIT, 1.5)
    assert forecast.claim and expected_blocks({"m@w0": forecast}) == {}
    trusted = Forecast(level=81.0, right=5.0, claim=forecast.claim)
    assert expected_blocks({"m@w0": trusted}) == {"m@w0": 88}


async def test_metrics_that_redis_loses_while_they_are_read_are_forecast_no_more() -> None:
    class LosingBus:
        """A bus whose Redis loses its data while the policy is read."""

        def on_restart(self, restarted: Callable[[Restart], None]) -> None:
            self.restarted = restarted

        async def read_policy(self) -> Policy:
            self.restarted(Restart(data_lost=True, run_id="another"))
            return Policy()

        async def workers(self) -> list[LiveWorker]:
            return []

    bus = LosingBus()
    morpher = Morpher(MonitorSettings(), bus, Failures(bus))  # type: ignore[arg-type]
    morpher._metrics = (0.0, metrics_of())
    await morpher._foresee()
    assert morpher._metrics is None and morpher._forecasts == {}

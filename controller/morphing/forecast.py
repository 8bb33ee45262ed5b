"""A forecast of the KV blocks that instances need, so that relief starts before a burst is there. Pure.

The method is Holt's linear smoothing with a damped trend (Gardner and McKenzie, 1985), over the monitor's
metrics. A forecast of more blocks than the limit, made while fewer are needed, is a claim. It is right if the
need exceeds the limit before the claim is over. Claims are always made and scored, but acted on only as long
as more of them come true than do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from bus.client import LiveWorker
from bus.messages import InstanceTelemetry, Metrics, Number

HORIZON_S: Final = 2.0  # how far ahead
SLACK_S: Final = 1.0  # a claim is over so long after its time
LEVEL, TREND = 0.5, 0.3  # weights of the newest value and of the newest difference
DAMPING: Final = 0.9  # factor of the trend for each second
TRENDS_AHEAD: Final = sum(DAMPING**second for second in range(1, 1 + round(HORIZON_S)))
GAP_S: Final = 3.0  # after so long without metrics it begins anew
MEMORY: Final = 0.9  # weight that each claim leaves to those before it
STEP: Final = 8  # blocks
LEAST_RIGHT: Final = 1.5  # right claims before any is acted on: two of the last few

Score = Literal["right", "wrong"]


@dataclass(frozen=True, slots=True)
class PressureClaim:
    """More than `limit` blocks are needed before `until_s`."""

    limit: float
    until_s: float


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """The smoothed need of an instance in blocks, its trend per second, and how often claims came true."""

    at_s: float = float("-inf")
    level: float = 0.0
    trend: float = 0.0
    claim: PressureClaim | None = None
    right: float = 0.0
    wrong: float = 0.0

    @property
    def is_trusted(self) -> bool:
        return self.right >= LEAST_RIGHT and self.right > self.wrong

    @property
    def may_be_trusted(self) -> bool:
        """True if it can be trusted now, or after one more claim that is right."""
        return MEMORY * self.right + 1.0 >= LEAST_RIGHT

    @property
    def ahead(self) -> float:
        """The blocks that will be needed in HORIZON_S."""
        return max(0.0, self.level + self.trend * TRENDS_AHEAD)

    @property
    def expected(self) -> float:
        """The blocks to make room for; 0.0 unless there is a claim, and claims can be trusted."""
        return self.ahead if self.claim and self.is_trusted else 0.0


def observe(forecast: Forecast, needed: float, limit: float, at_s: float) -> tuple[Forecast, Score | None]:
    """Take the blocks that are needed now. Returns also how the claim ended, if it did.

    limit: of blocks, above which the instance is under pressure.
    """
    return observe_each(forecast, [(at_s, needed)], limit)


def observe_each(
    forecast: Forecast, needs: Iterable[tuple[float, float]], limit: float
) -> tuple[Forecast, Score | None]:
    """Take the blocks that are needed at each of some times. Returns also how the last claim ended."""
    score: Score | None = None
    claim, right, wrong = forecast.claim, forecast.right, forecast.wrong
    before_s, level, trend = forecast.at_s, forecast.level, forecast.trend
    for at_s, needed in needs:
        if claim and (needed > claim.limit or at_s >= claim.until_s):
            score, claim = "right" if needed > claim.limit else "wrong", None
            right, wrong = MEMORY * right + (score == "right"), MEMORY * wrong + (score == "wrong")
        seconds = at_s - before_s
        if 0 < seconds <= GAP_S:
            damped, last = trend * DAMPING**seconds, level
            level = LEVEL * needed + (1 - LEVEL) * (last + damped * seconds)
            trend = TREND * (level - last) / seconds + (1 - TREND) * damped
        else:
            level, trend = needed, 0.0
        if claim is None and needed <= limit < level + trend * TRENDS_AHEAD:
            claim = PressureClaim(limit, at_s + HORIZON_S + SLACK_S)
        before_s = at_s
    return Forecast(at_s=before_s, level=level, trend=trend, claim=claim, right=right, wrong=wrong), score


@dataclass(frozen=True, slots=True)
class Scored:
    """A claim of an instance that is over."""

    instance: str
    score: Score
    claim: PressureClaim
    forecast: Forecast  # after it

    @property
    def words(self) -> str:
        came = "and came" if self.score == "right" else "and did not come"
        return f"a need of more than {self.claim.limit:.0f} KV blocks was forecast, {came}"

    @property
    def numbers(self) -> dict[str, Number]:
        """Return the score, and the decayed counts of right and wrong claims."""
        right, wrong = (round(value, 3) for value in (self.forecast.right, self.forecast.wrong))
        is_right, is_used = int(self.score == "right"), int(self.forecast.is_trusted)
        return {"is_right": is_right, "right": right, "wrong": wrong, "is_used": is_used}


def observe_all(
    forecasts: Mapping[str, Forecast],
    metrics: Metrics,
    workers: Iterable[LiveWorker],
    share: float,
    at_s: float,
) -> tuple[dict[str, Forecast], list[Scored]]:
    """Take the metrics of all instances. share: of the KV blocks, above which there is pressure."""
    block_tokens = {one.id: one.block_tokens for live in workers for one in live.card.instances}
    found, scored = {}, []
    for one in metrics.instances:
        if one.id not in block_tokens:
            continue
        needed = _blocks_needed(one.last, block_tokens[one.id])
        before = forecasts.get(one.id, Forecast())
        found[one.id], score = observe(before, needed, share * one.last.kv_blocks, at_s)
        if score and before.claim:
            scored.append(Scored(one.id, score, before.claim, found[one.id]))
    return found, scored


def expected_blocks(forecasts: Mapping[str, Forecast]) -> dict[str, int]:
    """Return the KV blocks to make room for, by instance; in steps, so that few changes are sent."""
    return {
        name: STEP * math.ceil(forecast.expected / STEP)
        for name, forecast in forecasts.items()
        if forecast.expected
    }


def _blocks_needed(telemetry: InstanceTelemetry, block_tokens: int) -> int:
    """Return the blocks in use and those of the prompts that wait."""
    return telemetry.kv_used + -(-telemetry.waiting_tokens // block_tokens)

"""A ladder of steady rates: how many requests per second each way serves within the limit of TTFT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Final

from bench.common.results import digits
from bench.morph.service import Way
from bench.paper.kept import Job, Kept, Row, turned
from bench.paper.loads import OUTPUT_TOKENS, steady
from bench.paper.run import SLO

RUNGS: Final = 6
RUNG_S: Final = 60.0
DRAIN_S: Final = 20.0
Climbs = dict[str, dict[str, float | None]]  # rates by way and repeat
FROM, TO = 0.7, 1.15  # of what full precision can do, and of what all layers in INT4 can


def rates_of(full: float, int4: float, rungs: int = RUNGS) -> list[float]:
    """Return requests per second, each the same factor above the one before."""
    low, high = FROM * full, TO * max(full, int4)
    return [low * (high / low) ** (i / max(1, rungs - 1)) for i in range(rungs)]


def rungs_of(ways: Sequence[Way], rates: Sequence[float], repeat: int, seconds: float = RUNG_S) -> list[Job]:
    """Return the rungs of one climb, rate by rate; all ways get the same arrivals, other repeats others."""
    return [
        Job(
            "ladder",
            f"steady, {rate:.2f} requests/s",
            way,
            repeat,
            steady(rate, seconds, seed=100 * repeat + step),
            seconds,
            DRAIN_S,
            "made up",
            rate,
        )
        for step, rate in enumerate(rates)
        for way in turned(ways, step + repeat)
    ]


def is_needed(job: Job, kept: Kept) -> bool:
    """Return whether this way kept the limit on all rungs below, in this repeat."""
    below = [
        one
        for one in kept.of("ladder")
        if (one["way"], one["repeat"]) == (job.way.name, job.repeat) and one["rate"] < digits(job.rate)
    ]
    return all(keeps_limit(one) for one in below)


def rung_numbers(job: Job, whole: Row, events_per_s: Sequence[int]) -> Row:
    """Return one rung; tokens per second while requests were due, without the first third."""
    counted = events_per_s[int(job.seconds / 3) : int(job.seconds)]
    names = ("requests", "served", "ttft_s", "tpot_s", "violations", "others_cores")
    per_s = fmean(counted) * OUTPUT_TOKENS / (OUTPUT_TOKENS + 1) if counted else 0.0
    return {name: whole[name] for name in names} | {"rate": digits(job.rate), "tokens_per_s": digits(per_s)}


def keeps_limit(one: Row) -> bool:
    return bool(one["served"] == one["requests"] and one["ttft_s"]["p95"] <= SLO.ttft_s)


def highest_rates(ladder: Sequence[Row], top: float = 0.0) -> Climbs:
    """Return for each way and repeat the rate at which P95 TTFT crosses its limit.

    It is interpolated in the logarithm, the last rung if none exceeds the limit, and None if the first does.
    top: the highest rate of the ladder; a climb that ended neither there nor at the limit is left out.
    """
    found: Climbs = {}
    for one in sorted(ladder, key=lambda one: one.get("repeat", 0)):
        climbs, repeat = found.setdefault(one["way"], {}), str(one.get("repeat", 0))
        if repeat not in climbs:
            rungs = [
                each for each in ladder if (each["way"], str(each.get("repeat", 0))) == (one["way"], repeat)
            ]
            if not all(map(keeps_limit, rungs)) or max(each["rate"] for each in rungs) >= top:
                climbs[repeat] = _highest(rungs)
    return found


def _highest(rungs: Sequence[Row]) -> float | None:
    found, before = None, None
    for one in sorted(rungs, key=lambda one: one["rate"]):
        if not keeps_limit(one):
            return digits(_crossing(before, one)) if before else None
        found, before = one["rate"], one
    return found


def _crossing(before: dict[str, Any], beyond: dict[str, Any]) -> float:
    """Interpolate between two steps.

    Take the step before if requests were not served, whose wait is unknown.
    """
    if not beyond["ttft_s"] or beyond["ttft_s"]["p95"] <= SLO.ttft_s:
        return float(before["rate"])
    low, high = math.log(before["ttft_s"]["p95"]), math.log(beyond["ttft_s"]["p95"])
    share = (math.log(SLO.ttft_s) - low) / (high - low)
    return float(before["rate"] + share * (beyond["rate"] - before["rate"]))


def times_full(climbs: Climbs, way: str, full: str) -> list[float]:
    """Return for each repeat how many times the rate of full precision a way serves, where both are known."""
    theirs = climbs.get(full, {})
    return [
        ours / rate for repeat, ours in climbs.get(way, {}).items() if ours and (rate := theirs.get(repeat))
    ]


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median, in which None is below every number."""
    found = median([-math.inf if value is None else value for value in values]) if values else -math.inf
    return None if found == -math.inf else found

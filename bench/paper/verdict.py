"""The bars of the windows, and whether runs met them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final

from bench.common.results import MAX_OTHERS_CORES
from bench.paper.kept import MAX_SPEED_CHANGE, is_of_another_speed
from bench.paper.ladder import highest_rates, times_full
from bench.paper.service import DEFAULT, FULL, INT4, PERFORMANCE
from bench.paper.tables import spread
from instar.replay.statistics import percentile

# Of the default mode, over all windows.
FEWER_VIOLATIONS, TIMES_LOWER, IN_WINDOWS, LOSS_SHARE = 0.9, 2.9, 0.8, 0.25
TO_BLOCKS_S: Final = 0.3
BACK_S: Final = 10.0
TIMES_RATE: Final = {DEFAULT: 1.6, PERFORMANCE: 1.8}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A bar, what came, and whether it was met; None: nothing was measured that could tell."""

    bar: str
    found: str
    is_met: bool | None

    @property
    def word(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.is_met]

    def as_json(self) -> dict[str, Any]:
        return {"bar": self.bar, "found": self.found, "is_met": self.is_met}


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows by window and way; several are repeats."""

    rows: Sequence[Row]
    by: dict[tuple[str, str], list[Row]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Runs:
        found = cls(rows)
        for one in rows:
            found.by.setdefault((one["load"], one["way"]), []).append(one)
        return found

    def windows(self, *ways: str) -> list[str]:
        """Return the windows that were sent to all these ways."""
        names = dict.fromkeys(one["load"] for one in self.rows)
        return [name for name in names if all((name, way) in self.by for way in ways)]

    def values(self, name: str, way: str, what: Callable[[Row], float]) -> list[float]:
        return [what(one) for one in self.by[name, way]]

    def middle(self, name: str, way: str, what: Callable[[Row], float]) -> float:
        return median(self.values(name, way, what))

    def totals(self, names: Sequence[str], way: str, what: Callable[[Row], float]) -> list[float]:
        """Return the sums over windows of the medians, of the least and of the greatest repeats."""
        return [sum(of(self.values(name, way, what)) for name in names) for of in (median, min, max)]


def judge(rows: Sequence[Row], ladder: Sequence[Row], losses: dict[str, Any]) -> list[Verdict]:
    """Return a verdict for each bar, by the medians of repeats.

    losses: "of_int4" is the loss of all layers in INT4, "judged_by" where losses come from.
    """
    runs = Runs.of(rows)
    return [
        *_default_mode(runs, losses),
        _performance_mode(runs),
        *_rates(ladder),
        _to_blocks(rows),
        _way_back(rows),
        _preemptions(runs),
        _quiet([*rows, *ladder]),
        _as_fast([*rows, *ladder]),
    ]


def _violations(one: Row) -> float:
    return float(one["violations"])


def _p95(one: Row) -> float:
    return float(one["ttft_s"]["p95"])


def _default_mode(runs: Runs, losses: dict[str, Any]) -> list[Verdict]:
    names = runs.windows(FULL, DEFAULT)
    full, least_full, most_full = runs.totals(names, FULL, _violations)
    ours, least, most = runs.totals(names, DEFAULT, _violations)
    lower = [runs.middle(name, FULL, _p95) / runs.middle(name, DEFAULT, _p95) for name in names]
    num_lower = sum(value >= TIMES_LOWER for value in lower)
    loss = [fmean(runs.middle(name, DEFAULT, lambda one: one["loss"]) for name in names) if names else 0.0]
    share = loss[0] / losses["of_int4"]
    return [
        Verdict(
            f"default mode: at least {FEWER_VIOLATIONS:.0%} fewer requests over 2 s",
            f"{_range(full, least_full, most_full)} to {_range(ours, least, most)}, in {len(names)} windows",
            ours - (1 - FEWER_VIOLATIONS) * full < 1e-6 if full or ours else None,
        ),
        Verdict(
            f"default mode: P95 TTFT at least {TIMES_LOWER} times lower in {IN_WINDOWS:.0%} of the windows",
            f"in {num_lower} of {len(names)}: {', '.join(f'{value:.2g}' for value in lower)}",
            num_lower >= IN_WINDOWS * len(names) if names else None,
        ),
        Verdict(
            f"default mode: loss under {LOSS_SHARE:.0%} of static INT4's, by {losses['judged_by']} losses"
            if losses["judged_by"] == "assumed"
            else f"default mode: loss under {LOSS_SHARE:.0%} of static INT4's, by {losses['judged_by']}",
            f"{share:.1%} of {losses['of_int4']:.2%}",
            share < LOSS_SHARE if names else None,
        ),
    ]


def _range(middle: float, least: float, most: float) -> str:
    return f"{middle:g}" if least == most else f"{middle:g} ({least:g} to {most:g})"


def _performance_mode(runs: Runs) -> Verdict:
    names = runs.windows(INT4, PERFORMANCE)
    clean = [name for name in names if not any(runs.values(name, INT4, _violations))]
    dirty = [name for name in clean if any(runs.values(name, PERFORMANCE, _violations))]
    return Verdict(
        "performance mode: no request over 2 s, in any repeat, where static INT4 has none",
        f"{len(dirty)} of {len(clean)} windows have some",
        not dirty if clean else None,
    )


def _rates(ladder: Sequence[Row]) -> list[Verdict]:
    climbs = highest_rates(ladder, max((one["rate"] for one in ladder), default=0.0))
    found = []
    for way, bar in TIMES_RATE.items():
        times = times_full(climbs, way, FULL)
        rate = f"rate with P95 TTFT within 2 s, {way}: at least {bar} times full precision's"
        found.append(Verdict(rate, spread(times) or "no climb", median(times) >= bar if times else None))
    return found


def _modes(rows: Sequence[Row]) -> list[Row]:
    return [one for one in rows if one["mode"] != "manual"]


def _to_blocks(rows: Sequence[Row]) -> Verdict:
    firsts = [one["first_blocks"] for one in _modes(rows)]
    seconds = sorted(value for one in firsts for value in one["seconds"])
    p95 = percentile(seconds, 95) if seconds else 0.0
    unqueued, without = (sum(one[name] for one in firsts) for name in ("unqueued", "without_blocks"))
    return Verdict(
        f"first queued request to first added block: P95 under {TO_BLOCKS_S:g} s",
        f"{p95:.3f} s of {len(seconds)}; left out are {unqueued} with nobody queued yet, and {without} that "
        "added no block",
        p95 < TO_BLOCKS_S if seconds else None,
    )


def _way_back(rows: Sequence[Row]) -> Verdict:
    modes = [one for one in _modes(rows) if one["decisions"]]
    back = max((one["back_after_s"] for one in modes), default=0.0)
    stayed = sum(not one["is_back"] for one in modes)
    return Verdict(
        f"all layers full within {BACK_S:g} s after the last pressure",
        f"at most {back:.1f} s; in {stayed} of {len(modes)} runs layers were still below",
        back <= BACK_S and not stayed if modes else None,
    )


def _preemptions(runs: Runs) -> Verdict:
    names = runs.windows(FULL, DEFAULT)
    ours, full = (runs.totals(names, way, lambda one: one["preemptions"])[0] for way in (DEFAULT, FULL))
    return Verdict(
        "default mode: no more preemptions than full precision",
        f"{ours:g} against {full:g}",
        ours <= full if names else None,
    )


def _quiet(rows: Sequence[Row]) -> Verdict:
    disturbed = [one for one in rows if one["others_cores"] > MAX_OTHERS_CORES]
    most = max((one["others_cores"] for one in rows), default=0.0)
    return Verdict(
        f"other programs took at most {MAX_OTHERS_CORES:g} cores",
        f"at most {most:.2f}, more than that in {len(disturbed)} of {len(rows)} runs",
        not disturbed if rows else None,
    )


def _as_fast(rows: Sequence[Row]) -> Verdict:
    factors = [one["machine_factor"] for one in rows if "machine_factor" in one]
    other = sum(map(is_of_another_speed, rows))
    least, most = min(factors, default=1.0), max(factors, default=1.0)
    return Verdict(
        f"steps took within {MAX_SPEED_CHANGE:.0%} of what they took when the loads were chosen",
        f"{least:.2f} to {most:.2f} times as long, and not within that in {other} of {len(rows)} runs",
        not other if factors else None,
    )

"""The numbers of `bench.morph cost`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench.common.results import Bar, bar, say, say_bars
from bus.morphs import MorphReport

STEP_BAR, TIME_BAR = 0.05, 1.5


class Swapped(NamedTuple):
    """A swap of an idle engine, and the seconds that copying its bytes took right before it."""

    report: MorphReport
    resident_s: float
    mapped_s: float


class Part(NamedTuple):
    """The seconds of consecutive steps, and the swap that ran beside them."""

    seconds: list[float]
    swap: MorphReport | None


def report(idle: Sequence[Swapped], parts: Sequence[Part]) -> dict[str, Any]:
    """Return medians. Swaps go to INT4 and back in turn."""
    floors = dict(zip(("to int4", "to full"), (idle[0::2], idle[1::2]), strict=True))
    beside = [part.swap for part in parts if part.swap]
    swaps = {f"{way}, idle": _idle(ends) for way, ends in floors.items()}
    for (way, ends), offset in zip(floors.items(), (0, 1), strict=True):
        swaps[f"{way}, beside steps"] = _beside(beside[offset::2], ends)
    found = steps_report(parts) | {"swaps": swaps}
    return found | {"bars": _bars(found)}


def _idle(ends: Sequence[Swapped]) -> dict[str, float]:
    return _common([end.report for end in ends], ends) | {
        "times_floor": _median(_seconds(end.report) / end.mapped_s for end in ends),
        "times_resident": _median(_seconds(end.report) / end.resident_s for end in ends),
    }


def _beside(reports: Sequence[MorphReport], floors: Sequence[Swapped]) -> dict[str, float]:
    floor_s = statistics.median(end.mapped_s for end in floors)
    return _common(reports, floors) | {
        "at_work_times_floor": _median(_at_work(each) / floor_s for each in reports),
        "share_of_time": round(_median(_at_work(each) / _seconds(each) for each in reports), 4),
    }


def _common(reports: Sequence[MorphReport], floors: Sequence[Swapped]) -> dict[str, float]:
    copied = float(reports[0].numbers["bytes_copied"])
    return {
        "mb": round(copied / 1e6, 2),
        "ms": _median(1e3 * _seconds(each) for each in reports),
        "copying_ms": _median(1e3 * float(each.numbers["copy_seconds"]) for each in reports),
        "engine_ms": _median(1e3 * float(each.numbers["boundary_seconds"]) for each in reports),
        "floor_gb_s": _median(copied / 1e9 / end.mapped_s for end in floors),
        "resident_gb_s": _median(copied / 1e9 / end.resident_s for end in floors),
    }


def _seconds(swap: MorphReport) -> float:
    return float(swap.numbers["seconds"])


def _at_work(swap: MorphReport) -> float:
    """Return the seconds of copying and checking in the swap's thread, and of its work in the engine's."""
    return float(swap.numbers["copy_seconds"]) + float(swap.numbers["boundary_seconds"])


def steps_report(parts: Sequence[Part]) -> dict[str, Any]:
    means = [statistics.fmean(part.seconds) for part in parts]
    slower = [means[i] / ((means[i - 1] + means[i + 1]) / 2) - 1 for i in range(1, len(means), 2)]
    control = [means[i] / ((means[i - 2] + means[i + 2]) / 2) - 1 for i in range(2, len(means) - 2, 2)]
    return {
        "step_ms_without": _median(1e3 * mean for mean in means[0::2]),
        "step_ms_with": _median(1e3 * mean for mean in means[1::2]),
        "steps_longer": round(statistics.median(slower), 4),
        "steps_longer_quartiles": [round(value, 4) for value in statistics.quantiles(slower, n=4)[::2]],
        "noise_of_parts_without": round(statistics.median(map(abs, control)), 4) if control else None,
    }


def _bars(found: dict[str, Any]) -> dict[str, Bar]:
    values = {"steps beside swaps, longer by": (STEP_BAR, found["steps_longer"])}
    for way, one in found["swaps"].items():
        if "times_floor" in one:
            values[f"swap {way}, times the copy's floor"] = (TIME_BAR, one["times_floor"])
    return {what: bar(f"< {limit}", value, value < limit) for what, (limit, value) in values.items()}


def _median(values: Any) -> float:
    return round(float(statistics.median(values)), 3)


def say_card(found: dict[str, Any]) -> None:
    for way, one in found["swaps"].items():
        if "times_floor" in one:
            compared = (
                f"{one['times_floor']:.2f} times the floor ({one['floor_gb_s']:.1f} GB/s),"
                f" {one['times_resident']:.2f} that of resident memory ({one['resident_gb_s']:.1f})"
            )
        else:
            compared = (
                f"{one['share_of_time']:.1%} of it at work: {one['at_work_times_floor']:.2f} times the floor"
            )
        say(
            f"{way:<22} {one['mb']:6.2f} MB in {one['ms']:7.1f} ms ({one['copying_ms']:5.1f} copying,"
            f" {one['engine_ms']:5.1f} of the engine's time), {compared}"
        )
    low, high = found["steps_longer_quartiles"]
    say(
        f"a step {found['step_ms_without']} ms, beside a swap {found['step_ms_with']} ms: "
        f"{found['steps_longer']:+.1%} (quartiles {low:+.1%} to {high:+.1%}; parts without a swap differ by "
        f"{found['noise_of_parts_without'] or 0:.1%})"
    )
    say_bars(found["bars"])

"""The sections of docs/evaluation.md on the windows at their own speed and on their simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.paper.kept import Row
from bench.paper.ladder import highest_rates, times_full
from bench.paper.service import DEFAULT, FULL
from bench.paper.tables import Result, number, spread, table
from bench.paper.verdict import TIMES_RATE


def windows(result: Result) -> str:
    """Return what was sent and what came, window by window, and the bars."""
    loads = [one for one in result["rows"] if one["part"] == "loads"]
    rungs = [one for one in result["rows"] if one["part"] == "ladder"]
    parts = ["![P95 TTFT, violations and loss of each window](../bench/results/windows.png)"] if loads else []
    parts += [_setting(result, loads), _bars(result), _by_window(result, loads)]
    return "\n\n".join([*parts, *([_climbs(rungs)] if rungs else [])])


def bursts(result: Result) -> str:
    """Return for README.md what default mode makes of the windows that both ways were sent."""
    rows = [one for one in result["rows"] if one["part"] == "loads"]
    by = {(one["load"], one["repeat"], one["way"]): one for one in rows}
    pairs = [
        (full, by[load, repeat, DEFAULT])
        for (load, repeat, way), full in by.items()
        if way == FULL and (load, repeat, DEFAULT) in by
    ]
    over = [sum(each[i]["violations"] for each in pairs) for i in (0, 1)]
    times = [full["ttft_s"]["p95"] / ours["ttft_s"]["p95"] for full, ours in pairs]
    loss = max(ours["loss"] for _, ours in pairs)
    num_windows, num_requests = len({load for load, _, _ in by}), sum(ours["requests"] for _, ours in pairs)
    return (
        f"in {len(pairs)} runs of {num_windows} windows of 60 s, {over[1]:g} of {num_requests} requests over "
        f"2 s TTFT instead of {over[0]:g}; P95 TTFT {number(min(times))} to {number(max(times))} times "
        f"lower; predicted loss of perplexity at most {100 * loss:.2f} %"
    )


def _setting(result: Result, loads: Sequence[Row]) -> str:
    names = list(dict.fromkeys(one["load"] for one in loads))
    bursts = sum(name.startswith("code") for name in names)
    repeats = 1 + max((one["repeat"] for one in loads), default=-1)
    rates, losses = result["requests_per_s"], result["losses"]
    size = result["plan"]["size"]
    model = "models/demo" if size == "demo" else f"random weights, {size} parameters"
    assumed = "losses that are assumed" if losses["judged_by"] == "assumed" else losses["judged_by"]
    speeds = [one["full_requests_per_s"] for one in result["sessions"]]
    served = (
        ", ".join(f"{name} served {number(rate)}" for name, rate in rates.items()) + " requests per second"
    )
    if len(speeds) > 1:
        served += f" (at the beginnings of {len(speeds)} sessions {spread(speeds)} at full precision)"
    commits = ", ".join(dict.fromkeys(one["commit"] for one in result["sessions"]))
    short = (
        f"Only {len(names)} of {result['wanted']} windows have runs. "
        if len(names) < result["wanted"]
        else ""
    )
    return (
        f"{short}{len(names)} windows, {bursts} of them bursts of the code trace, up to {repeats} runs of "
        f"each with each way. The model: {model}, {result['kv_blocks_at_full']} KV blocks at full precision. "
        f"Before the runs {served}. A loss of perplexity is predicted by {assumed}, not measured in these "
        f"runs. Measured at {commits}. Several repeats are told as their median, with the "
        "least and the greatest in brackets."
    )


def _bars(result: Result) -> str:
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [[one["bar"], one["found"], words[one["is_met"]]] for one in result["bars"]]
    return table(["bar", "measured", "result"], rows)


def _by_window(result: Result, loads: Sequence[Row]) -> str:
    ways = list(dict.fromkeys(one["way"] for one in loads))
    ways.sort(key=lambda way: way != FULL)
    rows = []
    for name in dict.fromkeys(one["load"] for one in loads):
        sent, there = result["windows"][name]
        cells = [_cell([one for one in loads if (one["load"], one["way"]) == (name, way)]) for way in ways]
        rows.append([name, f"{sent} of {there}", *cells])
    return table(["window", "requests", *(f"{way}: P95 TTFT, over 2 s, loss" for way in ways)], rows)


def _cell(repeats: Sequence[Row]) -> str:
    if not repeats:
        return "-"
    waits = spread([one["ttft_s"]["p95"] for one in repeats], _seconds)
    over = spread([one["violations"] for one in repeats], _whole)
    loss = spread([one["loss"] for one in repeats], _percent)
    return f"{waits} s; {over}" + (f"; {loss}" if any(one["loss"] for one in repeats) else "")


def _climbs(rungs: Sequence[Row]) -> str:
    climbs = highest_rates(rungs, max(one["rate"] for one in rungs))
    rows = []
    for way, rates in climbs.items():
        known = [rate for rate in rates.values() if rate is not None]
        times = spread(times_full(climbs, way, FULL))
        bar = TIMES_RATE.get(way)
        rows.append([way, spread(known) or "below the first rung", times, f"{bar:g}" if bar else ""])
    return table(["", "requests/s with P95 TTFT within 2 s", "times full precision's", "bar"], rows)


def _seconds(value: float | None) -> str:
    return f"{value:.2f}"


def _whole(value: float | None) -> str:
    return f"{value:g}"


def _percent(value: float | None) -> str:
    return f"{100 * (value or 0.0):.2f} %"


def simulated(result: Result) -> str:
    """Return the simulation of the windows beside the runs."""
    words = {True: "met", False: "**missed**"}
    bars = [[one["bar"], one["found"], words[one["is_met"]]] for one in result["bars"]]
    rows = [
        [one["window"], one["way"], *(f"{_pair(one[key], write)}" for key, write in _COMPARED.items())]
        for one in result["rows"]
    ]
    text = f"The calibration's median error of the times of steps is {result['calibration_error']:.0%}."
    head = ["window", "way", "P95 TTFT, s: simulated, measured", "swaps: simulated, measured"]
    picture = "![Simulated against measured numbers](../bench/results/simulated.png)"
    return "\n\n".join([picture, text, table(["bar", "measured", "result"], bars), table(head, rows)])


_COMPARED: Mapping[str, Callable[[float | None], str]] = {"p95_s": _seconds, "swaps": _whole}


def _pair(pair: Mapping[str, Any], write: Callable[[float | None], str]) -> str:
    return f"{write(pair['simulated'])}, {write(pair['measured'])}"

"""Pictures of one run or of several, from run.json alone. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from instar.errors import InputError
from instar.replay.files import RunFile
from instar.replay.outcomes import RequestOutcome

# Okabe and Ito: distinct also for colour-blind readers.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY: Final = "#999999"
BINS: Final = 90  # a bar of at least a second each
SHORTEST_S: Final = 1e-3  # lower end of logarithmic axes: two tokens may come in one read

Times = Callable[[RequestOutcome], float | None]


def pyplot() -> Any:
    """Return matplotlib's pyplot, without a display. Raises InputError if it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError("pictures need matplotlib: pip install 'instar[bench]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(runs: Sequence[RunFile], path: Path) -> None:
    """Write a PNG. Raises InputError."""
    figure, panels = pyplot().subplots(4, 2, figsize=(13, 14))
    degrees = panels[3][1].twinx()
    ends_s = max(end_s(run) for run in runs)
    bin_s = max(1, math.ceil(ends_s / BINS))
    _due(panels[0][0], runs, bin_s)
    for run, colour in zip(runs, cycle(COLOURS)):
        _failed(panels[0][0], run, colour, bin_s)
        _tokens(panels[0][1], run, colour, bin_s)
        for row, times in ((1, attrgetter("ttft_s")), (2, attrgetter("tpot_s"))):
            draw_over_arrivals(panels[row][0], run, colour, times)
            _distribution(panels[row][1], run, colour, times)
        draw_kv(panels[3][0], run, colour)
        _shape(panels[3][1], degrees, run, colour)
    _finish(panels, degrees, runs, ends_s)
    _head(figure, runs)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write the whole picture or none, with the same bytes for the same data. Raises InputError."""
    parts = path.with_name(f".{path.name}.part")
    try:
        figure.savefig(parts, format="png", dpi=110, metadata={"Software": None})
        parts.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        pyplot().close(figure)
        parts.unlink(missing_ok=True)


def end_s(run: RunFile) -> float:
    return max(max(one.due_s, one.last_s or one.ended_s or 0.0) for one in run.outcomes)


def _due(axes: Any, runs: Sequence[RunFile], bin_s: int) -> None:
    """Draw the arrivals of the first run, and of others with a different load."""
    _rate(axes, [one.due_s for one in runs[0].outcomes], bin_s, "due", color=GREY, alpha=0.5)
    for run, colour in zip(runs, cycle(COLOURS)):
        if run.about.get("arrivals_sha256") != runs[0].about.get("arrivals_sha256"):
            due, style = [one.due_s for one in run.outcomes], {"histtype": "step", "linestyle": ":"}
            _rate(axes, due, bin_s, f"due in {plain(run.name)}", color=colour, **style)


def _failed(axes: Any, run: RunFile, colour: str, bin_s: int) -> None:
    failed = [one.due_s for one in run.outcomes if one.error and one.counts]
    if failed:
        style = {"histtype": "step", "linewidth": 1.5}
        _rate(axes, failed, bin_s, f"failed in {plain(run.name)}", color=colour, **style)


def _rate(axes: Any, at_s: Sequence[float], bin_s: int, label: str, **style: Any) -> None:
    """Draw requests per second, in bars of `bin_s`."""
    bins = range(0, int(max(at_s, default=0.0)) + 2 * bin_s, bin_s)
    axes.hist(at_s, bins=bins, weights=[1 / bin_s] * len(at_s), label=label, **style)


def _tokens(axes: Any, run: RunFile, colour: str, bin_s: int) -> None:
    events = run.events_per_s
    bins = [events[at : at + bin_s] for at in range(0, len(events), bin_s)]
    means = [fmean(one) for one in bins]
    middles = [(at + 0.5) * bin_s for at in range(len(means))]
    axes.plot(middles, means, color=colour, linewidth=1.2, marker="." if len(means) < 40 else None)


def draw_over_arrivals(axes: Any, run: RunFile, colour: str, times: Times) -> None:
    found = [(one.due_s, max(times(one) or 0.0, SHORTEST_S)) for one in _served(run, times)]
    if found:
        axes.plot(*zip(*found, strict=True), ".", color=colour, markersize=4, alpha=0.7)
    for morph in run.observed.get("morphs", []):
        at_s = morph["started"] - run.about["began_at"]
        axes.axvline(at_s, color=colour, alpha=0.25, linewidth=1)


def _distribution(axes: Any, run: RunFile, colour: str, times: Times) -> None:
    """Draw the cumulative distribution over all requests: with failures it ends below 1."""
    found = sorted(max(times(one) or 0.0, SHORTEST_S) for one in _served(run, times))
    num = len(found) + sum(one.counts and not one.is_served for one in run.outcomes)
    axes.step(found, [(i + 1) / num for i in range(len(found))], where="post", color=colour)


def _served(run: RunFile, times: Times) -> list[RequestOutcome]:
    return [one for one in run.outcomes if one.is_served and times(one) is not None]


def draw_kv(axes: Any, run: RunFile, colour: str) -> None:
    at_s, blocks, used = sums_over_instances(run, "kv_blocks", "kv_used")
    axes.step(at_s, blocks, where="post", color=colour)
    axes.step(at_s, used, where="post", color=colour, linestyle="--", linewidth=1)
    axes.fill_between(at_s, used, step="post", color=colour, alpha=0.15)


def _shape(axes: Any, degrees: Any, run: RunFile, colour: str) -> None:
    """Draw the layers below full precision, and the mean degree of the instances."""
    at_s, below, tp = sums_over_instances(run, "layers_below_full", "tp")
    num = [max(1, len(one["instances"])) for one in run.observed.get("samples", [])]
    axes.step(at_s, below, where="post", color=colour)
    degrees.step(at_s, [d / n for d, n in zip(tp, num, strict=True)], ":", where="post", color=colour)


def sums_over_instances(run: RunFile, *keys: str) -> tuple[list[float], ...]:
    """Return the seconds, and for each key the sums over the instances."""
    samples = run.observed.get("samples", [])
    instances = [sample["instances"].values() for sample in samples]
    sums = [[sum(one[key] or 0 for one in each) for each in instances] for key in keys]
    return ([sample["at_s"] for sample in samples], *sums)


def _finish(panels: Any, degrees: Any, runs: Sequence[RunFile], ends_s: float) -> None:
    from matplotlib.ticker import MaxNLocator

    slo = runs[0].slo
    panels[0][0].set(ylabel="requests per second")
    panels[0][1].set(ylabel="output events per second")
    panels[3][0].set(ylabel="KV blocks")
    panels[3][1].set(ylabel="layers below full")
    degrees.set(ylabel="degree")
    for axes in (panels[3][1], degrees):
        axes.set_ylim(0, max(2.2, 1.1 * axes.get_ylim()[1]))  # whole numbers also if nothing changed
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for row, name, limit_s in ((1, "TTFT", slo.ttft_s), (2, "TPOT", slo.tpot_s)):
        over_time, shares = panels[row]
        over_time.set(ylabel=f"{name}, seconds", yscale="log")
        over_time.axhline(limit_s, color=GREY, linestyle="--", linewidth=1, label=f"SLO {limit_s:g} s")
        shares.set(xlabel=f"{name}, seconds", ylabel="share of requests", xscale="log", ylim=(0, 1.03))
        shares.axvline(limit_s, color=GREY, linestyle="--", linewidth=1, label=f"SLO {limit_s:g} s")
    if any(run.observed.get("morphs") for run in runs):
        for over_time in (panels[1][0], panels[2][0]):
            add_style(over_time, "a morph", linewidth=1, alpha=0.4)
    if any(run.observed.get("samples") for run in runs):
        add_style(panels[3][0], "all")
        add_style(panels[3][0], "in use", linestyle="--", linewidth=1)
        add_style(panels[3][1], "layers below full")
        add_style(panels[3][1], "degree", linestyle=":")
    else:
        for axes in panels[3]:
            place = {"ha": "center", "transform": axes.transAxes}
            axes.text(0.5, 0.5, "not reported by this server", color=GREY, **place)
    for row, column in ((0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (3, 1)):
        panels[row][column].set(xlabel="seconds", xlim=(0, 1.02 * ends_s))
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[1]:  # styles; the heading has the colours of the runs
            axes.legend(fontsize=8, loc="best", framealpha=0.8)


def add_style(axes: Any, label: str, **style: Any) -> None:
    """Add a style to the legend, in neutral colour."""
    axes.plot([], [], color="#555555", label=label, **style)


def _head(figure: Any, runs: Sequence[RunFile]) -> None:
    """Draw the heading: what was replayed, and the colours of several runs."""
    from matplotlib.lines import Line2D

    about = runs[0].about
    heading = plain(f"{about['source']} against {about['url']} ({about['model']})")
    figure.suptitle(heading, fontsize=11, y=0.995)
    if len(runs) > 1:
        names = [plain(run.name) for run in runs]
        lines = [Line2D([], [], color=colour, linewidth=3) for _, colour in zip(names, cycle(COLOURS))]
        figure.legend(lines, names, loc="upper center", ncol=min(6, len(runs)), bbox_to_anchor=(0.5, 0.98))
    figure.tight_layout(rect=(0, 0, 1, 0.965 if len(runs) > 1 else 0.985))


def plain(text: str) -> str:
    """Escape dollar signs: matplotlib would read a formula."""
    return text.replace("$", r"\$")

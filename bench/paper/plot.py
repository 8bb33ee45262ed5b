"""The paper's Figures 4 to 7 with our numbers, from paper.json alone.

python -m bench.paper plot [bench/results/paper.json]        draws them again, beside it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

from bench.common.results import RESULTS

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

from bench.paper.service import (
    ACCURACY,
    DEFAULT,
    FULL,
    INT4,
    PERFORMANCE,
    PLAN,
    PLAN_ANY,
    PYRAMID,
    STATIC_2,
    STATIC_4,
)
from bench.paper.tables import merged

# Colour and marker; the colours are those of the paper's figures where it has the same.
STYLES: Final = {
    FULL: ("tab:blue", "o"),
    INT4: ("tab:orange", "s"),
    STATIC_4: ("silver", "v"),
    STATIC_2: ("grey", "^"),
    PLAN: ("tab:purple", "D"),
    PLAN_ANY: ("plum", "d"),
    PYRAMID: ("tab:cyan", "P"),
    ACCURACY: ("yellowgreen", "*"),
    DEFAULT: ("tab:green", "*"),
    PERFORMANCE: ("darkgreen", "*"),
}
MODES: Final = (ACCURACY, DEFAULT, PERFORMANCE)
TPOT_WAYS: Final = (FULL, INT4, *MODES)


def draw_all(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write four PNGs, the same bytes for the same result."""
    drawn = {4: trade_off, 5: kv_over_time, 6: against_rate, 7: tpot_shares}
    paths = []
    for number, draw in drawn.items():
        figure = draw(result)
        paths.append(folder / f"paper-figure{number}.png")
        figure.savefig(paths[-1], dpi=110, metadata={"Software": None})
        plt.close(figure)
    return paths


def _of_load(result: dict[str, Any], load: str) -> list[dict[str, Any]]:
    return [one for one in merged(result["runs"], "load", "way") if one["load"] == load]


def _loads(result: dict[str, Any]) -> list[str]:
    return [load["name"] for load in result["loads"]]


# --------------------------------------------------------------------------- Figure 4


def trade_off(result: dict[str, Any]) -> Any:
    """Draw F1 and the rise of perplexity against P95 TTFT: lower is worse, right is slower."""
    loads = _loads(result)
    figure, panels = plt.subplots(
        2, len(loads), figsize=(4.6 * len(loads), 7.4), squeeze=False, sharey="row", sharex="col"
    )
    for column, load in enumerate(loads):
        runs = _of_load(result, load)
        full = next(one for one in runs if one["way"] == FULL)["quality"]["perplexity"]
        for one in runs:
            quality = one["quality"]
            f1, error = quality["against_full"]["f1"], quality["against_full"]["f1_error"]
            _point(panels[0][column], one, f1, error)
            rise = 100 * (quality["perplexity"] / full - 1)
            _point(panels[1][column], one, rise, 100 * (quality["nats_error"] or 0.0))
        panels[0][column].set_title(load)
        panels[1][column].set_xlabel("P95 TTFT, seconds")
        for axes in panels[:, column]:
            axes.axvline(result["settings"]["ttft_limit_s"], color="grey", linestyle=":", linewidth=1)
    panels[0][0].set_ylabel("F1 of continuations\nagainst full precision")
    panels[1][0].set_ylabel("perplexity above full precision, %\n(downwards: worse)")
    panels[1][0].set_yscale("symlog", linthresh=1.0)  # the row shares it
    panels[1][0].set_yticks((0, 0.5, 1, 2, 5, 10, 20))
    panels[1][0].yaxis.set_major_formatter("{x:g}")
    panels[1][0].invert_yaxis()
    for axes in panels.flat:
        _log(axes, "x")
        axes.margins(x=0.12, y=0.12)
        axes.grid(alpha=0.3)
    _legend(figure, panels[0][0], rows=2)
    return figure


def _log(axes: Any, axis: str) -> None:
    """Make an axis logarithmic, with labels at 1, 2 and 5."""
    axes.set(**{f"{axis}scale": "log"})
    written = getattr(axes, f"{axis}axis")
    written.set_major_locator(LogLocator(subs=(1, 2, 5)))
    written.set_major_formatter("{x:g}")
    written.set_minor_formatter(NullFormatter())


def _point(axes: Any, one: dict[str, Any], value: float, error: float) -> None:
    colour, marker = STYLES[one["way"]]
    axes.errorbar(
        one["ttft_s"]["p95"],
        value,
        yerr=error,
        fmt=marker,
        color=colour,
        markersize=14 if marker == "*" else 8,
        markeredgecolor="black",
        markeredgewidth=0.5,
        elinewidth=1,
        label=one["way"],
        zorder=3 if one["way"] in MODES else 2,
    )


# --------------------------------------------------------------------------- Figure 5


def kv_over_time(result: dict[str, Any]) -> Any:
    """Draw KV capacity as lines and KV use as areas."""
    loads = _loads(result)
    figure, panels = plt.subplots(len(loads), 1, figsize=(11, 3.1 * len(loads)), squeeze=False)
    for axes, load in zip(panels[:, 0], loads, strict=True):
        by_way = {one["way"]: one for one in _of_load(result, load)}
        for way in (FULL, DEFAULT):
            series, colour = by_way[way]["series"], STYLES[way][0]
            axes.fill_between(
                series["at_s"],
                series["kv_used"],
                step="post",
                color=colour,
                alpha=0.3,
                linewidth=0,
                label=f"in use, {way}",
            )
        for way, colour, style in ((INT4, STYLES[INT4][0], "--"), (DEFAULT, STYLES[DEFAULT][0], "-")):
            series = by_way[way]["series"]
            axes.step(
                series["at_s"],
                series["kv_blocks"],
                style,
                where="post",
                color=colour,
                linewidth=1.8,
                label=f"capacity, {way}",
            )
        axes.axhline(
            result["settings"]["kv_blocks"]["full"], color="tab:red", linewidth=1.4, label=f"capacity, {FULL}"
        )
        axes.set(ylabel="KV blocks", ylim=(0, None), xlim=(0, None))
        axes.set_title(load, fontsize=11, loc="left")
        axes.grid(alpha=0.3)
    panels[-1][0].set_xlabel("seconds")
    _legend(figure, panels[0][0], rows=1)
    return figure


# --------------------------------------------------------------------------- Figure 6


def against_rate(result: dict[str, Any]) -> Any:
    figure, (waits, rates) = plt.subplots(1, 2, figsize=(11, 4.6))
    ladder = merged(result["ladder"], "rate", "way")
    for way in dict.fromkeys(one["way"] for one in ladder):
        steps = sorted((one for one in ladder if one["way"] == way), key=lambda one: one["rate"])
        colour, marker = STYLES[way]
        style = {"color": colour, "marker": marker, "markersize": 9 if marker == "*" else 6}
        at = [one["rate"] for one in steps if one["ttft_s"]]
        waits.plot(at, [one["ttft_s"]["p95"] for one in steps if one["ttft_s"]], label=way, **style)
        rates.plot([one["rate"] for one in steps], [one["tokens_per_s"] for one in steps], **style)
    asked = sorted({one["rate"] for one in ladder})
    tokens = result["settings"]["output_tokens"]
    rates.plot(asked, [rate * tokens for rate in asked], ":", color="grey", label="asked for")
    waits.axhline(result["settings"]["ttft_limit_s"], color="grey", linestyle=":", linewidth=1)
    _log(waits, "y")
    waits.set(ylabel="P95 TTFT, seconds", xlabel="requests per second")
    rates.set(ylabel="output tokens per second", ylim=(0, None), xlabel="requests per second")
    for axes in (waits, rates):
        axes.grid(alpha=0.3)
    rates.legend(fontsize=9, loc="lower right")
    _legend(figure, waits, rows=1)
    return figure


# --------------------------------------------------------------------------- Figure 7


def tpot_shares(result: dict[str, Any]) -> Any:
    loads = _loads(result)
    figure, panels = plt.subplots(
        1, len(loads), figsize=(4.6 * len(loads), 4.4), squeeze=False, sharey=True, sharex=True
    )
    for axes, load in zip(panels[0], loads, strict=True):
        for one in _of_load(result, load):
            if one["way"] in TPOT_WAYS:
                axes.step(
                    *_shares([1e3 * value for value in one["series"]["tpot_s"]]),
                    where="post",
                    color=STYLES[one["way"]][0],
                    linewidth=1.8,
                    label=one["way"],
                )
        axes.set_title(load)
        axes.set(xlabel="TPOT, ms", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("share of requests")
    _legend(figure, panels[0][0], rows=1)
    return figure


def _shares(values: Sequence[float]) -> tuple[list[float], list[float]]:
    found = sorted(values)
    return found, [(i + 1) / len(found) for i in range(len(found))]


def _legend(figure: Any, axes: Any, rows: int) -> None:
    """Draw one legend for all panels, above them."""
    handles, labels = axes.get_legend_handles_labels()
    height = figure.get_size_inches()[1]
    figure.tight_layout(rect=(0, 0, 1, 1 - (0.18 + 0.24 * rows) / height))
    figure.legend(
        handles, labels, ncols=-(-len(labels) // rows), loc="upper center", fontsize=9, frameon=False
    )


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "paper.json"
    for drawn in draw_all(json.loads(path.read_text()), path.parent):
        sys.stdout.write(f"{drawn}\n")

"""The picture of `bench.morph burst`: what happened in the first round, and the trade-off over all rounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common.plots import picture
from bench.morph.report import DEFAULT, FULL, INT4, TTFT_LIMIT_S, MorphRun

COLOURS = {
    FULL: "black",
    INT4: "tab:red",
    "static 1/4": "tab:pink",
    "static 1/2": "tab:orange",
    "mode accuracy": "tab:cyan",
    DEFAULT: "tab:blue",
    "mode performance": "tab:green",
}


def draw(runs: Sequence[MorphRun], found: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the picture as PNG."""
    first = [run for run in runs if run.round == 0]
    with picture(path, 2, 2, figsize=(12, 8)) as (_, panels):
        _over_time(panels[0][0], first, "kv_blocks", "KV blocks")
        _over_time(panels[0][1], first, "waiting", "requests that wait for blocks")
        _first_tokens(panels[1][0], first)
        _trade_off(panels[1][1], found)
        panels[0][0].legend(fontsize=8, loc="upper left")


def _over_time(axes: Any, runs: Sequence[MorphRun], what: str, label: str) -> None:
    for run in runs:
        series = run.as_json()["over_time"]
        axes.step(
            series["at_s"],
            series[what],
            where="post",
            color=COLOURS[run.configuration],
            label=run.configuration,
            linewidth=2 if run.configuration in (FULL, DEFAULT) else 1,
        )
    _shade(axes, runs[0])
    axes.set(xlabel="seconds", ylabel=label)


def _first_tokens(axes: Any, runs: Sequence[MorphRun]) -> None:
    for run in runs:
        axes.plot(
            [one.due_s for one in run.outcomes],
            [one.ttft_s for one in run.outcomes],
            ".-",
            color=COLOURS[run.configuration],
            linewidth=0.8,
        )
    axes.axhline(TTFT_LIMIT_S, color="grey", linestyle="--", linewidth=1)
    _shade(axes, runs[0])
    axes.set(xlabel="seconds, when the request was due", ylabel="TTFT, seconds", yscale="log")


def _trade_off(axes: Any, found: dict[str, dict[str, Any]]) -> None:
    for name, one in found.items():
        axes.plot(one["perplexity"], one["ttft_p95_s"], "o", color=COLOURS[name])
        axes.annotate(
            name,
            (one["perplexity"], one["ttft_p95_s"]),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=8,
        )
    axes.margins(x=0.25)
    axes.ticklabel_format(axis="x", useOffset=False)
    axes.set(xlabel="perplexity of the tokens served", ylabel="P95 TTFT, seconds", yscale="log")


def _shade(axes: Any, run: MorphRun) -> None:
    axes.axvspan(run.burst_s, run.burst_ends_s, color="grey", alpha=0.12)
    axes.grid(alpha=0.3)

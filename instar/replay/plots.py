"""Pictures of one run, or of several over one another, from run.json alone. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from instar.replay.files import RunFile
from instar.replay.problems import BenchProblem

COLOURS: Final = ("tab:blue", "tab:red", "tab:green", "tab:orange", "tab:purple", "tab:brown", "tab:cyan")
MISSING: Final = "pictures need matplotlib: pip install 'instar[bench]'; the numbers are there without it"


def need_matplotlib() -> None:
    """Raises BenchProblem."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise BenchProblem(MISSING) from error
    mpl.use("Agg")  # no display


def draw(runs: Sequence[RunFile], path: Path) -> None:
    """Writes a PNG. Raises BenchProblem."""
    need_matplotlib()
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(3, 2, figsize=(13, 11))
    for run, colour in zip(runs, COLOURS * len(runs), strict=False):
        _arrivals(panels[0][0], run, colour, is_first=run is runs[0])
        _tokens(panels[0][1], run, colour)
        _first_tokens(panels[1][0], run, colour)
        _shares(panels[1][1], run, colour)
        _kv(panels[2][0], run, colour)
        _layers(panels[2][1], run, colour)
    _finish(panels, runs)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})  # the same bytes for the same run
    except OSError as error:
        raise BenchProblem(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        plt.close(figure)


def _finish(panels: Any, runs: Sequence[RunFile]) -> None:
    slo = runs[0].slo
    panels[0][0].set(ylabel="requests due per second")
    panels[0][1].set(ylabel="output events per second")
    panels[1][0].set(ylabel="TTFT, seconds", yscale="log")
    panels[1][0].axhline(slo.ttft_s, color="grey", linestyle="--", linewidth=1)
    panels[1][1].set(xlabel="seconds (solid: TTFT, dashed: TPOT)", ylabel="share of requests", xscale="log")
    panels[2][0].set(ylabel="KV blocks (solid: all, filled: in use)")
    panels[2][1].set(ylabel="layers below full (solid), degree (dotted)")
    for axes in panels.flat:
        axes.grid(alpha=0.3)
        if axes is not panels[1][1]:
            axes.set_xlabel("seconds")
    if len(runs) > 1:
        panels[0][1].legend(fontsize=8, loc="upper left")


def _arrivals(axes: Any, run: RunFile, colour: str, *, is_first: bool) -> None:
    """Of the first run: of the others they should be the same."""
    if is_first:
        due = [one.due_s for one in run.outcomes]
        axes.hist(due, bins=range(int(max(due)) + 2), color="grey", alpha=0.6)
        axes.set_title(run.about["source"], fontsize=10)
    lost = [one.due_s for one in run.outcomes if one.error and one.counts]
    axes.plot(lost, [0] * len(lost), "x", color=colour, markersize=4)


def _tokens(axes: Any, run: RunFile, colour: str) -> None:
    axes.plot(run.events_per_s, color=colour, linewidth=1, label=run.name)


def _first_tokens(axes: Any, run: RunFile, colour: str) -> None:
    pairs = [(one.due_s, one.ttft_s) for one in run.outcomes if one.is_served]
    axes.plot(*zip(*pairs, strict=True), ".", color=colour, markersize=3) if pairs else None
    for one in run.observed.get("morphs", []):
        axes.axvline(one["started"] - run.about["began_at"], color=colour, alpha=0.25, linewidth=1)


def _shares(axes: Any, run: RunFile, colour: str) -> None:
    """Of those that had one, and those that failed: a curve that ends below 1 had errors."""
    served = [one for one in run.outcomes if one.is_served]
    num_failed = sum(one.counts and not one.is_served for one in run.outcomes)
    for values, style in (([one.ttft_s for one in served], "-"), ([one.tpot_s for one in served], "--")):
        found = sorted(value for value in values if value is not None)
        num = len(found) + num_failed
        axes.step(found, [(i + 1) / num for i in range(len(found))], style, where="post", color=colour)


def _kv(axes: Any, run: RunFile, colour: str) -> None:
    at_s, blocks, used = _over_time(run, "kv_blocks", "kv_used")
    axes.step(at_s, blocks, where="post", color=colour)
    axes.fill_between(at_s, used, step="post", color=colour, alpha=0.15)


def _layers(axes: Any, run: RunFile, colour: str) -> None:
    at_s, below, degrees = _over_time(run, "layers_below_full", "tp")
    axes.step(at_s, below, where="post", color=colour)
    num = [max(1, len(one["instances"])) for one in run.observed.get("samples", [])]
    axes.step(at_s, [d / n for d, n in zip(degrees, num, strict=True)], ":", where="post", color=colour)


def _over_time(run: RunFile, *keys: str) -> tuple[list[float], ...]:
    """Seconds, and of each key the sum over the instances."""
    samples = run.observed.get("samples", [])
    sums = [
        [sum(one[key] or 0 for one in sample["instances"].values()) for sample in samples] for key in keys
    ]
    return ([sample["at_s"] for sample in samples], *sums)

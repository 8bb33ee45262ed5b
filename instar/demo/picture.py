"""The picture of the demo: TTFT over time with and without morphs, KV blocks and layers under it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from instar.demo.card import verdict
from instar.replay.files import RunFile
from instar.replay.plots import (
    COLOURS,
    GREY,
    add_style,
    draw_kv,
    draw_over_arrivals,
    end_s,
    plain,
    pyplot,
    save,
    sums_over_instances,
)

FULL_COLOUR, MORPHED_COLOUR = COLOURS[1], COLOURS[0]


def draw(full: RunFile, morphed: RunFile, path: Path) -> None:
    """Write a PNG. Raises InputError."""
    from matplotlib.ticker import MaxNLocator

    figure, (ttft, blocks, layers) = pyplot().subplots(3, 1, figsize=(9, 9), sharex=True)
    runs: Sequence[tuple[RunFile, str]] = ((full, FULL_COLOUR), (morphed, MORPHED_COLOUR))
    for run, colour in runs:
        draw_over_arrivals(ttft, run, colour, attrgetter("ttft_s"))
        draw_kv(blocks, run, colour)
        at_s, below = sums_over_instances(run, "layers_below_full")
        layers.step(at_s, below, where="post", color=colour)
        ttft.plot([], [], ".", color=colour, label=plain(run.name))
    ttft.axhline(
        full.slo.ttft_s, color=GREY, linestyle="--", linewidth=1, label=f"limit {full.slo.ttft_s:g} s"
    )
    if morphed.observed.get("morphs"):
        add_style(ttft, "a morph", linewidth=1, alpha=0.4)
    add_style(blocks, "all")
    add_style(blocks, "in use", linestyle="--", linewidth=1)
    ttft.set(ylabel="TTFT of a request by when it was due, s", yscale="log")
    blocks.set(ylabel="KV blocks of both workers", ylim=(0, None))
    layers.set(ylabel="layers below full precision", xlabel="seconds")
    layers.set_ylim(0, max(2.2, 1.1 * layers.get_ylim()[1]))  # also if none was swapped
    layers.yaxis.set_major_locator(MaxNLocator(integer=True))
    layers.set_xlim(0, 1.02 * max(end_s(run) for run, _ in runs))
    for axes in (ttft, blocks, layers):
        axes.grid(alpha=0.3)
    for axes in (ttft, blocks):
        axes.legend(fontsize=8, loc="best", framealpha=0.8)
    heading = f"{full.summary['requests']} requests, twice: {verdict(full, morphed)}"
    figure.suptitle(plain(heading), fontsize=10)
    figure.tight_layout()
    save(figure, path)

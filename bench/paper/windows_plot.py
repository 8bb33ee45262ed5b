"""P95 TTFT, violations and loss of each window and way, as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.common.plots import picture
from bench.paper.plot import STYLES

PANELS: Final[tuple[tuple[str, Callable[[Mapping[str, Any]], float], str], ...]] = (
    ("P95 TTFT, s", lambda row: row["ttft_s"]["p95"], "log"),
    ("requests over 2 s, %", lambda row: 100 * row["violations"] / row["requests"], "linear"),
    ("predicted loss of perplexity, %", lambda row: 100 * row["loss"], "linear"),
)


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the medians of repeats, with lines from the least to the greatest."""
    names = list(dict.fromkeys(row["load"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    width = 0.8 / len(ways)
    with picture(path, len(PANELS), 1, figsize=(11, 9), sharex=True) as (_, panels):
        for panel, (title, number, scale) in zip(panels, PANELS, strict=True):
            for place, way in enumerate(ways):
                values = [
                    [number(row) for row in rows if (row["load"], row["way"]) == (name, way)]
                    for name in names
                ]
                at = [index + (place - (len(ways) - 1) / 2) * width for index in range(len(names))]
                points = [(x, median(of), min(of), max(of)) for x, of in zip(at, values, strict=True) if of]
                xs, middles, least, most = zip(*points, strict=True)
                panel.bar(xs, middles, width, label=way, color=STYLES[way][0])
                panel.vlines(xs, least, most, color="black", lw=1)
            panel.set_yscale(scale)
            panel.set_ylabel(title)
        panels[0].axhline(2.0, color="grey", lw=0.8)
        panels[0].legend(ncols=len(ways))
        panels[-1].set_xticks(range(len(names)), names)

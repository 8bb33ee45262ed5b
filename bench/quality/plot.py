"""The picture of `bench.quality`: a panel for each method and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common.plots import picture

STYLES = {"LIS": "o-", "front-to-back": "s--", "back-to-front": "^--", "random": "x:"}


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG: rows are methods, columns precisions with a scale of their own."""
    names = list(result["orders"])
    methods, precisions = (list(dict.fromkeys(n.split()[part] for n in names)) for part in (1, 0))
    size = (4 * len(precisions), 3 * len(methods))
    with picture(path, len(methods), len(precisions), figsize=size, sharey="col", squeeze=False) as (
        figure,
        panels,
    ):
        for row, method in enumerate(methods):
            for column, precision in enumerate(precisions):
                name = f"{precision} {method}"
                _panel(panels[row][column], name, result["orders"][name])
        panels[0][0].legend(fontsize=8)
        figure.supxlabel("swapped layers")
        figure.supylabel("perplexity, held-out text")


def _panel(axes: Any, name: str, found: dict[str, Any]) -> None:
    for order, values in found["perplexity"].items():
        axes.plot(found["counts"], values, STYLES[order], label=order, markersize=4, linewidth=1)
    axes.set_title(name, fontsize=10)
    axes.grid(alpha=0.3)

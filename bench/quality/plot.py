"""The curves of bench.quality.measure as one picture: a panel for each method and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt

STYLES = {"LIS": "o-", "front-to-back": "s--", "back-to-front": "^--", "random": "x:"}


def plot(result: dict[str, Any], path: Path) -> None:
    """Rows are methods, columns precisions; the scale is shared by a column, so that methods compare."""
    names = list(result["orders"])
    methods, precisions = (list(dict.fromkeys(n.split()[part] for n in names)) for part in (1, 0))
    figure, panels = plt.subplots(
        len(methods),
        len(precisions),
        figsize=(4 * len(precisions), 3 * len(methods)),
        sharey="col",
        squeeze=False,
    )
    for row, method in enumerate(methods):
        for column, precision in enumerate(precisions):
            _panel(panels[row][column], f"{precision} {method}", result["orders"][f"{precision} {method}"])
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("swapped layers")
    figure.supylabel("perplexity, held-out text")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axes: Any, name: str, found: dict[str, Any]) -> None:
    for order, values in found["perplexity"].items():
        axes.plot(found["counts"], values, STYLES[order], label=order, markersize=4, linewidth=1)
    axes.set_title(name, fontsize=10)
    axes.grid(alpha=0.3)

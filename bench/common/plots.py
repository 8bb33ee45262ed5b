"""Pictures of results, drawn without a display."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display
from matplotlib import pyplot as plt


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its panels, and write them to `path` as PNG afterwards.

    `options` are those of `pyplot.subplots`.
    """
    figure, panels = plt.subplots(rows, columns, **options)
    yield figure, panels
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""The picture of `bench.deploy`: how much more than the chosen configuration the fixed ones take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common.plots import picture
from bench.deploy.report import FIXED


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG. A hatched bar misses the intent's limit."""
    models = list(dict.fromkeys(row["model"] for row in found["intents"]))
    with picture(path, len(models), 1, figsize=(10, 3 * len(models)), squeeze=False) as (_, panels):
        for axes, model in zip(panels[:, 0], models, strict=True):
            _panel(axes, model, [row for row in found["intents"] if row["model"] == model])
        panels[0][0].legend(fontsize=8)


def _panel(axes: Any, model: str, rows: list[dict[str, Any]]) -> None:
    for number, name in enumerate(FIXED):
        bars = axes.bar(
            [at + 0.27 * (number - 1) for at in range(len(rows))],
            [row["fixed"][name]["times"] for row in rows],
            width=0.25,
            label=name,
        )
        for bar, row in zip(bars, rows, strict=True):
            bar.set_hatch("" if row["fixed"][name]["is_met"] else "//")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set(yscale="log", ylabel=f"{model}: times the chosen one's")
    axes.set_xticks(range(len(rows)), [f"{row['intent']}\n{row['chosen']}" for row in rows], fontsize=8)

"""The picture of `bench.transform costs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.common.plots import picture

OURS, OTHERS = "tab:blue", ("tab:red", "tab:orange")
BLUES = ("tab:blue", "tab:cyan")


def draw(found: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG."""
    kv, whole = found["kv"]["ways"], found["whole"]["ways"]
    with picture(path, 2, 2, figsize=(12, 8)) as (_, panels):
        _bars(panels[0][0], {way: one["ms"] for way, one in kv.items()}, "ms for a layer's KV")
        _bars(panels[0][1], {way: one["extra_mib"] for way, one in kv.items()}, "MiB besides the cache")
        _bars(
            panels[1][0], {way: one["ms"] for way, one in whole.items()}, "ms for all layers, weights and KV"
        )
        _steps(panels[1][1], found["steps"])


def _bars(axes: Any, values: dict[str, float], label: str) -> None:
    names = [
        name.replace(", ", ",\n").replace(" and ", "\nand ").replace("through host", "through\nhost")
        for name in values
    ]
    drawn = axes.bar(
        names, list(values.values()), color=[*BLUES, *OTHERS] if len(names) > 3 else [OURS, *OTHERS]
    )
    axes.bar_label(drawn, fmt="%.0f")
    axes.set(ylabel=label)


def _steps(axes: Any, steps: dict[str, Any]) -> None:
    for to, colour in (("TP4", OURS), ("TP1", OTHERS[1])):
        changes = [one for one in steps["changes"] if one["to"] == to]
        layers = [str(one["layers_per_step"]) for one in changes]
        axes.plot(
            layers, [one["median_step_ms"] for one in changes], "o-", color=colour, label=f"to {to}, median"
        )
        longest = [one["longest_step_ms"] for one in changes]
        axes.plot(layers, longest, "^--", color=colour, label=f"to {to}, longest")
    for (tp, ms), style in zip(steps["calm_ms"].items(), (":", "-."), strict=True):
        axes.axhline(ms, color="grey", linestyle=style, label=f"{tp}, no change")
    axes.set(xlabel="layers that change in a step", ylabel="ms of a step")
    axes.legend(fontsize=8)

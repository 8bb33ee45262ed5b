"""What `instar plan` shows: the configuration map as a table, and as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich import box
from rich.table import Table

from instar.client import GatewayProblem

MIB: Final = 1 << 20
MARKS: Final = {"measured": "", "extrapolated": "~", "assumed": "?"}
LEGEND: Final = "numbers: plain measured, ~ extrapolated, ? assumed; ± of the latency"
MISSING: Final = "pictures need matplotlib: pip install 'instar[bench]'; the table is there without it"
COST_UNITS: Final = {"memory_seconds": "MiB s", "memory": "MiB", "gpu_hours": "device s"}
COST_SCALES: Final = {"memory_seconds": 1 / MIB, "memory": 1 / MIB, "gpu_hours": 3600.0}
COLOURS: Final = {"full": "#0072B2", "int8": "#D55E00", "int4": "#009E73", "int3": "#CC79A7"}

Estimate = Mapping[str, Any]  # as /admin/models/{model}/plan tells it


def name_of(estimate: Estimate) -> str:
    shape = estimate["configuration"]
    return f"tp{shape['tp']} pp{shape['pp']} {shape['precision']}"


def plan_table(estimates: Sequence[Estimate], intent: Mapping[str, Any]) -> Table:
    """Best first; at most 80 columns. The second line of a header is the unit. `fits` numbers the reasons."""
    unit, scale = COST_UNITS[intent["cost"]], COST_SCALES[intent["cost"]]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("configuration", no_wrap=True)
    for header in ("memory\nMiB", "latency\ns", f"cost\n{unit}", "GPU hours\nof 1M reqs", "loss"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("fits", no_wrap=True)
    reasons = reasons_of(estimates)
    for one in estimates:
        refusal = one["refusal"]
        table.add_row(
            name_of(one),
            marked(one["memory_bytes"], 1 / MIB),
            f"{marked(one['latency_s'])} {spread(one['latency_s'])}".rstrip(),
            marked(one["cost"], scale),
            marked(one["gpu_hours"], 1e6),
            _loss(one.get("loss")),
            f"no ({reasons.index(refusal) + 1})" if refusal else "yes",
        )
    return table


def reasons_of(estimates: Sequence[Estimate]) -> list[str]:
    """Each once."""
    return list(dict.fromkeys(one["refusal"] for one in estimates if one["refusal"]))


def reason_lines(estimates: Sequence[Estimate]) -> list[str]:
    return [f"({number}) {reason}" for number, reason in enumerate(reasons_of(estimates), start=1)]


def marked(quantity: Mapping[str, Any], scale: float = 1.0) -> str:
    return f"{_short(quantity['value'] * scale)}{MARKS[quantity['basis']]}"


def spread(quantity: Mapping[str, Any]) -> str:
    """Half of what lies between low and high, in per cent of the value; "" where nothing is known of it."""
    value, low, high = (quantity[name] for name in ("value", "low", "high"))
    if not value or low == high or not math.isfinite(high - low):
        return ""
    return f"±{(high - low) / 2 / value:.0%}"


def _loss(quantity: Mapping[str, Any] | None) -> str:
    if quantity is None:
        return "-"
    return f"{quantity['value']:.1%}{MARKS[quantity['basis']]}"


def _short(value: float) -> str:
    """Three digits, no exponent where it can be helped."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if abs(value) >= 1000:
        return f"{value:.0f}" if abs(value) < 1e7 else f"{value:.2g}"
    return f"{value:.3g}"


def draw(estimates: Sequence[Estimate], title: str, path: Path) -> None:
    """Latency over memory, a colour for each precision; what cannot be had is hollow. GatewayProblem."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise GatewayProblem(MISSING) from error
    mpl.use("Agg")  # no display
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for one in estimates:
        _point(axes, one)
    axes.set(xlabel="memory of all devices, MiB", ylabel="latency of a request, s", title=title)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except (OSError, ValueError) as error:
        raise GatewayProblem(f"{path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _point(axes: Any, one: Estimate) -> None:
    memory, latency = one["memory_bytes"]["value"] / MIB, one["latency_s"]
    colour = COLOURS[one["configuration"]["precision"]]
    below, above = (
        max(0.0, latency["value"] - latency["low"]),
        max(0.0, latency["high"] - latency["value"]),
    )
    axes.errorbar(
        memory,
        latency["value"],
        yerr=[[below], [above]],
        fmt="o",
        color=colour,
        markerfacecolor="white" if one["refusal"] else colour,
    )
    axes.annotate(
        name_of(one), (memory, latency["value"]), fontsize=7, xytext=(4, 4), textcoords="offset points"
    )

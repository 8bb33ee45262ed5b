"""The configurations of `instar plan` as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bus.precisions import ENTRIES
from instar.errors import InputError
from instar.output.plan_table import Estimate, shape_of
from instar.output.tables import MIB

MISSING: Final = "pictures need matplotlib: pip install 'instar[bench]', or leave out --plot"


def draw(estimates: Sequence[Estimate], title: str, path: Path) -> None:
    """Draw latency over memory, a colour for each precision, hollow where a configuration does not fit.

    Raises InputError.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError(MISSING) from error
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
        raise InputError(f"--plot {path} cannot be written: {error}") from error
    finally:
        plt.close(figure)


def _point(axes: Any, one: Estimate) -> None:
    memory, latency = one["memory_bytes"]["value"] / MIB, one["latency_s"]
    colour = ENTRIES[one["configuration"]["precision"]].colour
    below, above = (max(0.0, latency["value"] - latency["low"]), max(0.0, latency["high"] - latency["value"]))
    axes.errorbar(
        memory,
        latency["value"],
        yerr=[[below], [above]],
        fmt="o",
        color=colour,
        markerfacecolor="white" if one["refusal"] else colour,
    )
    axes.annotate(
        shape_of(one["configuration"]),
        (memory, latency["value"]),
        fontsize=7,
        xytext=(4, 4),
        textcoords="offset points",
    )

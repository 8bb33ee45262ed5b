"""The configurations of `instar plan` as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table

from bus.deployments import FIXABLE
from bus.precisions import BITS
from instar.output.tables import ABSENT, MIB, make_table, plural, short

MARKS: Final = {"measured": "", "extrapolated": "~", "assumed": "?"}
SHOWN: Final = 10  # rows without --all
WIDE: Final = 0.5  # spread at which the order of two configurations means little
LEGEND: Final = "numbers: plain measured, ~ extrapolated, ? assumed; ± of the latency"
FIXED: Final = "fixed: each worker holds a part of the model, and the degree stays"
COST_UNITS: Final = {"memory_seconds": "MiB s", "memory": "MiB", "gpu_hours": "device s"}
COST_SCALES: Final = {"memory_seconds": 1 / MIB, "memory": 1 / MIB, "gpu_hours": 3600.0}

Estimate = Mapping[str, Any]  # a row of /admin/models/{model}/plan


def shape_of(configuration: Mapping[str, Any]) -> str:
    """Return `tp2 pp1 int4`, or `tp2 pp1 int4 kv8`."""
    kv = configuration.get("kv_dtype", "full")
    words = f"tp{configuration['tp']} pp{configuration['pp']} {configuration['precision']}"
    return words if kv == "full" else f"{words} kv{BITS[kv]}"


def render(plan: Mapping[str, Any], card: Mapping[str, Any], *, shows_all: bool) -> Iterator[RenderableType]:
    """Yield the best rows that agree with what the intent fixes, and notes. `card` is the model's."""
    estimates, intent = plan["estimates"], plan["intent"]
    shown = estimates if shows_all else [one for one in estimates if _is_as_fixed(one, intent)][:SHOWN]
    yield plan_table(shown, intent)
    if len(shown) < len(estimates):
        yield f"{len(estimates) - len(shown)} more: --all"
    yield LEGEND
    yield (
        f"memory: weights, the workspace of a step, and the KV of {batch_of(intent)}; a deployment takes its "
        "fair share of the free pages for KV"
    )
    yield from price_lines(shown)
    yield from wide_lines(shown, card)
    yield from (f"({number}) {reason}" for reason, number in reasons_of(shown).items())
    if plan["unmet"]:
        yield plan["unmet"]


def plan_table(estimates: Sequence[Estimate], intent: Mapping[str, Any]) -> Table:
    """Return at most 80 columns, the best row first. `fits` numbers the reasons."""
    unit, scale = COST_UNITS[intent["cost"]], COST_SCALES[intent["cost"]]
    headers = ("memory\nMiB", "latency\ns", f"cost\n{unit}", "GPU hours\nof 1M reqs", "loss")
    table = make_table(["configuration"], headers)
    table.columns[0].no_wrap = True
    table.add_column("fits", no_wrap=True)
    reasons = reasons_of(estimates)
    for one in estimates:
        refusal = one["refusal"]
        table.add_row(
            shape_of(one["configuration"]),
            marked(one["memory_bytes"], 1 / MIB),
            marked_latency(one),
            marked(one["cost"], scale),
            marked(one["gpu_hours"], 1e6),
            f"{loss['value']:.1%}{MARKS[loss['basis']]}" if (loss := one.get("loss")) else ABSENT,
            f"no ({reasons[refusal]})" if refusal else "fixed" if one.get("is_fixed") else "yes",
        )
    return table


def price_lines(estimates: Sequence[Estimate]) -> Iterator[str]:
    """Yield what ranks of one stage take, where they may part again and where the degree stays."""
    if any(one.get("is_fixed") and not one["refusal"] for one in estimates):
        yield FIXED
    for one in estimates:
        if not (fixed := one.get("fixed_worker_bytes")):
            continue
        shape, group = shape_of(one["configuration"]), one["group_worker_bytes"]
        text = f"{shape}: {short(fixed / MIB)} MiB on each worker if the degree stays"
        yield text + (f", {short(group / MIB)} in a group that may part again" if group else "")


def batch_of(intent: Mapping[str, Any]) -> str:
    """Return the requests that the numbers are for: `4 requests of 256+64 tokens`."""
    tokens = f"{intent.get('prompt_tokens', 256)}+{intent.get('output_tokens', 64)} tokens"
    return f"{plural(intent.get('batch_size', 1), 'request')} of {tokens}"


def _is_as_fixed(estimate: Estimate, intent: Mapping[str, Any]) -> bool:
    shape = estimate["configuration"]
    return all(intent.get(name) in (None, shape.get(name)) for name in FIXABLE)


def reasons_of(estimates: Sequence[Estimate]) -> dict[str, int]:
    """Return the number of each reason, from 1."""
    refusals = dict.fromkeys(one["refusal"] for one in estimates if one["refusal"])
    return {reason: number for number, reason in enumerate(refusals, start=1)}


def marked(quantity: Mapping[str, Any], scale: float = 1.0) -> str:
    return f"{short(quantity['value'] * scale)}{MARKS[quantity['basis']]}"


def spread(quantity: Mapping[str, Any]) -> float:
    """Return half the distance from low to high as a share of the value, 0 where it is unknown."""
    value, width = float(quantity["value"]), float(quantity["high"] - quantity["low"])
    return width / 2 / value if value and math.isfinite(width) else 0.0


def marked_latency(estimate: Estimate) -> str:
    """Return `0.12~ ±8%`, with `!` where the spread is wide."""
    latency = estimate["latency_s"]
    share = spread(latency)
    return f"{marked(latency)} ±{share:.0%}{'!' * (share >= WIDE)}" if share else marked(latency)


def wide_lines(estimates: Sequence[Estimate], card: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to do about wide spreads, of measurements and of assumptions."""
    wide = [one["latency_s"]["basis"] for one in estimates if spread(one["latency_s"]) >= WIDE]
    if any(basis != "assumed" for basis in wide):
        name, folder = card["name"], card["path"]
        yield (
            "! the spread is too wide to choose by: the worker was busy while it was measured, or the "
            "measured requests were quite different. To measure again, while the service is idle: "
            f"`instar model remove {name}`, delete {folder}/instar/fingerprint-*.json, "
            f"`instar model add {folder} --name {name}`"
        )
    if "assumed" in wide:
        yield "! with ?: an assumption without a measurement; deploy it to see"

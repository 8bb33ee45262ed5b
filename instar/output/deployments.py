"""Deployments in words: what serves them, what is expected, and what they really have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rich import box
from rich.table import Table

from instar.output.plan_table import MIB, batch_of, marked, shape_of

ABSENT: Final = "-"
OVER: Final = ("retired", "failed")


def in_words(found: dict[str, Any]) -> str:
    """What became of it, and of one that serves where and what it gives."""
    lines = [heading(found)]
    if found["state"] == "serving" and (expected := found.get("expected")):
        lines.append(f"  {found['instance']}: {shape_of(expected['configuration'])} on {where(found)}")
        memory, latency = marked(expected["memory_bytes"], 1 / MIB), marked(expected["latency_s"])
        requests = batch_of(found.get("intent") or {})
        lines.append(f"  expected: {memory} MiB, {latency} s a request, for {requests}")
    if kv := kv_text(found):
        lines.append(f"  has: {kv}")
    return "".join(f"{line}\n" for line in lines)


def heading(found: dict[str, Any]) -> str:
    because = f" ({found['reason']})" if found.get("reason") else ""
    return f"deployment {found['id']} of {found['model']}: {found['state']}{because}"


def where(found: dict[str, Any]) -> str:
    """Its workers, those of a stage joined by +."""
    return ", ".join("+".join(stage["workers"]) for stage in found["stages"])


def kv_text(found: dict[str, Any]) -> str:
    """Empty where nothing was reported of it."""
    kv = found.get("kv")
    return f"{kv['bytes'] / MIB:.0f} MiB of KV, {kv['tokens']} tokens" if kv else ""


def table(deployments: Sequence[dict[str, Any]]) -> Table:
    """At most 80 columns where names are short. The second line of a header is the unit."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("deployment", no_wrap=True)  # to be copied
    for header in ("model", "state", "as", "on"):
        shown.add_column(header, overflow="fold")
    for header in ("KV\nMiB", "KV\ntokens", "expected\ns"):
        shown.add_column(header, justify="right", no_wrap=True)
    for one in deployments:
        kv, expected = one.get("kv"), one.get("expected")
        has_stages = one["stages"] and one.get("configuration")
        shown.add_row(
            one["id"],
            one["model"],
            one["state"],
            shape_of(one["configuration"]) if has_stages else ABSENT,
            where(one) or ABSENT,
            f"{kv['bytes'] / MIB:.0f}" if kv else ABSENT,
            str(kv["tokens"]) if kv else ABSENT,
            marked(expected["latency_s"]) if has_stages and expected else ABSENT,
        )
    return shown


def reasons(deployments: Sequence[dict[str, Any]]) -> list[str]:
    """Of those that have one to give."""
    return [f"{one['id']}: {one['reason']}" for one in deployments if one["reason"]]

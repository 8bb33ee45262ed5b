"""Deployments in words: what serves them, what was expected, and what they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from instar.output.plan_table import batch_of, marked, shape_of
from instar.output.tables import ABSENT, MIB, make_table, with_reason


def in_words(found: dict[str, Any]) -> str:
    """Return the state of a deployment, and of one that serves its place and its numbers."""
    lines = [_heading(found, found.get("reason"))]
    if found["state"] == "serving" and (expected := found.get("expected")):
        shape = shape_of(expected["configuration"])
        lines.append(f"  {found['instance']}: {shape} on {_workers(found)}{_price_text(found)}")
        memory, latency = marked(expected["memory_bytes"], 1 / MIB), marked(expected["latency_s"])
        requests = batch_of(found.get("intent") or {})
        lines.append(f"  expected: {memory} MiB, {latency} s a request, for {requests}")
    if kv := _kv_text(found):
        lines.append(f"  has: {kv}")
    return "".join(f"{line}\n" for line in lines)


def deployment_line(found: dict[str, Any]) -> str:
    """Return the state of a deployment with its instance and KV, or the reason, on one line."""
    return _heading(found, ", ".join(filter(None, (found["instance"] or found["reason"], _kv_text(found)))))


def _heading(found: dict[str, Any], reason: str | None) -> str:
    return with_reason(f"deployment {found['id']} of {found['model']}: {found['state']}", reason)


def _workers(found: dict[str, Any]) -> str:
    """Return its workers, those of a stage joined by +."""
    return ", ".join("+".join(stage["workers"]) for stage in found["stages"])


def _price_text(found: dict[str, Any]) -> str:
    """Return what a worker holds to part again, or that it does not; "" for one worker."""
    expected = found["expected"]
    fixed, group = (expected.get(f"{way}_worker_bytes") or 0 for way in ("fixed", "group"))
    if not fixed:
        return ""
    if found.get("is_fixed"):
        could = f"; {group / MIB:.1f} MiB would be needed to part again" if group else ""
        return f", fixed: {fixed / MIB:.1f} MiB on each{could}"
    return f": {group / MIB:.1f} MiB on each, to part again; {fixed / MIB:.1f} MiB if the degree stayed"


def _kv_text(found: dict[str, Any]) -> str:
    """Return its KV, "" where none was reported."""
    kv = found.get("kv")
    return f"{kv['bytes'] / MIB:.0f} MiB of KV, {kv['tokens']} tokens" if kv else ""


def table(deployments: Sequence[dict[str, Any]]) -> Table:
    """Return a table of at most 80 columns where names are short."""
    shown = make_table(["deployment", "model", "state", "as", "on"], ["KV\nMiB", "KV\ntokens", "expected\ns"])
    shown.columns[0].no_wrap = True  # ids are copied
    for one in deployments:
        kv, expected = one.get("kv"), one.get("expected")
        has_stages = one["stages"] and one.get("configuration")
        shown.add_row(
            one["id"],
            one["model"],
            one["state"],
            shape_of(one["configuration"]) if has_stages else ABSENT,
            _workers(one) or ABSENT,
            f"{kv['bytes'] / MIB:.0f}" if kv else ABSENT,
            str(kv["tokens"]) if kv else ABSENT,
            marked(expected["latency_s"]) if has_stages and expected else ABSENT,
        )
    return shown

"""`instar status`: the state of a running service as tables."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bus.settings import Settings
from instar.client import GatewayProblem, gateway_client, get_json
from instar.shapes import degrees_text, layers_text

MIB = 1 << 20
ENDED_SHOWN = 3  # morphs
FULL = {"attention": "full", "ffn": "full"}
ABSENT = "-"  # not told, which is not zero


def status(settings: Settings, *, url: str | None, key: str | None, as_json: bool) -> int:
    """Exit status 0, or 1 when no gateway answered."""
    try:
        with gateway_client(settings, url, key, settings.gateway.admin_keys) as client:
            state = get_json(client, "/admin/state")
    except GatewayProblem as problem:
        sys.stderr.write(f"instar status: {problem}\n")
        return 1
    if as_json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
        return 0
    console = Console()
    console.print(workers_table(state["workers"]))
    console.print(instances_table(state["instances"]))
    for line in shape_lines(state["instances"]):
        console.print(line, highlight=False)
    if morphs := shown_morphs(state.get("morphs") or []):
        console.print(morphs_table(morphs))
    console.print(policy_text(state.get("policy") or {}))
    return 0


def workers_table(workers: list[dict[str, Any]]) -> Table:
    """Memory in MiB: weights + KV + free = all, always. The second line of a header is the unit."""
    memory = (f"{kind}\nMiB" for kind in ("weights", "KV", "free", "all"))
    table = _table("worker", "host", "device", "state", "busy\nof time", *memory)
    for worker in workers:
        pages, page_bytes = worker.get("pages") or {}, worker.get("page_bytes") or 0
        busy = worker.get("busy")
        table.add_row(
            worker["id"],
            worker.get("host", ""),
            worker.get("device", ""),
            worker.get("progress") if worker.get("state") == "loading" else worker.get("state"),
            ABSENT if busy is None else f"{busy:.0%}",
            *(_mib(pages.get(kind), page_bytes) for kind in ("weights", "kv", "free", "budget")),
        )
    if not workers:
        table.add_row("none has joined", *[""] * 8)
    return table


def instances_table(instances: list[dict[str, Any]]) -> Table:
    counts = ("KV blocks\nused/all", "running\nreqs", "waiting\nreqs")
    table = _table("instance", "model", "state", "shape", "layers\nfull/all", *counts)
    for instance in instances:
        kv = instance.get("kv") or {}
        used, blocks = kv.get("used"), kv.get("blocks")
        table.add_row(
            instance["id"],
            instance.get("model", ""),
            instance.get("state", ""),
            f"tp{instance.get('tp', 1)} pp{instance.get('pp', 1)}",
            _full_layers(instance.get("layers") or []),
            f"{used}/{blocks} ({used / blocks:.0%})" if blocks else ABSENT,
            _count(instance.get("running")),
            _count(instance.get("waiting")),
        )
    return table


def shape_lines(instances: list[dict[str, Any]]) -> list[str]:
    """What the table has no room for: of each instance its workers, where it has several; the precisions and
    the degrees of its layers, where they differ."""
    lines = []
    for instance in instances:
        name, layers = instance["id"], instance.get("layers") or []
        if len(workers := instance.get("workers") or []) > 1:
            lines.append(f"{name}: shards on {', '.join(workers)}, in this order")
        if any(layer != FULL for layer in layers):
            lines.append(f"{name}: {layers_text(layers)}")
        if len(set(degrees := instance.get("layer_tp") or [])) > 1:
            lines.append(f"{name}: layers {degrees_text(degrees)}")
    return lines


def _full_layers(layers: list[dict[str, str]]) -> str:
    return f"{sum(layer == FULL for layer in layers)}/{len(layers)}" if layers else ABSENT


def shown_morphs(morphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that run, and the last that ended; the latest first."""
    running = [morph for morph in morphs if morph["state"] == "running"]
    ended = [morph for morph in morphs if morph["state"] != "running"]
    return running[::-1] + ended[: -ENDED_SHOWN - 1 : -1]


def morphs_table(morphs: list[dict[str, Any]]) -> Table:
    """`took` of one that runs: so far it is not known here, since clocks differ."""
    table = _table("morph", "kind", "instance", "state", "took", "why, and how it ended")
    for morph in morphs:
        ended = morph.get("ended")
        told = [text for text in (morph.get("decided"), morph.get("reason")) if text]
        table.add_row(
            morph["id"],
            morph["kind"],
            morph["target"],
            morph["state"],
            ABSENT if ended is None else f"{ended - morph['started']:.2f} s",
            "; ".join(told),
        )
    return table


def policy_text(policy: dict[str, Any]) -> str:
    mode = policy.get("mode", ABSENT)
    if mode == "manual" or "kv_usage_high" not in policy:
        return f"policy: {mode}"
    return (
        f"policy: {mode}, to {policy['precision']} above {policy['kv_usage_high']:.0%} KV use or "
        f"{policy['queue_delay_high_s']:g} s of waiting, back below {policy['kv_usage_low']:.0%} and "
        f"{policy['queue_delay_low_s']:g} s"
    )


def _mib(pages: int | None, page_bytes: int) -> str:
    return ABSENT if pages is None else f"{pages * page_bytes / MIB:.0f}"


def _count(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)

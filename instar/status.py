"""`instar status`: the state of a running service as tables."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from bus.settings import Settings
from instar.client import GatewayProblem, gateway_client, get_json

MIB = 1 << 20


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
    return 0


def workers_table(workers: list[dict[str, Any]]) -> Table:
    table = Table(
        "worker", "host", "device", "state", "busy", "memory", "weights", "KV", "free", title_justify="left"
    )
    for worker in workers:
        pages = worker.get("pages") or {}
        page_bytes = worker.get("page_bytes") or 0
        sizes = [_size(pages.get(kind), page_bytes) for kind in ("budget", "weights", "kv", "free")]
        busy = worker.get("busy")
        table.add_row(
            worker["id"],
            worker.get("host", ""),
            worker.get("device", ""),
            " ".join(filter(None, (worker.get("state"), worker.get("progress")))),
            "-" if busy is None else f"{busy:.0%}",
            *sizes,
        )
    if not workers:
        table.add_row("none has joined", *[""] * 8)
    return table


def instances_table(instances: list[dict[str, Any]]) -> Table:
    table = Table("instance", "model", "state", "shape", "layers", "KV blocks", "running", "waiting")
    for instance in instances:
        kv = instance.get("kv") or {}
        used, blocks = kv.get("used"), kv.get("blocks")
        table.add_row(
            instance["id"],
            instance.get("model", ""),
            instance.get("state", ""),
            f"tp{instance.get('tp', 1)} pp{instance.get('pp', 1)}",
            _layers(instance.get("layers") or []),
            "-" if not blocks else f"{used:.0f} of {blocks} ({used / blocks:.0%})",
            _count(instance.get("running")),
            _count(instance.get("waiting")),
        )
    return table


def _layers(layers: list[dict[str, str]]) -> str:
    """8 layers, 3 of them int4 -> `5 full, 3 int4`."""
    shapes = Counter(f"{layer.get('ffn', '?')}" for layer in layers)
    return ", ".join(f"{count} {shape}" for shape, count in shapes.most_common())


def _size(pages: int | None, page_bytes: int) -> str:
    return "-" if pages is None else f"{pages * page_bytes / MIB:.0f} MiB"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"

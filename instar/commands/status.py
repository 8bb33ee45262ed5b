"""`instar status`: the state of a running service as tables."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from bus.settings import Settings
from instar.client import GatewayProblem, gateway_client, get_json
from instar.output.deployments import kv_text
from instar.output.layers import degrees_text, layers_text
from instar.output.tables import trimmed

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
    show(state, Console())
    return 0


def show(state: dict[str, Any], console: Console) -> None:
    """Fits 80 columns: what is longer goes on in the next line, and no name is cut."""
    with trimmed(console):
        _show(state, console)


def _show(state: dict[str, Any], console: Console) -> None:
    console.print(workers_table(state["workers"]))
    console.print()
    console.print(instances_table(state["instances"]))
    console.print()
    for line in shape_lines(state["instances"]):
        console.print(line, highlight=False)
    for line in deployment_lines(state.get("deployments") or []):
        console.print(line, highlight=False)
    for morph in shown_morphs(state.get("morphs") or []):
        for indent, line in enumerate(morph_lines(morph)):
            console.print(Padding(line, (0, 0, 0, 2 * indent), expand=False), highlight=False)
    console.print(policy_text(state.get("policy") or {}), highlight=False)
    console.print(as_of_text(state.get("metrics") or {}), highlight=False)


def deployment_lines(deployments: list[dict[str, Any]]) -> list[str]:
    """Of all that have not been retired."""
    lines = []
    for one in deployments:
        told = ", ".join(filter(None, (one["instance"] or one["reason"], kv_text(one))))
        if one["state"] != "retired":
            lines.append(
                f"deployment {one['id']} of {one['model']}: {one['state']}{f' ({told})' if told else ''}"
            )
    return lines


def workers_table(workers: list[dict[str, Any]]) -> Table:
    """Memory in MiB: weights + KV + free = all, always. The second line of a header is the unit."""
    memory = (f"{kind}\nMiB" for kind in ("weights", "KV", "free", "all"))
    table = _table(["worker", "host", "device", "state"], ["busy\nof time", *memory])
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
    counts = ["layers\nfull/all", "KV blocks\nused/all", "running\nreqs", "waiting\nreqs"]
    table = _table(["instance", "model"], ["state", "shape", *counts])
    for instance in instances:
        kv = instance.get("kv") or {}
        used, blocks = kv.get("used"), kv.get("blocks")
        table.add_row(
            instance["id"],
            instance.get("model", ""),
            instance.get("changing") or instance.get("state", ""),
            _shape(instance),
            _full_layers(instance.get("layers") or []),
            f"{used}/{blocks} {used / blocks:.0%}" if blocks else ABSENT,
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
        if stages := instance.get("stages") or []:
            lines.append(f"{name}: {', then '.join(map(_stage, stages))}")
        elif len(workers := instance.get("workers") or []) > 1:
            lines.append(f"{name}: shards on {', '.join(workers)}, in this order")
        if any(layer != FULL for layer in layers):
            lines.append(f"{name}: {layers_text(layers)}")
        if len(set(degrees := instance.get("layer_tp") or [])) > 1:
            lines.append(f"{name}: layers {degrees_text(degrees)}")
    return lines


def _stage(stage: dict[str, Any]) -> str:
    first, last = stage["first"], stage["end"] - 1
    layers = f"layers {first} to {last}" if last > first else f"layer {first}"
    return f"{layers} on {' + '.join(stage['workers'])}"


def _shape(instance: dict[str, Any]) -> str:
    """Stages only where there are several."""
    stages = instance.get("pp", 1)
    return f"tp{instance.get('tp', 1)}" + (f" pp{stages}" if stages > 1 else "")


def _full_layers(layers: list[dict[str, str]]) -> str:
    return f"{sum(layer == FULL for layer in layers)}/{len(layers)}" if layers else ABSENT


def shown_morphs(morphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All that run, and the last that ended; the latest first."""
    running = [morph for morph in morphs if morph["state"] == "running"]
    ended = [morph for morph in morphs if morph["state"] != "running"]
    return running[::-1] + ended[: -ENDED_SHOWN - 1 : -1]


def morph_lines(morph: dict[str, Any]) -> list[str]:
    """What it is and how it ended; then why. How long one has run is not known here, since clocks differ."""
    ended = morph.get("ended")
    took = "" if ended is None else f" in {ended - morph['started']:.2f} s"
    told = [text for text in (morph.get("decided"), morph.get("reason")) if text]
    heading = f"{morph['kind']} {morph['id']} of {morph['target']}: {morph['state']}{took}"
    return [heading, "; ".join(told)] if told else [heading]


def policy_text(policy: dict[str, Any]) -> str:
    mode = policy.get("mode", ABSENT)
    if mode == "manual" or "kv_usage_high" not in policy:
        return f"policy: {mode}"
    return (
        f"policy: {mode}, to {policy['precision']} above {policy['kv_usage_high']:.0%} KV use or "
        f"{policy['queue_delay_high_s']:g} s of waiting, back below {policy['kv_usage_low']:.0%} and "
        f"{policy['queue_delay_low_s']:g} s"
    )


def as_of_text(metrics: dict[str, Any]) -> str:
    """How old the oldest of the numbers is: workers report them, the monitor passes them on."""
    if "age_seconds" not in metrics:
        return "memory, KV and load: not measured yet"
    reported = max((worker["age_seconds"] for worker in metrics.get("workers") or []), default=0.0)
    return f"memory, KV and load: as of {metrics['age_seconds'] + reported:.1f} s ago"


def _mib(pages: int | None, page_bytes: int) -> str:
    return ABSENT if pages is None else f"{pages * page_bytes / MIB:.0f}"


def _count(value: int | None) -> str:
    return ABSENT if value is None else str(value)


def _table(words: list[str], numbers: list[str]) -> Table:
    """Words that are too long for the screen go on in the next line."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, no_wrap=True)
    return table

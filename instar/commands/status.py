"""`instar status`: the state of a running service as tables."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from instar.client import admin_client, get_json
from instar.output.deployments import deployment_line
from instar.output.gpus import gpu_lines
from instar.output.morph_numbers import heading
from instar.output.shapes import degrees_text, layers_text
from instar.output.tables import ABSENT, MIB, make_table, print_line, trimmed, write_json
from instar.parser import CommandParser, add_client_flags

ENDED_SHOWN = 3  # morphs
FULL = {"attention": "full", "ffn": "full"}

DESCRIPTION = """\
Shows the state of a running service.

  instar status                     the service on this machine
  instar status --verbose           with GPUs, limits of a step, and kernels of products
  instar status --json              the same for programs
  instar status --url http://host:8000
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser)
    parser.add_argument("--verbose", action="store_true", help="show GPUs, limits of a step and kernels too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        state = get_json(client, "/admin/state", "workers", "instances")
    if args.json:
        return write_json(state)
    show(state, Console(), is_verbose=args.verbose)
    return 0


def show(state: dict[str, Any], console: Console, *, is_verbose: bool = False) -> None:
    """Print the state in 80 columns. Long names wrap and are not cut."""
    deployments = [one for one in state.get("deployments") or [] if one["state"] != "retired"]
    instances = state["instances"]
    now_s = time.time()
    lines: list[Any] = [*shape_lines(instances), *withheld_lines(instances, now_s)]
    if is_verbose:
        lines += [*gpu_lines(state["workers"]), *limit_lines(instances), *product_lines(instances)]
    lines += map(deployment_line, deployments)
    for morph in shown_morphs(state.get("morphs") or []):
        first, *reasons = morph_lines(morph)
        lines += [first, *(Padding(reason, (0, 0, 0, 2), expand=False) for reason in reasons)]
    lines += controller_lines(state.get("controller") or {}, now_s)
    lines += [policy_text(state.get("policy") or {}), as_of_text(state.get("metrics") or {})]
    with trimmed(console):
        for table in (workers_table(state["workers"]), instances_table(instances)):
            console.print(table)
            console.print()
        for line in lines:
            print_line(console, line)


def workers_table(workers: list[dict[str, Any]]) -> Table:
    """Return the workers. Memory is in MiB: weights + KV + free = all."""
    memory = (f"{kind}\nMiB" for kind in ("weights", "KV", "free", "all"))
    table = make_table(["worker", "host", "device", "state"], ["busy\nof time", *memory])
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
    table = make_table(["instance", "model"], ["state", "shape", *counts])
    for instance in instances:
        kv = instance.get("kv") or {}
        used, blocks = kv.get("used"), kv.get("blocks")
        layers, stages = instance.get("layers") or [], instance.get("pp", 1)
        table.add_row(
            instance["id"],
            instance.get("model", ""),
            instance.get("changing") or instance.get("state", ""),
            f"tp{instance.get('tp', 1)}" + (f" pp{stages}" if stages > 1 else ""),
            f"{sum(layer == FULL for layer in layers)}/{len(layers)}" if layers else ABSENT,
            f"{used}/{blocks} {used / blocks:.0%}" if blocks else ABSENT,
            *(ABSENT if (count := instance.get(of)) is None else str(count) for of in ("running", "waiting")),
        )
    return table


def shape_lines(instances: list[dict[str, Any]]) -> list[str]:
    """Return what the table has no room for: several workers, and layers that differ."""
    lines = []
    for instance in instances:
        name, layers = instance["id"], instance.get("layers") or []
        if stages := instance.get("stages") or []:
            lines.append(f"{name}: {', then '.join(map(_stage, stages))}")
        elif len(workers := instance.get("workers") or []) > 1:
            lines.append(f"{name}: shards on {', '.join(workers)}, in this order")
        if any(layer != FULL for layer in layers):
            lines.append(f"{name}: {layers_text(layers)}")
        if use := instance.get("expert_use"):
            halves = [half for _, half, _ in use]
            mean = sum(halves) / len(halves)
            words = f"the less used half of a layer's experts has {mean:.0%} of their use"
            lines.append(f"{name}: {words} ({min(halves):.0%} to {max(halves):.0%})")
        if (kv := (instance.get("kv") or {}).get("precision") or "full") != "full":
            lines.append(f"{name}: KV cache in {kv}")
        if len(set(degrees := instance.get("layer_tp") or [])) > 1:
            lines.append(f"{name}: layers {degrees_text(degrees)}")
        lines += loss_lines(instance)
    return lines


def withheld_lines(instances: list[dict[str, Any]], now_s: float) -> list[str]:
    """Return why instances were not morphed although requests waited. now_s: seconds since 1970."""
    return [
        f"{one['id']}: no morph, {ago_text(now_s - found['at'])}: {found['reason']}"
        for one in instances
        if (found := one.get("withheld"))
    ]


def ago_text(seconds: float) -> str:
    """Return `12 s ago` or `3 min ago`; clocks of two machines may differ."""
    seconds = max(0.0, seconds)
    return f"{seconds:.0f} s ago" if seconds < 120 else f"{seconds / 60:.0f} min ago"


def loss_lines(instance: Mapping[str, Any]) -> list[str]:
    """Return of which precisions the loss is assumed, and why."""
    by_reason: dict[str, list[str]] = {}
    for precision, reason in (instance.get("losses_assumed") or {}).items():
        by_reason.setdefault(reason, []).append(precision)
    return [
        f"{instance['id']}: the loss of {', '.join(names)} is assumed: {reason}"
        for reason, names in by_reason.items()
    ]


def limit_lines(instances: list[dict[str, Any]]) -> list[str]:
    """Return what one step takes at most, which depends on the device, and the degree of the layout."""
    return [
        f"{one['id']}: at most {one['max_num_seqs']} sequences and {one['max_num_batched_tokens']} tokens"
        f" a step, weights padded for degree {one['max_tp']}"
        for one in instances
        if one.get("max_num_seqs")
    ]


def product_lines(instances: list[dict[str, Any]]) -> list[str]:
    """Return the kernels that dense products run on, by their numbers of tokens."""
    return [f"{instance['id']}: {line}" for instance in instances for line in instance.get("products") or []]


def _stage(stage: dict[str, Any]) -> str:
    first, last = stage["first"], stage["end"] - 1
    layers = f"layers {first} to {last}" if last > first else f"layer {first}"
    return f"{layers} on {' + '.join(stage['workers'])}"


def shown_morphs(morphs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all morphs that run and the last that ended, the latest first."""
    ended = [morph for morph in reversed(morphs) if morph["state"] != "running"]
    return [morph for morph in reversed(morphs) if morph["state"] == "running"] + ended[:ENDED_SHOWN]


def morph_lines(morph: dict[str, Any]) -> list[str]:
    """Return how a morph ended and why."""
    reasons = "; ".join(filter(None, (morph.get("decided"), morph.get("reason"))))
    return [heading(morph), reasons] if reasons else [heading(morph)]


def policy_text(policy: dict[str, Any]) -> str:
    mode = policy.get("mode", ABSENT)
    if mode == "manual" or "kv_usage_high" not in policy:
        return f"policy: {mode}"
    return (
        f"policy: {mode}, to {policy['precision']} above {policy['kv_usage_high']:.0%} KV use or "
        f"{policy['queue_delay_high_s']:g} s of waiting, back below {policy['kv_usage_low']:.0%} and "
        f"{policy['queue_delay_low_s']:g} s"
    )


def controller_lines(controller: dict[str, Any], now_s: float) -> list[str]:
    """Return which controller leads, and at what one failed last; nothing from a gateway that does not say.

    now_s: seconds since 1970.
    """
    if not controller:
        return []
    failed = _failure_lines(controller.get("failure"), now_s)
    if controller["leads"]:
        return [f"controller: {controller['name']} leads, term {controller['term']}", *failed]
    last = f"; the last was {controller['name']}, term {controller['term']}" if controller["name"] else ""
    return [f"controller: none leads, so nothing morphs or deploys{last}", *failed]


def _failure_lines(found: dict[str, Any] | None, now_s: float) -> list[str]:
    """Return at what the controller failed last; it goes on."""
    if not found:
        return []
    return [f"controller: failed at {found['work']}, {ago_text(now_s - found['at'])}: {found['reason']}"]


def as_of_text(metrics: dict[str, Any]) -> str:
    """Return the age of the oldest numbers: workers report them and the monitor passes them on."""
    if "age_seconds" not in metrics:
        return "memory, KV and load: not measured yet"
    reported = max((worker["age_seconds"] for worker in metrics.get("workers") or []), default=0.0)
    return f"memory, KV and load: as of {metrics['age_seconds'] + reported:.1f} s ago"


def _mib(pages: int | None, page_bytes: int) -> str:
    return ABSENT if pages is None else f"{pages * page_bytes / MIB:.0f}"

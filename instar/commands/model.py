"""`instar model`: registered models, and what was measured of them."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final
from urllib.parse import quote

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from instar.client import ask_json, get_json
from instar.output.tables import tell_json, trimmed
from instar.wait import Wait, follow

MEASURED: Final = ("profiled", "failed")
LINKS: Final = {"all_reduce": "all-reduces", "hop": "hops of stages"}
MEASURE_S: Final = 3600.0  # at most


def add(client: httpx.Client, args: argparse.Namespace) -> int:
    folder = args.folder.expanduser().resolve()
    body = {"path": str(folder)} | ({"name": args.registered} if args.registered else {})
    card = ask_json(client, "POST", "/admin/models", body)
    if not args.detach:
        card = measured(client, card)
    if args.json:
        return tell_json(card, card["state"] != "failed")
    sys.stdout.write(f"{card['name']}: {card['state']}{_because(card)}\n")
    return int(card["state"] == "failed")


def measured(client: httpx.Client, card: dict[str, Any], hint: str = "") -> dict[str, Any]:
    """Waits until it is, or cannot be. Raises GatewayProblem."""
    goes_on = f"it goes on: `instar model show {card['name']}`"
    return follow(client, model_path(card["name"]), card, Wait(MEASURED, MEASURE_S, hint or goes_on))


def show_list(client: httpx.Client, args: argparse.Namespace) -> int:
    models = get_json(client, "/admin/models")["models"]
    if args.json:
        return tell_json(models)
    if not models:
        sys.stdout.write("no model is registered; `instar model add DIR` does it\n")
        return 0
    table = Table(
        "model", "layers", "state", "why, and how far", "folder", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for card in models:
        told = card["progress"] or card["reason"]
        table.add_row(card["name"], str(card["num_layers"]), card["state"], told, card["path"])
    console = Console()
    with trimmed(console):
        console.print(table)
    return 0


def show(client: httpx.Client, args: argparse.Namespace) -> int:
    card = get_json(client, model_path(args.registered))
    if args.json:
        return tell_json(card)
    sys.stdout.write(in_words(card))
    return 0


def remove(client: httpx.Client, args: argparse.Namespace) -> int:
    card = ask_json(client, "DELETE", model_path(args.registered))
    if args.json:
        return tell_json(card)
    was_measured = card["state"] != "profiling"
    rest = "what was measured of it is kept beside it" if was_measured else "its measurement is cancelled"
    sys.stdout.write(f"{card['name']} is registered no more; {rest}\n")
    return 0


def model_path(name: str) -> str:
    return f"/admin/models/{quote(name, safe='')}"


def in_words(card: dict[str, Any]) -> str:
    """A model, and of each kind of device what was measured there."""
    context = f", a context of {card['context']} tokens" if card.get("context") else ""
    lines = [
        f"{card['name']}: {card['state']}{_because(card)}",
        f"  {card['path']}: {card['num_layers']} layers{context}",
    ]
    for profile in card.get("profiles") or []:
        lines += profile_lines(profile)
    return "".join(f"{line}\n" for line in lines)


def profile_lines(profile: dict[str, Any]) -> list[str]:
    """What its numbers rest on, what it cost, and what precisions lose, as far as that is known."""
    losses = {name: loss for name, loss in profile["loss"].items() if name != "full"}
    unknown = [name for name in profile["precisions"] if name not in ("full", *losses)]
    lines = [
        f"  measured on {profile['device']} by Instar {profile['version']}: {profile['samples']} samples, "
        f"{profile['device_seconds']:.1f} s, {profile['peak_bytes'] / (1 << 20):.0f} MiB at most",
        f"    prompts of {_listed(profile['prompt_tokens'])} tokens in batches of "
        f"{_listed(profile['batch_sizes'])}; precisions: {_listed(profile['precisions'])}",
        f"    tensor-parallel degrees that its weights can be cut to: {_listed(profile['degrees'])}",
    ]
    links = ", ".join(LINKS.get(one, one) for one in profile.get("links") or [])
    lines.append(
        f"    between two workers: {links.replace(', ', ' and ') or 'nothing, there was no second one'}"
    )
    if losses:
        told = ", ".join(f"{name} {loss:.1%}" for name, loss in losses.items())
        lines.append(f"    perplexity lost: {told}")
    if unknown:
        lines.append(
            f"    perplexity lost by {_listed(unknown)}: not known; `instar profile --precision P` on the "
            "folder tells, then register it again"
        )
    return lines


def _because(card: dict[str, Any]) -> str:
    told = card.get("progress") or card.get("reason")
    return f" ({told})" if told else ""


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values)) or "none"

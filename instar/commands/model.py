"""`instar model`: registered models and their measurements."""

from __future__ import annotations

import argparse
from typing import Any, Final

import httpx

from bus.checkpoints import parse_model
from instar.client import admin_client, admin_path, ask_json, follow, get_json
from instar.output.tables import MIB, make_table, with_reason, write_found, write_parts, write_text
from instar.parser import CommandParser, subcommands

MEASURED: Final = ("profiled", "failed")
LINKS: Final = {"all_reduce": "all-reduces", "hop": "hops of stages"}
MEASURE_S: Final = 3600.0  # the longest wait for a measurement

DESCRIPTION = """\
Registers models with a running service, which measures a few of their layers on an idle worker.

  instar model add path/to/model           under the folder's name; waits until it is measured
  instar model add path/to/model --name chat
  instar model list
  instar model show chat                   its measurements
  instar model remove chat                 when no deployment uses it
"""


def add_to(parser: CommandParser) -> None:
    command = subcommands(parser)
    add = command("add", "register a model folder, and measure it", _add)
    add.add_argument("folder", metavar="DIR", help="as `instar serve` takes it, or the NAME of one pulled")
    add.add_argument("--name", metavar="NAME", help="[the folder's]")
    add.add_argument("--detach", action="store_true", help="do not wait until it is measured")
    command("list", "list the registered models", _list)
    show = command("show", "show a model and its measurements", _show)
    remove = command("remove", "remove a model", _remove)
    for one in (show, remove):
        one.add_argument("model", metavar="MODEL", help="its name")


def _add(args: argparse.Namespace) -> int:
    name, folder = parse_model(args.folder)
    named = args.name or (name if name != folder.name else "")
    body = {"path": str(folder)} | ({"name": named} if named else {})
    with admin_client(args) as client:
        card = ask_json(client, "POST", "/admin/models", body)
        if not args.detach:
            card = until_measured(client, card)
    return write_found(args, card, _heading, is_good=card["state"] != "failed")


def until_measured(client: httpx.Client, card: dict[str, Any], hint: str = "") -> dict[str, Any]:
    """Wait until the model is measured or cannot be. Raises ServerError."""
    hint = hint or f"the measurement continues: `instar model show {card['name']}`"
    return follow(client, admin_path("models", card["name"]), card, MEASURED, MEASURE_S, hint)


def _list(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        models = get_json(client, "/admin/models", "models")["models"]
    if not models and not args.json:
        return write_text("no model is registered; `instar model add DIR` registers one\n")
    table = make_table(["model", "layers", "state", "reason or progress", "folder"])
    for card in models:
        reason = card["progress"] or card["reason"]
        table.add_row(card["name"], str(card["num_layers"]), card["state"], reason, card["path"])
    return write_parts(args, models, [table])


def _show(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        return write_found(args, get_json(client, admin_path("models", args.model)), in_words)


def _remove(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        return write_found(args, ask_json(client, "DELETE", admin_path("models", args.model)), _removed)


def _removed(card: dict[str, Any]) -> str:
    is_cancelled = card["state"] == "profiling"
    rest = "its measurement is cancelled" if is_cancelled else "its measurements stay in its folder"
    return f"removed {card['name']}; {rest}\n"


def in_words(card: dict[str, Any]) -> str:
    """Return a model and what was measured of it on each kind of device."""
    context = f", a context of {card['context']} tokens" if card.get("context") else ""
    lines = [f"  {card['path']}: {card['num_layers']} layers{context}"]
    for profile in card.get("profiles") or []:
        lines += _profile_lines(profile)
    return _heading(card) + "".join(f"{line}\n" for line in lines)


def _heading(card: dict[str, Any]) -> str:
    return with_reason(f"{card['name']}: {card['state']}", card.get("progress") or card.get("reason")) + "\n"


def _degrees(profile: dict[str, Any]) -> str:
    groups, fixed = _listed(profile["degrees"]), _listed(profile.get("fixed_degrees") or [])
    return f"{groups} of groups that may part again" + (f", {fixed} that stay" if fixed else "")


def _profile_lines(profile: dict[str, Any]) -> list[str]:
    """Return what the numbers rest on, what measuring cost, and the loss of precisions where it is known."""
    losses = {name: loss for name, loss in profile["loss"].items() if name != "full"}
    unknown = [name for name in profile["precisions"] if name not in ("full", *losses)]
    links = " and ".join(LINKS.get(one, one) for one in profile.get("links") or [])
    lines = [
        f"  measured on {profile['device']} by Instar {profile['version']}: {profile['samples']} samples, "
        f"{profile['device_seconds']:.1f} s, {profile['peak_bytes'] / MIB:.0f} MiB at most",
        f"    prompts of {_listed(profile['prompt_tokens'])} tokens in batches of "
        f"{_listed(profile['batch_sizes'])}; precisions: {_listed(profile['precisions'])}",
        f"    tensor-parallel degrees: {_degrees(profile)}",
        f"    between two workers: {links or 'not measured; no other worker of its kind was free then'}",
    ]
    if "full" not in profile["precisions"]:
        lines.append(
            f"    the checkpoint is quantised: its layers are in {_listed(profile['precisions'])} alone, and "
            "no swap frees memory"
        )
    elif losses:
        shown = [f"{name} {loss:.1%}" for name, loss in losses.items()]
        lines.append(f"    loss of perplexity: {_listed(shown)}")
    if unknown:
        lines.append(
            f"    loss of perplexity by {_listed(unknown)}: unknown; run `instar profile --precision P` on "
            "the folder, then register it again"
        )
    return lines


def _listed(values: list[Any]) -> str:
    return ", ".join(map(str, values)) or "none"

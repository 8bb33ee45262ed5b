"""`instar model`, `plan`, `deploy` and `retire`: what a running service knows of models, and is to serve."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from bus.settings import Settings
from instar import plan_table
from instar.client import GatewayProblem, ask_json, gateway_client, get_json
from instar.intent_flags import intent
from instar.live_line import LiveLine

POLL_S: Final = 0.3
MEASURED: Final = ("profiled", "failed")
SETTLED: Final = ("serving", "failed", "retired")
GONE: Final = ("retired", "failed")
MIB: Final = 1 << 20

Work = Callable[[httpx.Client, argparse.Namespace], int]


def run(settings: Settings, args: argparse.Namespace, command: str) -> int:
    """Exit status 0; 1 when no gateway answered, it refused, or what was waited for did not come."""
    work = WORK[command]
    try:
        with gateway_client(settings, args.url, args.key, settings.gateway.admin_keys) as client:
            return work(client, args)
    except GatewayProblem as problem:
        sys.stderr.write(f"instar {command}: {problem}\n")
        return 1


# --------------------------------------------------------------------------- models


def _add(client: httpx.Client, args: argparse.Namespace) -> int:
    folder = args.folder.expanduser().resolve()
    body = {"path": str(folder)} | ({"name": args.registered} if args.registered else {})
    card = ask_json(client, "POST", "/admin/models", body)
    if not args.detach:
        card = _follow(client, _model(card["name"]), card, MEASURED, 3600.0, "`instar model list` shows it")
    if args.json:
        return _json(card, card["state"] != "failed")
    sys.stdout.write(f"{card['name']}: {card['state']}{_because(card)}\n")
    return int(card["state"] == "failed")


def _list(client: httpx.Client, args: argparse.Namespace) -> int:
    models = get_json(client, "/admin/models")["models"]
    if args.json:
        return _json(models)
    if not models:
        sys.stdout.write("no model is registered; `instar model add DIR` does it\n")
        return 0
    table = Table(
        "model", "layers", "state", "why, and how far", "folder", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for card in models:
        told = card["progress"] or card["reason"]
        table.add_row(card["name"], str(card["num_layers"]), card["state"], told, card["path"])
    Console().print(table)
    return 0


def _remove(client: httpx.Client, args: argparse.Namespace) -> int:
    card = ask_json(client, "DELETE", _model(args.registered))
    if args.json:
        return _json(card)
    sys.stdout.write(f"{card['name']} is registered no more; what was measured of it is kept beside it\n")
    return 0


def _model(name: str) -> str:
    return f"/admin/models/{quote(name, safe='')}"


# --------------------------------------------------------------------------- plans


def _plan(client: httpx.Client, args: argparse.Namespace) -> int:
    path = _model(args.registered)
    card = get_json(client, path)
    _follow(client, path, card, MEASURED, 3600.0, "ask again later")
    plan = get_json(client, f"{path}/plan?{urlencode(intent(args))}")
    if args.plot:
        plan_table.draw(plan["estimates"], f"{args.registered}: every configuration", args.plot)
    if args.json:
        return _json(plan, not plan["unmet"])
    console = Console()
    console.print(plan_table.plan_table(plan["estimates"], plan["intent"]))
    for line in (plan_table.LEGEND, *plan_table.reason_lines(plan["estimates"])):
        console.print(line, highlight=False, markup=False)
    if plan["unmet"]:
        console.print(plan["unmet"], highlight=False, markup=False)
    return int(bool(plan["unmet"]))


# --------------------------------------------------------------------------- deployments


def _deploy(client: httpx.Client, args: argparse.Namespace) -> int:
    found = ask_json(client, "POST", "/admin/deployments", {"model": args.registered, "intent": intent(args)})
    if not args.detach:
        hint = f"`instar status` shows it, `instar retire {found['id']}` ends it"
        found = _follow(client, _deployment(found["id"]), found, SETTLED, args.wait, hint)
    if args.json:
        return _json(found, args.detach or found["state"] == "serving")
    sys.stdout.write(in_words(found))
    return int(not args.detach and found["state"] != "serving")


def _retire(client: httpx.Client, args: argparse.Namespace) -> int:
    path = _deployment(args.deployment)
    found = ask_json(client, "DELETE", path)
    if not args.detach:
        found = _follow(client, path, found, GONE, args.wait, "`instar status` shows it")
    if args.json:
        return _json(found, args.detach or found["state"] in GONE)
    sys.stdout.write(in_words(found))
    return int(not args.detach and found["state"] not in GONE)


def _deployment(deployment: str) -> str:
    return f"/admin/deployments/{quote(deployment, safe='')}"


def in_words(found: dict[str, Any]) -> str:
    """What became of it, and of one that serves where and what it should give."""
    lines = [f"deployment {found['id']} of {found['model']}: {found['state']}{_because(found)}"]
    if found["state"] == "serving" and (expected := found.get("expected")):
        where = ", ".join(worker for stage in found["stages"] for worker in stage["workers"])
        memory, latency = expected["memory_bytes"], expected["latency_s"]
        lines.append(f"  {found['instance']}: {plan_table.name_of(expected)} on {where}")
        lines.append(
            f"  expected: {plan_table.marked(memory, 1 / MIB)} MiB, {plan_table.marked(latency)} s a request"
        )
    return "".join(f"{line}\n" for line in lines)


def _because(found: dict[str, Any]) -> str:
    return f" ({found['reason']})" if found.get("reason") else ""


# --------------------------------------------------------------------------- waiting


def _follow(
    client: httpx.Client,
    path: str,
    found: dict[str, Any],
    states: Collection[str],
    within_s: float,
    hint: str,
) -> dict[str, Any]:
    """Until it is in one of `states`, or that long. Ctrl-C ends the wait and nothing else. Raises
    GatewayProblem."""
    line, deadline = LiveLine(), time.monotonic() + within_s
    try:
        while found["state"] not in states and time.monotonic() < deadline:
            line.show(f"  {found['state']}: {found.get('progress') or found['reason']}")
            time.sleep(POLL_S)
            found = dict(get_json(client, path))
    except KeyboardInterrupt:
        line.end()
        sys.stderr.write(f"it goes on: {hint}\n")
        raise
    finally:
        line.end()
    return found


def _json(found: Any, is_good: bool = True) -> int:
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    return int(not is_good)


WORK: Final[dict[str, Work]] = {
    "model add": _add,
    "model list": _list,
    "model remove": _remove,
    "plan": _plan,
    "deploy": _deploy,
    "retire": _retire,
}

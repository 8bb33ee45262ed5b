"""`instar plan`, `deploy`, `deployments` and `retire`: what a running service could serve, and is to."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from math import inf
from typing import Any, Final
from urllib.parse import quote, urlencode

import httpx
from rich.console import Console

from bus.settings import Settings
from instar.client import GatewayProblem, ask_json, gateway_client, get_json
from instar.commands import model as registered
from instar.commands.intent_flags import intent
from instar.commands.model import model_path
from instar.output import deployments as deployed
from instar.output import plan_plot, plan_table
from instar.output.tables import tell_json, trimmed
from instar.wait import Wait, follow

SETTLED: Final = ("serving", "failed", "retired")
WAIT_S: Final = 600.0
STUCK_S: Final = 20.0  # without room; whoever wants to wait for some says so
KV_TOLD_S: Final = 2.0  # after it serves; workers report twice a second or so
POLL_S: Final = 0.2

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


# --------------------------------------------------------------------------- plans


def _plan(client: httpx.Client, args: argparse.Namespace) -> int:
    path = model_path(args.registered)
    card = registered.measured(client, get_json(client, path))
    plan = get_json(client, f"{path}/plan?{urlencode(intent(args))}")
    if args.plot:
        plan_plot.draw(plan["estimates"], f"{args.registered}: every configuration", args.plot)
    if args.json:
        return tell_json(plan, not plan["unmet"])
    console = Console()
    with trimmed(console):
        for part in plan_table.told(plan, card, shows_all=args.all):
            console.print(part, highlight=False, markup=False)
    return int(bool(plan["unmet"]))


# --------------------------------------------------------------------------- deployments


def _deploy(client: httpx.Client, args: argparse.Namespace) -> int:
    found = ask_json(client, "POST", "/admin/deployments", {"model": args.registered, "intent": intent(args)})
    if not args.detach:
        found = _until_it_serves(client, found, args.wait)
    if args.json:
        return tell_json(found, args.detach or found["state"] == "serving")
    sys.stdout.write(deployed.in_words(found))
    return int(not args.detach and found["state"] != "serving")


def _until_it_serves(client: httpx.Client, found: dict[str, Any], within_s: float | None) -> dict[str, Any]:
    """None: as long as something is done for it. Raises GatewayProblem."""
    name, path = found["id"], _path(found["id"])
    hint = (
        f"it stays queued, and is loaded when it can be: `instar deployments {name}` shows it, "
        f"`instar retire {name}` takes it back (--wait S: how long to wait for one)"
    )
    if found["state"] == "waiting" and within_s is None:  # measuring takes what it takes
        registered.measured(client, get_json(client, model_path(found["model"])), hint)
    stuck_s = STUCK_S if within_s is None else inf
    found = follow(client, path, found, Wait(SETTLED, within_s or WAIT_S, hint, stuck_s))
    deadline = time.monotonic() + KV_TOLD_S
    while found["state"] == "serving" and found.get("kv", {}) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        found = dict(get_json(client, path))
    return found


def _deployments(client: httpx.Client, args: argparse.Namespace) -> int:
    if args.deployment:
        one = get_json(client, _path(args.deployment))
        return tell_json(one) if args.json else _say(deployed.in_words(one))
    found = get_json(client, "/admin/deployments")["deployments"]
    shown = [one for one in found if args.all or one["state"] != "retired"]
    if args.json:
        return tell_json(shown)
    if not shown:
        over = f" ({len(found)} retired: --all)" if found else ""
        return _say(f"nothing is deployed{over}; `instar deploy MODEL` does it\n")
    console = Console()
    with trimmed(console):
        console.print(deployed.table(shown))
        for line in deployed.reasons(shown):
            console.print(line, highlight=False, markup=False)
    return 0


def _retire(client: httpx.Client, args: argparse.Namespace) -> int:
    found = ask_json(client, "DELETE", _path(args.deployment))  # or whoever has its place now
    if not args.detach:
        wait = Wait(deployed.OVER, args.wait, f"it goes on: `instar deployments {found['id']}` shows it")
        found = follow(client, _path(found["id"]), found, wait)
    if args.json:
        return tell_json(found, args.detach or found["state"] in deployed.OVER)
    _say(deployed.in_words(found))
    return int(not args.detach and found["state"] not in deployed.OVER)


def _path(deployment: str) -> str:
    return f"/admin/deployments/{quote(deployment, safe='')}"


def _say(text: str) -> int:
    sys.stdout.write(text)
    return 0


WORK: Final[dict[str, Work]] = {
    "model add": registered.add,
    "model list": registered.show_list,
    "model show": registered.show,
    "model remove": registered.remove,
    "plan": _plan,
    "deploy": _deploy,
    "deployments": _deployments,
    "retire": _retire,
}

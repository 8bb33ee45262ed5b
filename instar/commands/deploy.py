"""`instar deploy`: serve a registered model by an intent."""

from __future__ import annotations

import argparse
import time
from math import inf
from typing import Any, Final

import httpx

from instar.client import admin_client, admin_path, ask_json, follow, get_json
from instar.commands.intent import add_intent_flags, intent
from instar.commands.model import until_measured
from instar.output.deployments import in_words
from instar.output.tables import write_found
from instar.parser import CommandParser, add_client_flags, number_above_zero

SETTLED: Final = ("serving", "failed", "retired")
WAIT_S: Final = 600.0
STUCK_S: Final = 20.0  # without room, unless --wait is given
KV_WAIT_S: Final = 2.0  # after it serves: workers report about twice a second
POLL_S: Final = 0.2

DESCRIPTION = """\
Serves a registered model in the configuration that fits the intent best, and waits for it.

  instar deploy chat                               the lowest cost
  instar deploy chat --minimise latency
  instar deploy chat --max-latency 0.5 --prompt-tokens 1000
  instar deploy chat --tp 1 --pp 2                 fixed; the rest is chosen
  instar deploy chat --detach                      do not wait

A deployment without room stays queued until there is some. `instar deployments` shows why it waits.
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser)
    add_intent_flags(parser)
    help_ = "seconds to wait [600; without room 20]"
    parser.add_argument("--wait", type=number_above_zero, metavar="S", help=help_)
    parser.add_argument("--detach", action="store_true", help="return at once")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if the model does not serve within the wait."""
    body = {"model": args.model, "intent": intent(args)}
    with admin_client(args) as client:
        found = ask_json(client, "POST", "/admin/deployments", body)
        if not args.detach:
            found = _until_serving(client, found, args.wait)
    return write_found(args, found, in_words, is_good=args.detach or found["state"] == "serving")


def _until_serving(client: httpx.Client, found: dict[str, Any], within_s: float | None) -> dict[str, Any]:
    """Wait for `within_s`; with None as long as something is done for the deployment. Raises ServerError."""
    name, path = found["id"], admin_path("deployments", found["id"])
    hint = (
        f"it stays queued, and is loaded when there is room: `instar deployments {name}` shows it, "
        f"`instar retire {name}` ends it (--wait S: how long to wait for one)"
    )
    if found["state"] == "waiting" and within_s is None:  # measuring takes as long as it takes
        until_measured(client, get_json(client, admin_path("models", found["model"])), hint)
    stuck_s = STUCK_S if within_s is None else inf
    found = follow(client, path, found, SETTLED, within_s or WAIT_S, hint, stuck_s)
    deadline = time.monotonic() + KV_WAIT_S
    while found["state"] == "serving" and found.get("kv", {}) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        found = get_json(client, path)
    return found

"""`instar retire`: end a deployment."""

from __future__ import annotations

import argparse
from typing import Final

from instar.client import admin_client, admin_path, ask_json, follow
from instar.output.deployments import in_words
from instar.output.tables import write_found
from instar.parser import CommandParser, add_client_flags, number_above_zero

OVER: Final = ("retired", "failed")

DESCRIPTION = """\
Ends a deployment: it takes no new requests, finishes the running ones, and returns its memory.

  instar retire 3f2a9c0d1b7e                       `instar deployments` shows the ids
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser)
    parser.add_argument("deployment", metavar="ID", help="as `instar deployments` shows it")
    help_ = "seconds to wait for its requests to end [600]"
    parser.add_argument("--wait", type=number_above_zero, default=600.0, metavar="S", help=help_)
    parser.add_argument("--detach", action="store_true", help="return at once")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if the deployment has not ended within the wait."""
    with admin_client(args) as client:
        # The answer may be the deployment that replaced this one.
        found = ask_json(client, "DELETE", admin_path("deployments", args.deployment))
        if not args.detach:
            hint = f"it continues to retire: `instar deployments {found['id']}` shows it"
            found = follow(client, admin_path("deployments", found["id"]), found, OVER, args.wait, hint)
    return write_found(args, found, in_words, is_good=args.detach or found["state"] in OVER)

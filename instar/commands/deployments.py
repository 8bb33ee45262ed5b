"""`instar deployments`: what is deployed, where, and why it waits."""

from __future__ import annotations

import argparse

from instar.client import admin_client, admin_path, get_json
from instar.output.deployments import in_words, table
from instar.output.tables import write_found, write_parts, write_text
from instar.parser import CommandParser, add_client_flags

DESCRIPTION = """\
Shows deployments: their state, workers and KV, and why they wait.

  instar deployments                               all that were not retired
  instar deployments 3f2a9c0d1b7e                  one, in words
  instar deployments --all                         the retired, too
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser)
    parser.add_argument("deployment", nargs="?", metavar="ID", help="[all that were not retired]")
    parser.add_argument("--all", action="store_true", help="show the retired, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with admin_client(args) as client:
        if args.deployment:
            return write_found(args, get_json(client, admin_path("deployments", args.deployment)), in_words)
        found = get_json(client, "/admin/deployments", "deployments")["deployments"]
    shown = [one for one in found if args.all or one["state"] != "retired"]
    if not shown and not args.json:
        retired = f" ({len(found)} retired: --all)" if found else ""
        return write_text(f"nothing is deployed{retired}; `instar deploy MODEL` deploys a model\n")
    reasons = (f"{one['id']}: {one['reason']}" for one in shown if one["reason"])
    return write_parts(args, shown, [table(shown), *reasons])

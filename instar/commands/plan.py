"""`instar plan`: what every configuration of a registered model would cost."""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlencode

from instar.client import admin_client, get_json
from instar.commands.intent import add_intent_flags, intent
from instar.commands.model import model_path, until_measured
from instar.output import plan_plot, plan_table
from instar.output.tables import print_line, trimmed, write_json
from instar.parser import CommandParser, add_client_flags

DESCRIPTION = """\
Shows what every way to serve a registered model would cost. Changes nothing.

  instar plan chat                                 the lowest cost first
  instar plan chat --minimise latency
  instar plan chat --max-latency 0.5 --max-loss 1%
  instar plan chat --all                           every configuration instead of the ten best
  instar plan chat --plot chat.png                 latency over memory

Configurations are written tp2 pp1 int4: two workers share each layer, in one stage, in int4.
"""


def add_to(parser: CommandParser) -> None:
    parser.description = DESCRIPTION
    add_client_flags(parser)
    add_intent_flags(parser)
    parser.add_argument("--all", action="store_true", help="show all rows instead of the ten best")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency over memory, as a PNG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if no configuration meets the intent."""
    path = model_path(args.model)
    with admin_client(args) as client:
        card = until_measured(client, get_json(client, path))
        plan = get_json(client, f"{path}/plan?{urlencode(intent(args))}", "estimates", "intent", "unmet")
    if args.plot:
        plan_plot.draw(plan["estimates"], f"{args.model}: every configuration", args.plot)
    if args.json:
        return write_json(plan, is_good=not plan["unmet"])
    with trimmed() as console:
        for part in plan_table.render(plan, card, shows_all=args.all):
            print_line(console, part)
    return int(bool(plan["unmet"]))

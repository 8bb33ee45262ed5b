"""`instar plan`: the cost of every configuration of a registered model, and what the policy would do now."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bus.precisions import ENTRIES
from instar.client import admin_client, admin_path, get_json
from instar.commands.intent import add_intent_flags, intent
from instar.commands.model import until_measured
from instar.errors import InputError
from instar.output.lever_table import what_if_parts
from instar.output.plan_table import Estimate, render, shape_of
from instar.output.tables import MIB, write_parts
from instar.parser import CommandParser, add_client_flags, at_least_one
from instar.replay import plots

DESCRIPTION = """\
Shows what every way to serve a registered model would cost. Changes nothing.

  instar plan chat                                 the lowest cost first
  instar plan chat --minimise latency
  instar plan chat --max-latency 0.5 --max-loss 1%
  instar plan chat --all                           every configuration instead of the ten best
  instar plan chat --plot chat.png                 latency over memory
  instar plan --what-if                            what the morph policy weighs now, and would do
  instar plan --what-if --requests 20 --prompt-tokens 2000 --output-tokens 200

Configurations are written tp2 pp1 int4: two workers share each layer, in one stage, in int4.
"""


def add_to(parser: CommandParser) -> None:
    add_client_flags(parser)
    add_intent_flags(parser, needs_model=False)
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="weigh the levers of the morph policy, for all that serve or MODEL",
    )
    parser.add_argument(
        "--requests",
        type=at_least_one,
        metavar="N",
        help="with --what-if: so many more requests of --prompt-tokens and --output-tokens come at once",
    )
    parser.add_argument("--all", action="store_true", help="show all rows instead of the ten best")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency over memory, as a PNG")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if no configuration meets the intent. Raises InputError."""
    if args.what_if:
        return _what_if(args)
    if args.model is None or args.requests:
        raise InputError("name a registered model (`instar model list`), or ask with --what-if")
    path = admin_path("models", args.model)
    with admin_client(args) as client:
        card = until_measured(client, get_json(client, path))
        plan = get_json(client, f"{path}/plan?{urlencode(intent(args))}", "estimates", "intent", "unmet")
    if args.plot:
        draw(plan["estimates"], f"{args.model}: every configuration", args.plot)
    return write_parts(args, plan, render(plan, card, shows_all=args.all), is_good=not plan["unmet"])


def _what_if(args: argparse.Namespace) -> int:
    """Return 1 if a need stays beyond its objective whatever is done."""
    names = ("model", "requests", "prompt_tokens", "output_tokens")
    query = {name: value for name in names if (value := getattr(args, name)) is not None}
    with admin_client(args) as client:
        found = get_json(client, f"/admin/plan?{urlencode(query)}", "plans", "note")
    is_met = all(plan["meets"] for plan in found["plans"])
    return write_parts(args, found, what_if_parts(found), is_good=is_met)


def draw(estimates: Sequence[Estimate], title: str, path: Path) -> None:
    """Draw latency over memory, hollow where a configuration does not fit. Raises InputError."""
    figure, axes = plots.pyplot().subplots(figsize=(8, 5))
    for one in estimates:
        _point(axes, one)
    axes.set(xlabel="memory of all devices, MiB", ylabel="latency of a request, s", title=title)
    axes.grid(alpha=0.3)
    plots.save(figure, path)


def _point(axes: Any, one: Estimate) -> None:
    memory, latency = one["memory_bytes"]["value"] / MIB, one["latency_s"]
    value, colour = latency["value"], ENTRIES[one["configuration"]["precision"]].colour
    spread = [[max(0.0, value - latency["low"])], [max(0.0, latency["high"] - value)]]
    fill = "white" if one["refusal"] else colour
    axes.errorbar(memory, value, yerr=spread, fmt="o", color=colour, markerfacecolor=fill)
    offset = {"xytext": (4, 4), "textcoords": "offset points"}
    axes.annotate(shape_of(one["configuration"]), (memory, value), fontsize=7, **offset)

"""Flags of an intent (`instar plan`, `instar deploy`), and the verbs of `instar model`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bus.precisions import PRECISIONS
from instar.argparse_errors import Parser
from instar.verbs import at_least_one, one_of, verbs_of

MODEL = """\
Registers models with a running service, which measures small cuts of them on an idle worker.

  instar model add path/to/model           under the folder's name; waits until it is measured
  instar model add path/to/model --name chat
  instar model list
  instar model show chat                   and what was measured of it
  instar model remove chat                 when nothing of it is deployed
"""

PLAN = """\
Shows what every way to serve a registered model would take and give. Nothing is done.

  instar plan chat                                 what costs least, first
  instar plan chat --minimise latency
  instar plan chat --max-latency 0.5 --max-loss 1%
  instar plan chat --all                           every configuration, not the best ten alone
  instar plan chat --plot chat.png                 latency over memory

Configurations are written tp2 pp1 int4: two workers share each layer, in one stage, in int4.
"""

DEPLOY = """\
Serves a registered model in the way that fits what is wanted best, where there is room, and waits for it.

  instar deploy chat                               what costs least
  instar deploy chat --minimise latency
  instar deploy chat --max-latency 0.5 --prompt-tokens 1000
  instar deploy chat --tp 1 --pp 2                 fixed; what else there is to choose is chosen
  instar deploy chat --detach                      do not wait

What finds no room stays queued, and is loaded when there is some: `instar deployments` shows why it waits.
"""

DEPLOYMENTS = """\
Shows what is deployed: in which state, on which workers, with how much KV, and why it waits.

  instar deployments                               those that serve, are to, or failed
  instar deployments 3f2a9c0d1b7e                  one, in words
  instar deployments --all                         those that were retired, too
"""

RETIRE = """\
Takes a deployment back: it takes nothing new, finishes what runs, and gives its memory back.

  instar retire 3f2a9c0d1b7e                       ids are in `instar deployments`
"""

OBJECTIVES = ("latency", "cost", "memory", "gpu_hours")
COSTS = ("memory_seconds", "memory", "gpu_hours")
FIELDS = (
    "minimise",
    "cost",
    "max_latency_s",
    "max_cost",
    "max_loss",
    "prompt_tokens",
    "output_tokens",
    "batch_size",
    "tp",
    "pp",
    "precision",
)

AddFlags = Callable[[Parser], None]


def add_model_verbs(parser: Parser, add_client_flags: AddFlags) -> None:
    declared = verbs_of(parser, "model")

    def verb(name: str, summary: str) -> Parser:
        sub = declared(name, summary)
        add_client_flags(sub)
        sub.add_argument("--json", action="store_true", help="as JSON")
        return sub

    add = verb("add", "register a model folder, and measure it")
    add.add_argument("folder", type=Path, metavar="DIR", help="as `instar serve` takes it")
    add.add_argument("--name", dest="registered", metavar="NAME", help="[the folder's]")
    add.add_argument("--detach", action="store_true", help="do not wait until it is measured")
    verb("list", "the registered models")
    show = verb("show", "a model, and what was measured of it")
    show.add_argument("registered", metavar="MODEL", help="its name")
    remove = verb("remove", "forget a model")
    remove.add_argument("registered", metavar="MODEL", help="its name")


def add_plan(parser: Parser, add_client_flags: AddFlags) -> None:
    add_client_flags(parser)
    _add_registered(parser)
    _add_intent(parser)
    parser.add_argument("--all", action="store_true", help="all rows, not the best ten")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency over memory, as a PNG")
    parser.add_argument("--json", action="store_true", help="as JSON, with the spread of each number")


def add_deploy(parser: Parser, add_client_flags: AddFlags) -> None:
    add_client_flags(parser)
    _add_registered(parser)
    _add_intent(parser)
    parser.add_argument(
        "--wait", type=_above_zero, metavar="S", help="for it to serve [600; without room for it 20]"
    )
    _add_ends(parser)


def add_deployments(parser: Parser, add_client_flags: AddFlags) -> None:
    add_client_flags(parser)
    parser.add_argument("deployment", nargs="?", metavar="ID", help="of one [all that are not retired]")
    parser.add_argument("--all", action="store_true", help="those that were retired, too")
    parser.add_argument("--json", action="store_true", help="as JSON")


def add_retire(parser: Parser, add_client_flags: AddFlags) -> None:
    add_client_flags(parser)
    parser.add_argument("deployment", metavar="ID", help="of a deployment, as `instar deployments` shows it")
    parser.add_argument(
        "--wait", type=_above_zero, default=600.0, metavar="S", help="for its requests to end [600]"
    )
    _add_ends(parser)


def intent(args: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given."""
    return {name: value for name in FIELDS if (value := getattr(args, name)) is not None}


def _add_registered(parser: Parser) -> None:
    parser.add_argument("registered", metavar="MODEL", help="a registered one: `instar model list`")


def _add_intent(parser: Parser) -> None:
    wanted = parser.add_argument_group("what is wanted")
    wanted.add_argument(
        "--minimise", type=one_of(OBJECTIVES), metavar="WHAT", help=f"{_either(OBJECTIVES)} [cost]"
    )
    wanted.add_argument(
        "--cost", type=one_of(COSTS), metavar="C", help=f"what cost is: {_either(COSTS)} [memory_seconds]"
    )
    wanted.add_argument(
        "--max-latency", dest="max_latency_s", type=_above_zero, metavar="S", help="of a request, at most"
    )
    wanted.add_argument(
        "--max-cost", type=_above_zero, metavar="X", help="of a request, at most, in its unit"
    )
    wanted.add_argument(
        "--max-loss",
        type=_share,
        metavar="L",
        help="of perplexity: 1%% or 0.01 [1%%]; an unknown loss exceeds it",
    )
    wanted.add_argument("--prompt-tokens", type=at_least_one, metavar="N", help="of a request [256]")
    wanted.add_argument("--output-tokens", type=at_least_one, metavar="N", help="of a request [64]")
    wanted.add_argument("--batch-size", type=at_least_one, metavar="N", help="requests at once [1]")
    fixed = parser.add_argument_group("what is fixed, and chosen where left out")
    fixed.add_argument("--tp", type=at_least_one, metavar="N", help="workers that share each layer")
    fixed.add_argument("--pp", type=at_least_one, metavar="N", help="stages, of --tp workers each")
    fixed.add_argument("--precision", type=one_of(PRECISIONS), metavar="P", help=_either(PRECISIONS))


def _add_ends(parser: Parser) -> None:
    parser.add_argument("--detach", action="store_true", help="return at once")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value


def _share(text: str) -> float:
    """ "1%" and "0.01" are the same."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share, as 1% or 0.01")
    return value


def _either(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


# Commands about deployments: name, what it does in a few words, its text, its flags.
DEPLOYING: tuple[tuple[str, str, str, Callable[[Parser, AddFlags], None]], ...] = (
    ("plan", "what a model would take and give", PLAN, add_plan),
    ("deploy", "serve a model as you want it", DEPLOY, add_deploy),
    ("deployments", "what is deployed, and what waits", DEPLOYMENTS, add_deployments),
    ("retire", "take a deployment back", RETIRE, add_retire),
)

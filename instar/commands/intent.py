"""The flags of an intent, which `instar plan` and `instar deploy` share."""

from __future__ import annotations

import argparse
import math
from typing import Any

from bus.precisions import PRECISIONS
from instar.parser import CommandParser, at_least_one, either, number_above_zero, one_of

OBJECTIVES = ("latency", "cost", "memory", "gpu_hours")
COSTS = ("memory_seconds", "memory", "gpu_hours")


def add_intent_flags(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a registered model: `instar model list`")
    wanted = parser.add_argument_group("intent")
    fixed = parser.add_argument_group("fixed, otherwise chosen")
    flags = [
        wanted.add_argument(
            "--minimise", type=one_of(OBJECTIVES), metavar="WHAT", help=f"{either(OBJECTIVES)} [cost]"
        ),
        wanted.add_argument(
            "--cost", type=one_of(COSTS), metavar="C", help=f"unit of cost: {either(COSTS)} [memory_seconds]"
        ),
        wanted.add_argument(
            "--max-latency", dest="max_latency_s", type=number_above_zero, metavar="S", help="of a request"
        ),
        wanted.add_argument(
            "--max-cost", type=number_above_zero, metavar="X", help="of a request, in its unit"
        ),
        wanted.add_argument(
            "--max-loss",
            type=_share,
            metavar="L",
            help="of perplexity: 1%% or 0.01 [1%%]; an unknown loss exceeds it",
        ),
        wanted.add_argument("--prompt-tokens", type=at_least_one, metavar="N", help="of a request [256]"),
        wanted.add_argument("--output-tokens", type=at_least_one, metavar="N", help="of a request [64]"),
        wanted.add_argument("--batch-size", type=at_least_one, metavar="N", help="concurrent requests [1]"),
        fixed.add_argument("--tp", type=at_least_one, metavar="N", help="workers that share each layer"),
        fixed.add_argument("--pp", type=at_least_one, metavar="N", help="stages, of --tp workers each"),
        fixed.add_argument("--precision", type=one_of(PRECISIONS), metavar="P", help=either(PRECISIONS)),
    ]
    parser.set_defaults(intent_fields=[flag.dest for flag in flags])


def intent(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given."""
    return {name: value for name in args.intent_fields if (value := getattr(args, name)) is not None}


def _share(text: str) -> float:
    """Parse "1%" and "0.01" as the same number."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share, as 1% or 0.01")
    return value

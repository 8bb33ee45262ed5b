"""The flags of an intent, which `instar plan` and `instar deploy` share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from bus.precisions import PRECISIONS
from instar.parser import CommandParser, at_least_one, either, number_above_zero, one_of

Fields = dict[str, tuple[Callable[[str], Any], str, str]]  # type, metavar and help

OBJECTIVES = ("latency", "cost", "memory", "gpu_hours")
COSTS = ("memory_seconds", "memory", "gpu_hours")


def _share(text: str) -> float:
    """Parse "1%" and "0.01" as the same number."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share from 0 to 1, as 1% or 0.01")
    return value


WANTED: Fields = {
    "minimise": (one_of(OBJECTIVES), "WHAT", f"{either(OBJECTIVES)} [cost]"),
    "cost": (one_of(COSTS), "C", f"unit of cost: {either(COSTS)} [memory_seconds]"),
    "max_latency_s": (number_above_zero, "S", "of a request"),
    "max_cost": (number_above_zero, "X", "of a request, in its unit"),
    "max_loss": (_share, "L", "of perplexity: 1%% or 0.01 [1%%]; an unknown loss exceeds it"),
    "prompt_tokens": (at_least_one, "N", "of a request [256]"),
    "output_tokens": (at_least_one, "N", "of a request [64]"),
    "batch_size": (at_least_one, "N", "concurrent requests [1]"),
}
FIXED: Fields = {
    "tp": (at_least_one, "N", "workers that share each layer"),
    "pp": (at_least_one, "N", "stages, of --tp workers each"),
    "precision": (one_of(PRECISIONS), "P", either(PRECISIONS)),
}


def add_intent_flags(parser: CommandParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a registered model: `instar model list`")
    for title, fields in (("intent", WANTED), ("fixed, otherwise chosen", FIXED)):
        group = parser.add_argument_group(title)
        for name, (type_, metavar, help_) in fields.items():
            flag = f"--{name.removesuffix('_s').replace('_', '-')}"
            group.add_argument(flag, dest=name, type=type_, metavar=metavar, help=help_)


def intent(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given."""
    return {name: value for name in (*WANTED, *FIXED) if (value := getattr(args, name)) is not None}

"""The flags of an intent, which `instar plan` and `instar deploy` share."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from bus.deployments import FIXABLE, INTENT_FIELDS
from bus.fields import Field
from bus.precisions import PRECISIONS
from instar.parser import CommandParser, at_least_one, either, number_above_zero, one_of


def _share(text: str) -> float:
    """Parse "1%" and "0.01" as the same number."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share from 0 to 1, as 1% or 0.01")
    return value


def add_intent_flags(parser: CommandParser, *, needs_model: bool = True) -> None:
    nargs = None if needs_model else "?"
    parser.add_argument("model", metavar="MODEL", nargs=nargs, help="a registered model: `instar model list`")
    wanted = parser.add_argument_group("intent")
    fixed = parser.add_argument_group("fixed, otherwise chosen")
    for one in INTENT_FIELDS:
        flag = f"--{one.name.removesuffix('_s').replace('_', '-')}"
        convert, metavar, values = _argument(one)
        default = "" if one.default is None else f" [{one.default}]"
        help_ = f"{one.summary}{values}{default}".replace("%", "%%")
        group = fixed if one.name in FIXABLE else wanted
        group.add_argument(flag, dest=one.name, type=convert, metavar=metavar, help=help_)


def _argument(one: Field) -> tuple[Callable[[str], Any], str, str]:
    """Return the type of a flag, its placeholder, and its values in words."""
    if one.type in ("choice", "precision"):
        names = list(one.choices) or PRECISIONS
        return one_of(names), "NAME", f": {either(names)}"
    if one.type == "integer":
        return at_least_one, "N", ""
    if one.unit == "share":
        return _share, "SHARE", "; 1% or 0.01"
    return number_above_zero, "X", ""


def intent(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given."""
    names = (one.name for one in INTENT_FIELDS)
    return {name: value for name in names if (value := getattr(args, name)) is not None}

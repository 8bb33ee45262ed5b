"""What commands with verbs of their own share (`instar morph`, `instar bench`): how a verb is declared, and
values of flags. Imports nothing that makes --help slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path

from instar.argparse_errors import Parser, meant


def verbs_of(parser: Parser, command: str) -> Callable[[str, str], Parser]:
    """`verb(name, summary)` declares one of `instar {command}`. `args.verb` then says which was typed, ""
    without one, and `args.help` shows them all."""
    parser.set_defaults(verb="", help=parser.print_help)
    verbs = parser.add_subparsers(metavar="VERB", title=f"verbs (instar {command} VERB --help teaches each)")

    def verb(name: str, summary: str) -> Parser:
        sub = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        help_ = f"as of `instar {command}`"
        sub.add_argument("--config", type=Path, default=argparse.SUPPRESS, metavar="FILE", help=help_)
        sub.set_defaults(verb=name)
        return sub

    return verb


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, 1 or more")
    return int(text)


def one_of(names: Collection[str]) -> Callable[[str], str]:
    """In place of argparse's `choices`: the complaint says what there is, and what was probably meant."""

    def take(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}{meant(text, names)}")
        return text

    return take

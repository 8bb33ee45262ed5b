"""`instar demo`: what morphs do, in less than three minutes."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from bus.burst import SECONDS
from instar.errors import InputError
from instar.parser import CommandParser, number_above_zero

DESCRIPTION = """\
Starts a service of its own with little memory and two workers, and shows what it does under load: a burst
at full precision, the same burst with morphs, a card and a picture of both, and a long request that makes
both workers one instance. Takes less than three minutes, asks nothing, and ends all that it started.

  instar demo                       the dashboard is opened where there is a browser
  instar demo --no-open --port 8100 --out runs/demo
  instar demo --keep                the service goes on afterwards until Ctrl-C

Settings and keys of another service are not used. docs/demo.md says what is measured.
"""


def add_to(parser: CommandParser) -> None:
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="of the service [a free one]")
    parser.add_argument("--no-open", dest="opens", action="store_false", help="do not open the dashboard")
    parser.add_argument("--keep", action="store_true", help="leave the service running until Ctrl-C")
    help_ = "folder for the picture, the runs and the log [build/demo]"
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="DIR", help=help_)
    help_ = f"length of the burst [{SECONDS:g}]"
    parser.add_argument("--seconds", type=number_above_zero, default=SECONDS, metavar="S", help=help_)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0 after all scenes, 130 after Ctrl-C. Raises InputError."""
    if find_spec("torch") is None:
        raise InputError("the engine is not installed here: pip install 'instar[services,worker,embedded]'")
    if args.config is not None:
        raise InputError(
            f"--config {args.config}: the demo has settings of its own; `instar serve` reads this file"
        )
    from instar.demo.run import demo

    return demo(args)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 1 to 65535")
    return int(text)

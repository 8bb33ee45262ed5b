"""The command line of `instar quantize`. Standard library only: help must not wait for torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

TEXT = """\
Makes what a layer can be swapped for: its weights in 8, 4 and 3 bits, beside the model in MODEL/instar.
Goes on where it was cut off. Runs where the worker does, on a GPU if there is one.

  instar quantize models/demo                          AWQ, 8, 4 and 3 bits
  instar quantize models/demo --method both --bits 4   AWQ and round-to-nearest, 4 bits
  instar quantize DIR --calibration text.txt           scales from a text like what will be served
  instar quantize DIR --from DIR-AWQ                   take over a ready AWQ or GPTQ checkpoint of the model
"""


class Parser(argparse.ArgumentParser):
    """Answers a mistake in two lines instead of with the usage of everything, as `instar` does."""

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows what there is.\n")


def make_parser(name: str, text: str) -> Parser:
    return Parser(
        prog=f"instar {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder, full precision")
    parser.add_argument(
        "--method",
        choices=("awq", "rtn", "both"),
        default="awq",
        help="awq: scales that spare what large inputs meet; rtn: round-to-nearest [awq]",
    )
    parser.add_argument("--bits", type=_bits, default=[8, 4, 3], metavar="LIST", help="of 8, 4, 3 [8,4,3]")
    parser.add_argument(
        "--group", type=_group, default=64, metavar="N", help="inputs that share a scale: 32, 64 or 128 [64]"
    )
    parser.add_argument(
        "--from", dest="ready", type=Path, metavar="DIR", help="a ready AWQ or GPTQ checkpoint of this model"
    )
    parser.add_argument("--again", action="store_true", help="also make sets that are there already")
    add_calibration_options(parser, windows=16)


def add_calibration_options(parser: argparse.ArgumentParser, windows: int) -> None:
    parser.add_argument(
        "--calibration", type=Path, metavar="FILE", help="text [the sources of Python's standard library]"
    )
    parser.add_argument(
        "--windows", type=_positive, default=windows, metavar="N", help=f"of calibration text [{windows}]"
    )
    parser.add_argument(
        "--window-tokens", type=_positive, default=0, metavar="N", help="[2048, or the model's context]"
    )
    parser.add_argument("--device", default="", metavar="NAME", help="cpu, cuda, ... [a GPU if there is one]")


def _bits(text: str) -> list[int]:
    found = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if not found or not set(found) <= {8, 4, 3}:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of 8, 4 and 3, as in 8,4")
    return sorted(set(found), reverse=True)


def _group(text: str) -> int:
    if text not in ("32", "64", "128"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 32, 64 and 128")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)

"""The options of `instar quantize` and `instar profile`, from the standard library: torch takes seconds."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from bus.precisions import BITS, DEFAULT_SWAP, QUANTIZED

_WIDTHS = tuple(BITS.values())
_ALL_BITS = ", ".join(map(str, _WIDTHS[:-1])) + f" and {_WIDTHS[-1]}"

QUANTIZE_TEXT = f"""\
Makes what a layer can be swapped for: its weights in {_ALL_BITS} bits, beside the model in MODEL/instar.
Goes on where it was cut off. Runs where the worker does, on a GPU if there is one.

  instar quantize models/demo                          AWQ, {_ALL_BITS} bits
  instar quantize models/demo --method both --bits 4   AWQ and round-to-nearest, 4 bits
  instar quantize DIR --calibration text.txt           scales from a text like what will be served
  instar quantize DIR --from DIR-AWQ                   take over a ready AWQ or GPTQ checkpoint of the model
"""

PROFILE_TEXT = """\
Measures what a model loses with each of its layers in fewer bits, and so which to swap first and which last.
Writes MODEL/instar/profile-PRECISION.json, which workers follow, and by which `max_loss` of a deployment is
judged (register the model again then). Runs on a GPU if there is one.

  instar profile models/demo
  instar profile DIR --precision int3 --calibration text.txt
  instar profile DIR --weights 0,0,1 --metric l2    by the whole model's output alone, by distance
"""


class OfflineParser(argparse.ArgumentParser):
    """Answers a mistake in two lines instead of with the usage of everything, as `instar` does."""

    def error(self, message: str) -> NoReturn:
        """Exit status 2."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows what there is.\n")


def _add_quantize_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder, full precision")
    parser.add_argument(
        "--method",
        choices=("awq", "rtn", "both"),
        default="awq",
        help="awq: scales that spare what large inputs meet; rtn: round-to-nearest [awq]",
    )
    parser.add_argument(
        "--bits", type=_bits, default=list(_WIDTHS), metavar="LIST", help=f"of {_ALL_BITS} [all]"
    )
    parser.add_argument(
        "--group",
        type=_group,
        default=0,
        metavar="N",
        help="inputs that share a scale: 32, 64 or 128 [the precision's own, 64]",
    )
    parser.add_argument(
        "--from", dest="ready", type=Path, metavar="DIR", help="a ready AWQ or GPTQ checkpoint of this model"
    )
    parser.add_argument("--again", action="store_true", help="also make sets that are there already")
    _add_calibration_options(parser, windows=16)


def _add_calibration_options(parser: argparse.ArgumentParser, windows: int) -> None:
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
    if not found or not set(found) <= set(_WIDTHS):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {_ALL_BITS}, as in 8,4")
    return sorted(set(found), reverse=True)


def _group(text: str) -> int:
    if text not in ("32", "64", "128"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of 32, 64 and 128")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


def _add_profile_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder, full precision")
    parser.add_argument(
        "--precision", choices=QUANTIZED, default=DEFAULT_SWAP, help=f"what layers go to [{DEFAULT_SWAP}]"
    )
    parser.add_argument(
        "--method", choices=("awq", "gptq", "rtn"), default="", help="[the best set there is, else rtn]"
    )
    parser.add_argument(
        "--weights",
        type=_weights,
        default=(0.25, 0.25, 0.5),
        metavar="A,B,C",
        help="of what a layer does, what its swap does to it, and to the output [0.25,0.25,0.5]",
    )
    parser.add_argument("--metric", choices=("cosine", "l2"), default="cosine", help="[cosine]")
    _add_calibration_options(parser, windows=8)


def _weights(text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no three numbers, as in 0.25,0.25,0.5") from None
    if not (min(first, second, third) >= 0 and 0 < first + second + third < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r}: weights are not negative, and not all zero")
    return first, second, third


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its help text, the function that adds its options, and what an interrupted run leaves."""

    text: str
    add_options: Callable[[argparse.ArgumentParser], None]
    after_interrupt: str


COMMANDS = {
    "quantize": Command(QUANTIZE_TEXT, _add_quantize_options, "the same command goes on from here"),
    "profile": Command(PROFILE_TEXT, _add_profile_options, "nothing was written"),
}


def make_parser(name: str) -> OfflineParser:
    """Return the parser of one of `COMMANDS`."""
    command = COMMANDS[name]
    parser = OfflineParser(
        allow_abbrev=False,
        prog=f"instar {name}",
        description=command.text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_options(parser)
    return parser

"""The command line of `instar profile`. Standard library only: help must not wait for torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from worker.quantize.options import add_calibration_options

TEXT = """\
Measures what a model loses with each of its layers in fewer bits, and so which to swap first and which last.
Writes MODEL/instar/profile-PRECISION.json, which workers follow, and by which `max_loss` of a deployment is
judged (register the model again then). Runs on a GPU if there is one.

  instar profile models/demo
  instar profile DIR --precision int3 --calibration text.txt
  instar profile DIR --weights 0,0,1 --metric l2    by the whole model's output alone, by distance
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="model folder, full precision")
    parser.add_argument(
        "--precision", choices=("int8", "int4", "int3"), default="int4", help="what layers go to [int4]"
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
    add_calibration_options(parser, windows=8)


def _weights(text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no three numbers, as in 0.25,0.25,0.5") from None
    if not (min(first, second, third) >= 0 and 0 < first + second + third < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r}: weights are not negative, and not all zero")
    return first, second, third

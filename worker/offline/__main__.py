"""`python -m worker.offline COMMAND ...`: the command lines of `instar quantize`, `profile` and `convert`.

Nothing imports torch up to `main`: help must not wait for it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bus.precisions import BITS, DEFAULT_SWAP, QUANTIZED

_WIDTHS = tuple(BITS.values())
_ALL_BITS = ", ".join(map(str, _WIDTHS[:-1])) + f" and {_WIDTHS[-1]}"

QUANTIZE_TEXT = f"""\
Quantise the layers of a model to {_ALL_BITS} bits, into MODEL/instar, for workers to swap to. An interrupted
run continues where it stopped. Run this where the worker runs; a GPU is used if there is one.

  instar quantize models/demo                          AWQ, {_ALL_BITS} bits
  instar quantize models/demo --method both --bits 4   AWQ and round-to-nearest, 4 bits
  instar quantize DIR --calibration text.txt           calibrate with text like what will be served
  instar quantize DIR --from DIR-AWQ                   convert a ready AWQ or GPTQ checkpoint of the model
"""

PROFILE_TEXT = """\
Measure what a model loses with each of its layers in fewer bits, and so the order of swaps. Writes
MODEL/instar/profile-PRECISION.json, which workers follow and `max_loss` of a deployment is compared with
(register the model again for that). Runs on a GPU if there is one.

  instar profile models/demo
  instar profile DIR --precision int3 --calibration text.txt
  instar profile DIR --weights 0,0,1 --metric l2    rank by the distance of the whole model's output alone
  instar profile PRUNED --against DIR               what a pruned or sparse checkpoint loses
"""

CONVERT_TEXT = """\
Make a model folder in safetensors of a GGUF file of llama.cpp, or of a folder with PyTorch's .bin files. No
code in a file is run. A GGUF file is dequantised, and what that takes is said first. An interrupted run of
.bin files continues where it stopped.

  instar convert model-Q8_0.gguf DIR
  instar convert DIR DIR-safetensors
"""


class OfflineParser(argparse.ArgumentParser):
    """A parser that answers a mistake in two lines, as `instar` does, not with the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows what there is.\n")


def _parser(name: str) -> OfflineParser:
    parser = OfflineParser(
        allow_abbrev=False, prog=f"instar {name}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    if name == "convert":
        parser.description = CONVERT_TEXT
        add("source", type=Path, metavar="SOURCE", help="GGUF file, or model folder with .bin files")
        add(
            "target",
            type=Path,
            metavar="TARGET",
            help="a new folder; what lies beside .bin files is copied too",
        )
        return parser
    add("model", type=Path, metavar="MODEL", help="model folder, full precision")
    if name == "quantize":
        _add_quantize_options(parser)
    else:
        _add_profile_options(parser)
    add("--calibration", type=Path, metavar="FILE", help="text [the sources of Python's standard library]")
    add("--window-tokens", type=_positive, default=0, metavar="N", help="[2048, or the model's context]")
    add("--device", default="", metavar="NAME", help="cpu, cuda, ... [a GPU if there is one]")
    return parser


def _add_quantize_options(parser: OfflineParser) -> None:
    parser.description = QUANTIZE_TEXT
    add = parser.add_argument
    methods = "awq: activation-aware scales; rtn: round-to-nearest [awq]"
    add("--method", choices=("awq", "rtn", "both"), default="awq", help=methods)
    add("--bits", type=_bits, default=list(_WIDTHS), metavar="LIST", help=f"of {_ALL_BITS} [all]")
    group = "inputs that share a scale [the precision's own, 64]"
    add("--group", type=int, choices=(32, 64, 128), default=0, help=group)
    add("--from", dest="ready", type=Path, metavar="DIR", help="a ready AWQ or GPTQ checkpoint of this model")
    add("--again", action="store_true", help="also make sets that exist already")
    add("--windows", type=_positive, default=16, metavar="N", help="of calibration text [16]")


def _add_profile_options(parser: OfflineParser) -> None:
    parser.description = PROFILE_TEXT
    add = parser.add_argument
    add("--precision", choices=QUANTIZED, default=DEFAULT_SWAP, help=f"of swapped layers [{DEFAULT_SWAP}]")
    add("--method", choices=("awq", "gptq", "rtn"), default="", help="[the best set there is, else rtn]")
    against = "instead, what MODEL loses against the model in DIR that it was pruned from, both in full"
    add("--against", type=Path, metavar="DIR", help=against)
    weights = "of a layer's own change, its swap's change to it, and to the output [0.25,0.25,0.5]"
    add("--weights", type=_weights, default=(0.25, 0.25, 0.5), metavar="A,B,C", help=weights)
    add("--metric", choices=("cosine", "l2"), default="cosine", help="[cosine]")
    add("--windows", type=_positive, default=8, metavar="N", help="of calibration text [8]")


def _bits(text: str) -> list[int]:
    found = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if not found or not set(found) <= set(_WIDTHS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {_ALL_BITS}, such as 8,4")
    return sorted(set(found), reverse=True)


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _weights(text: str) -> tuple[float, float, float]:
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers, such as 0.25,0.25,0.5") from None
    if not (min(first, second, third) >= 0 and 0 < first + second + third < float("inf")):
        raise argparse.ArgumentTypeError(f"{text!r}: weights must be 0 or more, and not all zero")
    return first, second, third


_CONTINUE = "run the same command again to continue"
AFTER_INTERRUPT = {
    "quantize": _CONTINUE,
    "profile": "nothing was written",
    "convert": f"{_CONTINUE}; a GGUF file begins anew",
}
FAILED, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: of the process) names. Return the exit status."""
    name, *options = sys.argv[1:] if argv is None else argv
    args = _parser(name).parse_args(options)
    # These import torch, which takes seconds.
    from worker.model.config import ModelError
    from worker.offline import commands

    run = {"quantize": commands.quantize, "profile": commands.profile, "convert": commands.convert}[name]
    try:
        run(args)
    except (ModelError, OSError) as problem:
        sys.stderr.write(f"instar {name}: {problem}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"instar {name}: stopped; {AFTER_INTERRUPT[name]}\n")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())

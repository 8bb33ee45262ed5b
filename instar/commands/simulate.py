"""`instar simulate`: what a cluster would do with recorded traffic."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from bus.policy import FIELDS
from bus.precisions import DEFAULT_SWAP, QUANTIZED
from instar.commands.bench import add_trace_flags
from instar.errors import InputError
from instar.parser import CommandParser, at_least_one, one_of

DESCRIPTION = """\
Simulates a cluster under recorded traffic, with the scheduler, the dispatcher and the reflex that
serve, and step times from a calibration. Needs no running service.

  instar simulate azure.csv --window 792:72 --workers 4 --scale-lengths 0.1
  instar simulate gamma:400:2.5:60:128:64 --workers 100 --mode performance
  instar simulate azure.csv --workers 4 --calibration mine.json --out sim/four
  instar simulate gamma:8:2.5:60:128:64 --beside runs/default          beside a replay of the same load
  instar simulate --calibrate runs/full runs/int4 --profiles path/to/model --out mine.json

Without --calibration the model is models/demo on a CPU. docs/simulate.md says what is computed, and how.
"""
MODES = next(one for one in FIELDS if one.name == "mode").choices


def add_to(parser: CommandParser) -> None:
    add_trace_flags(parser, "synthetic bursts")
    for flag, type_, default, metavar, help_ in (
        ("--workers", at_least_one, 1, "N", "workers with an instance each [1]"),
        ("--mode", one_of(MODES), "default", "MODE", f"of the policy: {', '.join(MODES)} [default]"),
        (
            "--precision",
            one_of(QUANTIZED),
            DEFAULT_SWAP,
            "P",
            f"fewest bits of layers [{DEFAULT_SWAP}]",
        ),
        ("--calibration", Path, None, "FILE", "times of steps and morphs [models/demo on a CPU]"),
        ("--model", str, None, "NAME", "refuse a calibration for another model"),
        ("--beside", Path, None, "DIR", "a replay of the same load, to compare with"),
        ("--profiles", Path, None, "DIR", "with --calibrate: the model's folder, for the losses"),
        ("--out", Path, None, "PATH", "folder for run.json and pictures; with --calibrate the new file"),
    ):
        parser.add_argument(flag, type=type_, default=default, metavar=metavar, help=help_)
    help_ = "compute also what the calibration does not cover"
    parser.add_argument("--extrapolate", action="store_true", help=help_)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    help_ = "fit a calibration to runs of `instar bench replay --out`"
    parser.add_argument("--calibrate", nargs="+", type=Path, default=[], metavar="RUN_DIR", help=help_)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 1 if no request was served. Raises InputError."""
    if find_spec("torch") is None:  # the scheduler's package imports it
        raise InputError("the engine is not installed here: pip install 'instar[worker]'")
    if args.calibrate:
        from instar.simulate.calibrate import calibrate

        return calibrate(args)
    from instar.simulate.run import simulate

    return simulate(args)

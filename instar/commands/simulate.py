"""`instar simulate`: what a cluster would do with recorded traffic."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from bus.policy import FIELDS
from bus.precisions import DEFAULT_SWAP, QUANTIZED
from instar.commands.bench import window
from instar.errors import InputError
from instar.parser import CommandParser, at_least_one, number_above_zero, one_of
from instar.replay.schemas import FORMATS

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
    help_ = "a file, or gamma:RATE:CV:SECONDS[:PROMPT:OUTPUT]"
    parser.add_argument("trace", nargs="?", metavar="TRACE", help=help_)
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
        ("--format", one_of(FORMATS), "auto", "F", ", ".join(FORMATS)),
        ("--window", window, (0.0, None), "START:LENGTH", "seconds of the trace"),
        ("--limit", at_least_one, None, "N", "the first N requests only"),
        ("--scale", number_above_zero, 1.0, "X", "factor of the arrival rate [1]"),
        ("--scale-lengths", number_above_zero, 1.0, "X", "factor of all lengths [1]"),
        ("--slo-ttft", number_above_zero, None, "S", "limit of the time to first token [slo.ttft_s]"),
        ("--slo-tpot", number_above_zero, None, "S", "limit of the time per output token [slo.tpot_s]"),
        ("--drain", number_above_zero, 60.0, "S", "time for the last requests to end [60]"),
        ("--seed", int, 0, "N", "of synthetic bursts [0]"),
        ("--beside", Path, None, "DIR", "a replay of the same load, to compare with"),
        ("--profiles", Path, None, "DIR", "with --calibrate: the model's folder, for the losses"),
        ("--out", Path, None, "PATH", "folder for run.json and pictures; with --calibrate the new file"),
    ):
        parser.add_argument(flag, type=type_, default=default, metavar=metavar, help=help_)
    zero = parser.add_mutually_exclusive_group()
    zero.add_argument("--keep-zero", action="store_true", help="count zero tokens as one")
    zero.add_argument("--drop-zero", action="store_true", help="drop requests with zero tokens [default]")
    help_ = "compute also what the calibration does not cover"
    parser.add_argument("--extrapolate", action="store_true", help=help_)
    parser.add_argument("--no-plot", action="store_true", help="write run.json without the picture")
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

"""`instar bench`: replay recorded traffic, record it, and compare runs."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from instar.parser import CommandParser, at_least_one, number_above_zero, one_of, subcommands
from instar.replay.record import record
from instar.replay.run import plot, replay
from instar.replay.schemas import FORMATS

DESCRIPTION = """\
Replays recorded traffic against this service or any OpenAI-compatible one, and reports the latencies.

  instar bench replay azure.csv --window 792:72             72 s of a trace, with its own arrival times
  instar bench replay azure.csv --scale 0.5 --scale-lengths 0.1 --out runs/full
  instar bench replay gamma:4:2.5:60                        a synthetic burst: 4 requests/s, CV 2.5, 60 s
  instar bench replay azure.csv --url https://host/v1 --api-key KEY --model NAME
  instar bench plot runs/full                               its card and picture again
  instar bench plot runs/full runs/int4                     a comparison of runs
  instar bench record --out mine.jsonl                      this service's own requests, to replay

docs/replay.md says what is measured, and how.
"""


def add_to(parser: CommandParser) -> None:
    command = subcommands(parser, json=False)
    _add_replay_flags(command("replay", "send a trace's requests at their arrival times", replay))
    _add_record_flags(command("record", "write the requests of a running service to a file", record))
    plots = command("plot", "show a run again, or compare several", plot)
    plots.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of `replay --out DIR`")
    plots.add_argument("--out", type=Path, metavar="DIR", help="for the picture [the first DIR]")


def add_trace_flags(parser: CommandParser, of_seed: str) -> None:
    """Declare which requests of which trace are sent, and how they are judged."""
    help_ = "a file, or gamma:RATE:CV:SECONDS[:PROMPT:OUTPUT]"
    parser.add_argument("trace", nargs="?", metavar="TRACE", help=help_)
    for flag, type_, default, metavar, help_ in (
        ("--format", one_of(FORMATS), "auto", "F", ", ".join(FORMATS)),
        ("--window", window, (0.0, None), "START:LENGTH", "seconds of the trace"),
        ("--limit", at_least_one, None, "N", "the first N requests only"),
        ("--scale", number_above_zero, 1.0, "X", "factor of the arrival rate [1]"),
        ("--scale-lengths", number_above_zero, 1.0, "X", "factor of all lengths [1]"),
        ("--slo-ttft", number_above_zero, None, "S", "limit of the time to first token [slo.ttft_s]"),
        ("--slo-tpot", number_above_zero, None, "S", "limit of the time per output token [slo.tpot_s]"),
        ("--drain", number_above_zero, 60.0, "S", "time for the last requests to end [60]"),
        ("--seed", int, 0, "N", f"of {of_seed} [0]"),
    ):
        parser.add_argument(flag, type=type_, default=default, metavar=metavar, help=help_)
    zero = parser.add_mutually_exclusive_group()
    zero.add_argument("--keep-zero", action="store_true", help="count zero tokens as one")
    zero.add_argument("--drop-zero", action="store_true", help="drop requests with zero tokens [default]")
    parser.add_argument("--no-plot", action="store_true", help="write run.json without the picture")


def _add_replay_flags(parser: CommandParser) -> None:
    add_trace_flags(parser, "prompts and synthetic bursts")
    for flag, type_, default, metavar, help_ in (
        ("--model", str, None, "NAME", "[the first one served]"),
        ("--token-ids", token_ids, None, "FIRST:END", "token ids of prompts [16:1000]"),
        ("--admin-key", str, None, "KEY", "to observe KV, layers and morphs [from the settings]"),
        ("--out", Path, None, "DIR", "for run.json and the picture"),
    ):
        parser.add_argument(flag, type=type_, default=default, metavar=metavar, help=help_)
    parser.add_argument("--compare", nargs="+", type=Path, default=[], metavar="DIR", help="runs beside it")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead of the card")


def _add_record_flags(parser: CommandParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a new file of JSON lines")
    parser.add_argument("--with-prompts", action="store_true", help="write the prompts' token ids, too")
    parser.add_argument("--seconds", type=number_above_zero, metavar="S", help="[until Ctrl-C]")
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="requests [all]")


def window(text: str) -> tuple[float, float | None]:
    """Parse `792:72` as (792.0, 72.0), and `792:` as up to the end."""
    start, colon, length = text.partition(":")
    try:
        found = float(start or 0), float(length) if length else None
    except ValueError:
        found = math.nan, None
    if not colon or math.isnan(found[0]):
        wrong = "is not a window"
    elif not found[0] >= 0:
        wrong = "begins before the trace; the first number must be 0 or more"
    elif found[1] is not None and not found[1] > 0:
        wrong = "has no length; the second number must be above 0"
    else:
        return found
    raise argparse.ArgumentTypeError(f"{text!r} {wrong}; write it in seconds, as 792:72")


def token_ids(text: str) -> range:
    """Parse `16:1000` as range(16, 1000)."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of token ids; write it as 16:1000")
    return range(int(first), int(end))

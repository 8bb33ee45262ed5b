"""The verbs of `instar bench` and their flags. Imports nothing that makes --help slow."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from instar.argparse_errors import Parser
from instar.verbs import at_least_one, one_of, verbs_of

TEXT = """\
Replays recorded traffic against this service or any OpenAI-compatible one, and tells what came of it.

  instar bench replay azure.csv --window 792:72             72 s of a trace, as they came
  instar bench replay azure.csv --scale 0.5 --scale-lengths 0.1 --out runs/full
  instar bench replay gamma:4:2.5:60                        a made-up burst: 4 requests/s, CV 2.5, 60 s
  instar bench replay azure.csv --url https://host/v1 --api-key KEY --model NAME
  instar bench plot runs/full                               its card and picture again
  instar bench plot runs/full runs/int4                     runs over one another
  instar bench record --out mine.jsonl                      this service's own requests, to replay

docs/replay.md says what is measured, and how.
"""

FORMATS = ("auto", "azure-2023", "azure-2024", "burstgpt", "instar")


def add_verbs(parser: Parser, add_client_flags: Callable[[Parser], None]) -> None:
    """`args.verb` says which was typed, "" without one."""
    verb = verbs_of(parser, "bench")
    _add_replay(verb("replay", "send a trace's requests when they are due"), add_client_flags)
    _add_record(verb("record", "write the requests of a running service to a file"), add_client_flags)
    plot = verb("plot", "show runs again, or several over one another, from their files")
    plot.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of `replay --out DIR`")
    plot.add_argument("--out", type=Path, metavar="DIR", help="for the picture [the first DIR]")


def _add_replay(replay: Parser, add_client_flags: Callable[[Parser], None]) -> None:
    replay.add_argument(
        "trace", nargs="?", metavar="TRACE", help="a file, or gamma:RATE:CV:SECONDS[:PROMPT:OUTPUT]"
    )
    add_client_flags(replay)
    replay.add_argument("--model", dest="served", metavar="NAME", help="[the first one served]")
    replay.add_argument(
        "--format", type=one_of(FORMATS), default="auto", metavar="F", help=", ".join(FORMATS)
    )
    replay.add_argument(
        "--window", type=window, default=(0.0, None), metavar="START:LENGTH", help="seconds of the trace"
    )
    replay.add_argument("--limit", type=at_least_one, metavar="N", help="the first N requests only")
    replay.add_argument("--scale", type=_factor, default=1.0, metavar="X", help="times the rate of arrivals")
    replay.add_argument("--scale-lengths", type=_factor, default=1.0, metavar="X", help="times all lengths")
    zero = replay.add_mutually_exclusive_group()
    zero.add_argument("--keep-zero", action="store_true", help="rows of zero tokens count as one token")
    zero.add_argument("--drop-zero", action="store_true", help="they are left out, and counted [so]")
    replay.add_argument(
        "--slo-ttft", type=_factor, metavar="S", help="limit of the time to first token [slo.ttft_s]"
    )
    replay.add_argument("--slo-tpot", type=_factor, metavar="S", help="and of each after it [slo.tpot_s]")
    replay.add_argument(
        "--drain", type=_factor, default=60.0, metavar="S", help="for the last requests to end [60]"
    )
    replay.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and made-up bursts [0]")
    replay.add_argument(
        "--token-ids", type=ids, metavar="FIRST:END", help="that prompts are made of [16:1000]"
    )
    replay.add_argument(
        "--admin-key",
        metavar="KEY",
        help="to see KV, layers and morphs [of the settings, for their own service]",
    )
    replay.add_argument("--out", type=Path, metavar="DIR", help="for run.json and the picture")
    replay.add_argument("--no-plot", action="store_true", help="run.json only")
    replay.add_argument("--compare", nargs="+", type=Path, default=[], metavar="DIR", help="runs beside it")
    replay.add_argument("--json", action="store_true", help="the summary as JSON, in place of the card")


def _add_record(record: Parser, add_client_flags: Callable[[Parser], None]) -> None:
    add_client_flags(record)
    record.add_argument("--out", type=Path, required=True, metavar="FILE", help="a line of JSON each")
    record.add_argument("--with-prompts", action="store_true", help="their token ids too")
    record.add_argument("--seconds", type=_factor, metavar="S", help="[until Ctrl-C]")
    record.add_argument("--limit", type=at_least_one, metavar="N", help="requests [all]")


def window(text: str) -> tuple[float, float | None]:
    """`792:72` -> (792.0, 72.0); `792:` to the end."""
    start, colon, length = text.partition(":")
    try:
        found = float(start or 0), float(length) if length else None
    except ValueError:
        found = math.nan, None
    if not colon or math.isnan(found[0]):
        wrong = "is no window"
    elif not found[0] >= 0:
        wrong = "begins before the trace; the first number must be 0 or more"
    elif found[1] is not None and not found[1] > 0:
        wrong = "is of no length; the second number must be above 0"
    else:
        return found
    raise argparse.ArgumentTypeError(f"{text!r} {wrong}; write it in seconds, as 792:72")


def ids(text: str) -> range:
    """`16:1000` -> range(16, 1000)."""
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"{text!r} is no range of token ids; write it as 16:1000")
    return range(int(first), int(end))


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value

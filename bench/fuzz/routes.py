"""Requests of every form that /openapi.json allows and many that it does not, to the real service.

    python -m bench.fuzz [--cases 100000] [--processes 3] [--minutes 90]

Starts the service with one worker and the demo model. schemathesis sends the cases, with all of its checks
and one of ours (bench/fuzz/hooks.py): an answer with an undocumented status, form or header, a body that is
accepted against its schema, a 5xx but 503 and 504, and a request without an answer for 60 s are failures.
Rounds with other seeds follow until there were as many cases as asked for, or the time is over.

Bar: no failure, all processes of the service alive, and less than 20 MB more memory in the gateway than after
one round of a few cases. The cases of each operation, and one JSON line; with --keep it is written to
bench/results/fuzz.json.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.common.machine import CPUINFO, num_cores, processor_in
from bench.common.results import bar, conclude, parser, say, say_bars
from bench.common.service import Service
from bench.fuzz.rounds import SETTINGS, Fuzzer, bad_answers, of_operations

MOST_MORE_MB = 20.0


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=100_000, help="least number of requests")
    options.add_argument("--processes", type=int, default=3, help="programs that make and send them")
    options.add_argument("--minutes", type=float, default=90.0, help="after which no round begins")
    options.add_argument("--keep", action="store_true", help="write the result to bench/results")
    args = options.parse_args()
    with Service(settings=SETTINGS) as service, tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(service.url(), Path(folder), args.minutes * 60)
        result = measure(service, fuzzer, args.cases, args.processes)
        if result["failures"]:
            say(service.logs())
    say_bars(result["bars"])
    return conclude(result, is_kept=args.keep, bars=result["bars"])


def measure(service: Service, fuzzer: Fuzzer, cases: int, processes: int) -> dict[str, Any]:
    """Send the cases, and return the result, with the bars."""
    gateway = psutil.Process(service.processes["gateway0"].pid)
    fuzzer.play(1, processes=1)  # what is made once: types, tokenizers, the document
    before_mb, began = _rss_mb(gateway), time.monotonic()
    say(f"gateway: {before_mb:.0f} MB before")
    fuzzer.play(cases, processes, lambda: f"gateway {_rss_mb(gateway):.0f} MB")
    seconds, more_mb = time.monotonic() - began, _rss_mb(gateway) - before_mb
    operations = of_operations(fuzzer.counts)
    for name, count in operations.items():
        say(f"{count:7} {name}")
    say(f"gateway: {before_mb:.0f} MB before, {more_mb:+.1f} MB after")
    num_cases = sum(operations.values())
    dead = sorted(one.name for one in service.processes.values() if not one.is_alive)
    bad = bad_answers(fuzzer.counts)
    return {
        "bench": "fuzz",
        "machine": {"processor": processor_in(CPUINFO.read_text()), "cores": num_cores()},
        "cases": num_cases,
        "seconds": round(seconds, 1),
        "cases_per_s": round(num_cases / seconds, 1),
        "operations": operations,
        "statuses": fuzzer.statuses(),
        "failures": fuzzer.failures,
        "gateway_mb": {"before": round(before_mb, 1), "more": round(more_mb, 1)},
        "bars": {
            "cases": bar(cases, num_cases, num_cases >= cases),
            "failures": bar(0, fuzzer.failures, not fuzzer.failures),
            "5xx but 503 and 504": bar(0, bad, not bad),
            "processes that ended": bar(0, len(dead), not dead),
            "more MB in the gateway": bar(f"below {MOST_MORE_MB:g}", more_mb, more_mb < MOST_MORE_MB),
        },
    }


def _rss_mb(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / (1 << 20)

"""Shared by the parts of `bench.gpu`: running one part alone, and timing a device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.common.results import parser, say


def run_alone(
    about: str | None,
    measure: Callable[[torch.device, bool], dict[str, Any]],
    lines: Callable[[dict[str, Any]], Iterator[str]],
) -> int:
    """Run a part from the command line and return the exit status.

    `measure` gets a device and if it is a GPU.
    """
    options = parser(about)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    is_gpu = options.parse_args().device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        say("no CUDA device here: nothing was run")
        return 0
    found = measure(torch.device("cuda", 0) if is_gpu else torch.device("cpu"), is_gpu)
    problems = found.get("problems", [])
    for line in (*lines(found), *(f"FAILED {problem}" for problem in problems), json.dumps(found)):
        say(line)
    return 1 if problems else 0


def device_clock(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits until the device is done with what it was given."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def event_seconds(call: Callable[[], object], calls: int = 1, rounds: int = 5) -> float:
    """Return the seconds of one call on the GPU, among `calls` in a row, in the best of the rounds."""
    call()
    best = float("inf")
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / calls / 1e3)
    return best

"""Shared by the parts of `bench.gpu`: running one alone, its results on disk as it goes, timing a device."""

from __future__ import annotations

import cProfile
import io
import itertools
import json
import os
import pstats
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.common.results import RESULTS, parser, say
from bench.gpu.parts import FOLDER

T = TypeVar("T")
PROFILE_LINES = 30


class Found:
    """The results of a part so far, written to disk at every change: a crash or a limit loses one row."""

    def __init__(
        self, part: str, name: str = "", shard: int = 0, shards: int = 1, *, is_kept: bool = True
    ) -> None:
        """Begin the results of a part, or of one of its shards, in the file of this name."""
        folder = Path(os.environ.get(FOLDER) or RESULTS / "gpu")
        self.path, self._is_kept = folder / f"{name or part}.json", is_kept
        self._shard, self._shards = shard, shards
        self.values: dict[str, Any] = {"part": part, "is_whole": False, "problems": []}
        self.write()

    def put(self, **values: Any) -> None:
        """Set values."""
        self.values |= values
        self.write()

    def add(self, name: str, *rows: Any) -> None:
        """Append rows to the list of this name."""
        self.values.setdefault(name, []).extend(rows)
        self.write()

    def problem(self, text: str) -> None:
        """Record a check that failed."""
        say(f"FAILED {text}")
        self.add("problems", text)

    def own(self, work: Iterable[T]) -> Iterator[T]:
        """Yield the pieces of work that are this shard's."""
        return itertools.islice(work, self._shard, None, self._shards)

    def write(self) -> None:
        if not self._is_kept:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_suffix(".half")
        half.write_text(json.dumps(self.values, indent=1) + "\n")
        half.replace(self.path)


Measure = Callable[[torch.device, Found], object]


def run_alone(
    about: str | None,
    part: str,
    measure: Measure,
    lines: Callable[[dict[str, Any]], Iterator[str]],
    *,
    is_sharded: bool = False,
) -> int:
    """Run a part from the command line and return the exit status: 1 if a check failed.

    `--device cpu` goes through the same code with small numbers; nothing is written. `measure` gets a device
    and puts what it finds into a `Found`; `lines` are the table of it.
    """
    options = parser(about)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if is_sharded:
        options.add_argument("--shard", default="0/1", help="which of how many shares of the work")
    args = options.parse_args()
    is_gpu = args.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        say("no CUDA device here: nothing was run")
        return 0
    shard, shards = map(int, args.shard.split("/")) if is_sharded else (0, 1)
    is_kept = is_gpu or FOLDER in os.environ
    found = Found(part, f"{part}-{shard}" if shards > 1 else part, shard, shards, is_kept=is_kept)
    began = time.perf_counter()
    measure(torch.device("cuda", 0) if is_gpu else torch.device("cpu"), found)
    if is_gpu:
        _put_compiled(found)
    found.put(is_whole=True, seconds=round(time.perf_counter() - began, 1))
    for line in lines(found.values):
        say(line)
    say(json.dumps(found.values))
    return 1 if found.values["problems"] else 0


def _put_compiled(found: Found) -> None:
    """Put how many kernels were compiled ahead; one that was compiled later is a problem."""
    from kernels.gpu.compiling import compiled_ahead, compiled_late  # where there is a GPU, there is Triton

    ahead = compiled_ahead()
    found.put(compiled_ahead=asdict(ahead))
    say(f"{ahead.kernels} kernels compiled ahead in {ahead.compile_s:.1f} s, loaded in {ahead.load_s:.1f} s")
    say(f"the slowest took {ahead.slowest_s:.1f} s: {ahead.slowest or 'none'}")
    for kernel in compiled_late():
        found.problem(f"compiled while serving: {kernel}")


@contextmanager
def profiled(found: Found, name: str) -> Iterator[None]:
    """Put the functions in which this thread spends most time into `found.values["profiles"][name]`."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(PROFILE_LINES)
        told = [line for line in text.getvalue().splitlines() if line.strip()]
        found.put(profiles=found.values.get("profiles", {}) | {name: told[-PROFILE_LINES:]})


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


def recorded(calls: Iterable[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Return the calls as one CUDA graph, which has run once."""
    calls = list(calls)
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):  # torch.cuda.graph() would give back all cached memory
        graph.capture_begin()
        for call in calls:
            call()
        graph.capture_end()
    graph.replay()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Return the seconds that the GPU takes for the graph, once."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3

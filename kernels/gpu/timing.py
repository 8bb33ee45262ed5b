"""The seconds of calls on a GPU, in CUDA graphs: the host takes longer to launch them than they take."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import torch

Call = Callable[[], object]

LEAST_CALLS = 8  # in a graph
ROUNDS = 4


def seconds_of(ways: Sequence[Sequence[Call]], device: torch.device, rounds: int = ROUNDS) -> list[float]:
    """Return the seconds of one call of each way, in its best round; the ways take turns.

    A way is calls that do the same to different memory, so that none finds it in a cache. Each must have been
    called before, so that its kernels are loaded. Raises RuntimeError for what cannot be recorded.
    """
    graphs = [_graph([*calls] * -(-LEAST_CALLS // len(calls)), device) for calls in ways]
    counts = [len(calls) * -(-LEAST_CALLS // len(calls)) for calls in ways]
    best = [float("inf")] * len(ways)
    stream = torch.cuda.current_stream(device)
    for turn in range(rounds + 1):  # the first one loads the graphs
        for i, graph in enumerate(graphs):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            if turn:
                best[i] = min(best[i], begin.elapsed_time(end) / 1e3 / counts[i])
    return best


def _graph(calls: Sequence[Call], device: torch.device) -> torch.cuda.CUDAGraph:
    graph, was_enabled = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.disable()  # what it frees of a device ends a capture
    try:
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # torch.cuda.graph() would give back all cached memory
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in calls:
                    call()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()
    return graph


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all captures: torch keeps 32 MiB for cuBLAS on each one that multiplied."""
    return torch.cuda.Stream(device)

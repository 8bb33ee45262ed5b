"""Ranks of one group as processes that do the same work."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch
from torch.distributed import FileStore, PrefixStore

from worker.distributed import carriers
from worker.distributed.communicator import Communicator, connect

T = TypeVar("T")
TIMEOUT_S = 120.0


def run_ranks(size: int, work: Callable[..., T], *args: Any, devices: Sequence[str] = ()) -> list[T]:
    """Run `work(group, *args)` on each rank, with one thread, and return what it returned.

    `devices` are those of the ranks, the CPU by default. Raises what the first rank raised.
    """
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="instar-bench-") as folder,
        ProcessPoolExecutor(size, mp_context=spawn) as processes,
    ):
        store = str(Path(folder) / "store")
        where = devices or ["cpu"] * size
        ranks = [processes.submit(_rank, work, rank, size, store, where[rank], args) for rank in range(size)]
        return [rank.result(TIMEOUT_S * 4) for rank in ranks]


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds by the clock, and CPU seconds of this process, which do not count other programs."""

    seconds: float
    cpu_seconds: float


def timed(group: Communicator, work: Callable[[], T]) -> tuple[Timed, T]:
    """Call `work` once every rank is ready; return its time on this rank and its result."""
    group.all_reduce(torch.zeros(1))
    began, cpu_began = time.perf_counter(), time.process_time()
    result = work()
    return Timed(time.perf_counter() - began, time.process_time() - cpu_began), result


@contextmanager
def through_sockets(group: Communicator) -> Iterator[None]:
    """Let the group exchange messages in place of filling outboxes in shared memory."""
    boxes = carriers._boxes.pop(group, None)
    carriers._boxes[group] = None
    try:
        yield
    finally:
        carriers._boxes.pop(group)
        if boxes:
            carriers._boxes[group] = boxes


def _rank(work: Callable[..., T], rank: int, size: int, store: str, device: str, args: tuple[Any, ...]) -> T:
    torch.set_num_threads(1)
    meeting = PrefixStore("bench", FileStore(store, size))
    group = connect(meeting, rank, size, timeout_s=TIMEOUT_S, device=device)
    try:
        return work(group, *args)
    finally:
        group.close()

"""Ranks of one group as processes of their own, each doing the same work."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
import torch
from torch.distributed import FileStore, PrefixStore

from worker.distributed.communicator import Communicator, connect

T = TypeVar("T")
TIMEOUT_S = 120.0


def run_ranks(size: int, work: Callable[..., T], *args: Any, devices: Sequence[str] = ()) -> list[T]:
    """What `work(group, *args)` returned on each rank; one thread each. devices: of the ranks; default: the
    CPU. Raises what the first of them did."""
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
    """seconds: by the clock; cpu_seconds: of this process, which does not count what else the cores do."""

    seconds: float
    cpu_seconds: float


def timed(group: Communicator, work: Callable[[], T]) -> tuple[Timed, T]:
    """From when every rank is ready until this one is done, and the result."""
    group.all_reduce(torch.zeros(1))
    began, cpu_began = time.perf_counter(), time.process_time()
    result = work()
    return Timed(time.perf_counter() - began, time.process_time() - cpu_began), result


def _rank(work: Callable[..., T], rank: int, size: int, store: str, device: str, args: tuple[Any, ...]) -> T:
    torch.set_num_threads(1)
    meeting = PrefixStore("bench", FileStore(store, size))
    group = connect(meeting, rank, size, timeout_s=TIMEOUT_S, device=device)
    try:
        return work(group, *args)
    finally:
        group.close()

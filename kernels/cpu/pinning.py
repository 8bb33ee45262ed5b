"""A team whose threads each keep to a core of their own.

Without it the system now and then puts two of them on one core, and all wait at the next barrier. Where
other programs compute too, it is slower: a thread that may move takes the core that is free (bench/LOG.md).
Two teams that are pinned to the same cores would halve each other.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types.

from __future__ import annotations

import ctypes
import logging
import os
import struct
from collections.abc import Callable

import torch

from kernels.cpu.simd import address_of, call_for_int, read_i64, write_i64
from kernels.cpu.team import Kernel, function_address, gomp_parallel

log = logging.getLogger(__name__)


def _write_id(kind):
    """Write the id of this thread. Words: ids by number in the team, omp_get_thread_num and gettid."""
    p = address_of(kind)
    number = call_for_int(read_i64(p + 8))
    write_i64(read_i64(p) + 8 * number, call_for_int(read_i64(p + 16)))


WRITE_ID = Kernel(_write_id, "")


class PinnedTeam:
    """The OpenMP team of one thread, which calls `pin` and `check`; make it in any thread."""

    def __init__(self, threads: int) -> None:
        """Prepare. Raises ValueError, with the reason, where a team of `threads` threads cannot be pinned."""
        self._cores = sorted(os.sched_getaffinity(0))
        if threads != len(self._cores):
            raise ValueError(
                f"{threads} threads compute on {len(self._cores)} cores, and only one thread on each can be"
                " pinned: set worker.threads to 0"
            )
        try:
            os.sched_setaffinity(0, self._cores)  # changes nothing, but some sandboxes refuse it
        except OSError as error:
            raise ValueError(f"threads cannot be pinned here: sched_setaffinity: {error.strerror}") from error
        functions = [function_address(name) for name in ("omp_get_thread_num", "gettid")]
        launch = gomp_parallel()
        if launch is None or not all(functions):
            raise ValueError("torch does not run on GCC's OpenMP runtime here, whose threads can be pinned")
        self.on_freed: Callable[[], None] = lambda: None  # called in the team's thread
        self._launch, self._functions = launch, functions
        self._address, _ = WRITE_ID.compile(torch.float32)
        self._ids: list[int] = []
        self.is_pinned = True  # from `pin` on, until some thread was replaced

    def pin(self) -> None:
        """Keep each thread of the calling thread's team, and itself, on a core of its own."""
        self._ids = self._thread_ids()
        if not all(self._ids):
            self._free("the OpenMP runtime gives this team fewer threads than there are cores")
        for thread, core in zip(self._ids, self._cores, strict=False):
            os.sched_setaffinity(thread, {core})

    def check(self) -> None:
        """Let the threads go if the runtime has replaced some: a new one inherits the core of this thread.

        It ends the threads that a smaller team does not need, and starts others for the next larger one.
        """
        if self._ids and (found := self._thread_ids()) != self._ids:
            for thread in found:
                os.sched_setaffinity(thread, self._cores)
            self._free("the OpenMP runtime replaces threads between products")

    def _free(self, why: str) -> None:
        self._ids, self.is_pinned = [], False
        log.info("threads are not pinned: %s", why)
        self.on_freed()

    def _thread_ids(self) -> list[int]:
        """Return the ids of the team's threads by their numbers, 0 for one that is missing."""
        ids = (ctypes.c_int64 * len(self._cores))()
        words = struct.pack("qqq", ctypes.addressof(ids), *self._functions)
        self._launch(self._address, words, len(ids), 0)
        return list(ids)

"""The time of morphs at step boundaries, in the engine's thread, by what is done."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from worker.memory import BlockAllocator, KVCache, PagePool
from worker.memory.backend import Backend
from worker.morph.manager import MorphManager
from worker.morph.members import Members
from worker.morph.resizer import KVResizer
from worker.morph.target import MemberTarget, Target
from worker.shape.variants import LayerVariants


class Boundaries:
    """Milliseconds of boundaries; the time within another part counts for that one alone."""

    def __init__(self) -> None:
        self.parts_ms = defaultdict[str, float](float)
        self.longest_ms = 0.0
        self._thread = threading.get_ident()
        self._inner = [0.0]  # seconds of the parts within those that run

    def row(self) -> dict[str, float]:
        """Return the time of each part, of all, and of the longest boundary."""
        all_ms = sum(self.parts_ms.values())
        return {f"{what}_ms": ms for what, ms in self.parts_ms.items()} | {
            "all_ms": all_ms,
            "longest_ms": self.longest_ms,
        }

    def timed(self, what: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return `work`, counted as `what` where the engine's thread calls it."""

        def call(*args: Any, **more: Any) -> Any:
            if threading.get_ident() != self._thread:
                return work(*args, **more)
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return work(*args, **more)
            finally:
                took_s = time.perf_counter() - began
                self.parts_ms[what] += 1e3 * (took_s - self._inner.pop())
                self._inner[-1] += took_s
                if len(self._inner) == 1:
                    self.longest_ms = max(self.longest_ms, 1e3 * took_s)

        return call


@contextmanager
def timed_boundaries(backend: Backend) -> Iterator[Boundaries]:
    """Time the boundaries meanwhile; this thread is the engine's."""
    found = Boundaries()
    with ExitStack() as undo:
        for what, where, name in (
            ("rest", MorphManager, "advance"),
            ("status", MemberTarget, "status"),
            ("status", Target, "status"),
            ("plan", Members, "_plan_moves"),
            ("move", KVResizer, "_move"),
            ("books", BlockAllocator, "truncate"),
            ("books", BlockAllocator, "extend"),
            ("grow", KVCache, "grow"),
            ("shrink", KVCache, "shrink"),
            ("pages", PagePool, "reclaim"),
            ("map", type(backend), "map"),
            ("unmap", type(backend), "unmap"),
            ("fence", type(backend), "fence"),
            ("prepare", MemberTarget, "_prepare"),
            ("outputs", LayerVariants, "check"),
            ("install", MemberTarget, "_install"),
            ("integrity", Target, "check_integrity"),
        ):
            undo.enter_context(mock.patch.object(where, name, found.timed(what, getattr(where, name))))
        yield found

"""How fast one thread copies the bytes of a swap, and nothing else."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch

from worker.engine.build import make_pool

TRIES = 3
_other = torch.empty(
    512 << 20, dtype=torch.uint8
)  # more than the caches of the processors that this has seen


def leave_caches() -> None:
    """What was copied before is in the caches no more: a layer that is swapped has not been used for long."""
    _other.fill_(1)


class Floor:
    """Pages of its own, with memory, for `images`: uint8 [n] each."""

    def __init__(self, images: Sequence[torch.Tensor], page_bytes: int) -> None:
        self._images = list(images)
        sizes = [-(-image.numel() // page_bytes) * page_bytes for image in images]
        self._pool = make_pool(torch.device("cpu"), sum(sizes), page_bytes)
        self._targets = [self._pool.reserve(nbytes, kind="weights", owner="the floor") for nbytes in sizes]
        for target, image in zip(self._targets, images, strict=True):
            target.map(0, target.num_pages)
            target.write(0, image)

    def resident_s(self) -> float:
        """Into pages that are mapped and were touched: the memory's own speed."""

        def copy() -> None:
            for target, image in zip(self._targets, self._images, strict=True):
                ctypes.memmove(target.address, image.data_ptr(), image.numel())

        return min(_timed(copy) for _ in range(TRIES))

    def mapped_s(self) -> float:
        """As swaps copy: into pages that have memory and were just mapped."""

        def copy() -> None:
            for target, image in zip(self._targets, self._images, strict=True):
                target.write(0, image)

        def again() -> float:
            for target in self._targets:
                target.resize(0)
                target.map(0, target.num_pages, zeroed=False)
            return _timed(copy)

        return min(again() for _ in range(TRIES))

    def close(self) -> None:
        self._pool.close()


def _timed(copy: Callable[[], None]) -> float:
    leave_caches()
    began = time.perf_counter()
    copy()
    return time.perf_counter() - began

"""The floor of a swap: the time in which one thread copies its bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from bench.common.engines import CPU, timed
from worker.engine.build import make_pool

TRIES = 3
_other = torch.empty(512 << 20, dtype=torch.uint8)  # more than the caches of known processors


def leave_caches() -> None:
    """Evict what was copied before from the caches: a layer that is swapped was not used for long."""
    _other.fill_(1)


class Floor:
    """Copies `images`, uint8 [n] each, into pages of its own."""

    def __init__(self, images: Sequence[torch.Tensor], page_bytes: int) -> None:
        self._images = list(images)
        sizes = [-(-image.numel() // page_bytes) * page_bytes for image in images]
        self._pool = make_pool(CPU, sum(sizes), page_bytes)
        self._targets = [self._pool.reserve(nbytes, kind="weights", owner="the floor") for nbytes in sizes]
        for target, image in zip(self._targets, images, strict=True):
            target.map(0, target.num_pages)
            target.write(0, image)

    def resident_s(self) -> float:
        """Return the seconds of copying into pages that were touched: the speed of the memory."""

        def copy() -> None:
            for target, image in zip(self._targets, self._images, strict=True):
                ctypes.memmove(target.address, image.data_ptr(), image.numel())

        return min(_cold(copy) for _ in range(TRIES))

    def mapped_s(self) -> float:
        """Return the seconds of copying as swaps do: into pages that have memory and were just mapped."""

        def copy() -> None:
            for target, image in zip(self._targets, self._images, strict=True):
                target.write(0, image)

        def again() -> float:
            for target in self._targets:
                target.resize(0)
                target.map(0, target.num_pages, zeroed=False)
            return _cold(copy)

        return min(again() for _ in range(TRIES))

    def close(self) -> None:
        self._pool.close()


def _cold(copy: Callable[[], None]) -> float:
    leave_caches()
    return timed(copy)

"""Address space of one owner, with pages of the pool mapped where something lives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from worker.memory.backend import AddressSpace, Pages

if TYPE_CHECKING:
    from worker.memory.pool import PagePool

Kind = Literal["weights", "kv"]

_NO_PAGE = -1


class VirtualRange:
    """`pages[i]` is the physical page behind the range's page i, or -1. Made by `PagePool.reserve`.

    Addresses never change while the range lives, so views, kernels and CUDA graphs stay valid while pages
    come and go below them. A page that was just mapped reads as zeros. Unmapping waits for what the device
    was told before; whoever unmaps must know that nothing else comes to use the page.
    """

    def __init__(self, pool: PagePool, space: AddressSpace, kind: Kind, owner: str) -> None:
        self.kind, self.owner = kind, owner
        self.num_pages = space.nbytes // pool.page_bytes
        self.pages: Pages = np.full(self.num_pages, _NO_PAGE, dtype=np.int64)
        self._pool, self._space = pool, space
        self._is_released = False

    @property
    def address(self) -> int:
        return self._space.address

    @property
    def nbytes(self) -> int:
        return self._space.nbytes

    @property
    def num_mapped(self) -> int:
        return int(np.count_nonzero(self.pages != _NO_PAGE))

    def map(self, first_page: int, num_pages: int) -> None:
        """Put pages of the pool behind [first_page, first_page + num_pages). All or nothing.

        Raises OutOfPages, MappingFailed, and ValueError where the range ends or a page is mapped already.
        """
        where = self._span(first_page, num_pages)
        if np.any(self.pages[where] != _NO_PAGE):
            raise ValueError(f"{self.owner}: a page of [{where.start}, {where.stop}) is mapped already")
        with self._pool.take(num_pages, self.kind, self.owner) as taken:
            self._pool.backend.map(self._space, first_page, taken)
        self.pages[where] = taken

    def unmap(self, first_page: int, num_pages: int) -> None:
        """Give the pages behind [first_page, first_page + num_pages) back. Raises ValueError if one is not
        mapped."""
        where = self._span(first_page, num_pages)
        given = self.pages[where].copy()
        if np.any(given == _NO_PAGE):
            raise ValueError(f"{self.owner}: a page of [{where.start}, {where.stop}) is not mapped")
        self._pool.backend.unmap(self._space, first_page, given)
        self.pages[where] = _NO_PAGE
        self._pool.give(given)

    def release(self) -> None:
        """Give every page back and leave the pool. Views must not be used any more; they fault. Repeating
        it is harmless."""
        if self._is_released:
            return
        for first, length in self._mapped_spans():
            self.unmap(first, length)
        self._is_released = True
        self._pool.forget(self)

    def tensor(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        offset_bytes: int = 0,
    ) -> torch.Tensor:
        """A view of the range without a copy: `shape` and `strides` (default: contiguous) in elements.

        It may cover pages that are not mapped (now); touching those is a fault. Only the page of its first
        byte must be mapped when it is made: CUDA tells the device of a pointer only for mapped memory.
        Raises ValueError for that, for a view beyond the range, and for an offset between two elements.
        """
        itemsize = dtype.itemsize
        strides = _contiguous(shape) if strides is None else strides
        elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        end = offset_bytes + elements * itemsize
        if not all(shape) or offset_bytes % itemsize or offset_bytes < 0 or end > self.nbytes:
            raise ValueError(
                f"{self.owner}: no {dtype} view of shape {tuple(shape)} and strides {tuple(strides)} at byte"
                f" {offset_bytes}; the range has {self.nbytes} bytes"
            )
        if self.pages[offset_bytes // self._pool.page_bytes] == _NO_PAGE:
            raise ValueError(f"{self.owner}: the page of byte {offset_bytes} must be mapped to make a view")
        flat = self._space.view(offset_bytes, elements * itemsize)
        return flat.view(dtype).as_strided(tuple(shape), tuple(strides))

    def _span(self, first_page: int, num_pages: int) -> slice:
        if self._is_released:
            raise ValueError(f"{self.owner}: the range was released")
        if first_page < 0 or num_pages < 1 or first_page + num_pages > self.num_pages:
            raise ValueError(
                f"{self.owner}: pages [{first_page}, {first_page + num_pages}) of a range of {self.num_pages}"
            )
        return slice(first_page, first_page + num_pages)

    def _mapped_spans(self) -> list[tuple[int, int]]:
        edges = np.flatnonzero(np.diff(self.pages != _NO_PAGE, prepend=False, append=False))
        return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))

"""The page pool of a device, and the ranges of addresses that its pages are mapped into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import PageCounts
from bus.pages import pages_for
from worker.memory.backend import (
    NO_PAGE,
    AddressSpace,
    Backend,
    BrokenInvariant,
    OnWritten,
    OutOfPages,
    PageNumbers,
    write_only,
)

RangeKind = Literal["weights", "kv"]

_FREE = 0
_KINDS: dict[RangeKind, int] = {"weights": 1, "kv": 2}


class PagePool:
    """All physical pages of a device: weights + KV + free = budget, always.

    One thread owns the pool, between steps. `_use[p]` is the use of page p; its place is known to its range,
    and `check_integrity` compares the two.
    """

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        """Create the pages, as many as the budget holds.

        Raises ValueError for a budget below one page, and MappingFailed.
        """
        self.backend = backend
        self.page_bytes = backend.page_bytes
        self.num_pages = budget_bytes // self.page_bytes
        if self.num_pages < 1:
            raise ValueError(f"a budget of {budget_bytes} bytes holds no page of {self.page_bytes}")
        backend.create(self.num_pages)
        self._use = np.full(self.num_pages, _FREE, dtype=np.int8)
        self._ranges: list[VirtualRange] = []

    @property
    def num_free(self) -> int:
        return int(np.count_nonzero(self._use == _FREE))

    def counts(self) -> PageCounts:
        free, weights, kv = np.bincount(self._use, minlength=1 + len(_KINDS)).tolist()
        return PageCounts(budget=self.num_pages, weights=weights, kv=kv, free=free)

    def pages_for(self, nbytes: int) -> int:
        """Return the whole pages that hold `nbytes`."""
        return pages_for(nbytes, self.page_bytes)

    def reserve(self, nbytes: int, *, kind: RangeKind, owner: str) -> VirtualRange:
        """Reserve addresses for `nbytes` without pages: they cost no memory. Raises MappingFailed."""
        space = self.backend.reserve(max(1, self.pages_for(nbytes)) * self.page_bytes)
        reserved = VirtualRange(self, space, kind, owner)
        self._ranges.append(reserved)
        return reserved

    def check_integrity(self) -> None:
        """Check that each page has one owner and the right use. Raises BrokenInvariant."""
        seen = np.zeros(self.num_pages, dtype=np.int8)
        for owned in self._ranges:
            pages = owned.pages[owned.pages != NO_PAGE]
            if np.any(seen[pages] != _FREE) or len(np.unique(pages)) != len(pages):
                raise BrokenInvariant(f"a page of {owned.owner} has another owner too")
            seen[pages] = _KINDS[owned.kind]
        if not np.array_equal(seen, self._use):
            wrong = np.flatnonzero(seen != self._use)
            raise BrokenInvariant(f"{len(wrong)} pages have another use than recorded: {wrong[:8].tolist()}")

    def close(self) -> None:
        """Release every range, then the physical memory."""
        for owned in list(self._ranges):
            owned.release()
        self.backend.close()

    def lowest_free(self, num_pages: int, owner: str) -> PageNumbers:
        """Return the lowest free pages, for a range to map. Raises OutOfPages.

        Lowest first: neighbours are mapped by one call, and pages that the device has made already go first.
        """
        free = np.flatnonzero(self._use == _FREE)
        if len(free) < num_pages:
            raise OutOfPages(num_pages, len(free), self.num_pages, owner)
        return free[:num_pages]

    def record(self, pages: PageNumbers, kind: RangeKind, is_mapped: npt.NDArray[np.bool_]) -> None:
        """Record which of these pages are mapped, and so serve `kind`; the others are free."""
        self._use[pages] = np.where(is_mapped, _KINDS[kind], _FREE)

    def forget(self, released: VirtualRange) -> None:
        """Remove a range that was released."""
        self._ranges.remove(released)


class VirtualRange:
    """Addresses of one owner, of which some pages are mapped to pages of the pool.

    `pages[i]` is the physical page that the range's page i is mapped to, or NO_PAGE. `PagePool.reserve` makes
    ranges. Addresses never change while the range lives, so views, kernels and CUDA graphs stay valid while
    pages are mapped and unmapped. Unmapping waits for what was launched on the device before; the caller must
    see that nothing new uses the page.
    """

    def __init__(self, pool: PagePool, space: AddressSpace, kind: RangeKind, owner: str) -> None:
        self.kind, self.owner = kind, owner
        self.num_pages = space.nbytes // pool.page_bytes
        self._pool, self._space = pool, space
        self._is_released = False

    @property
    def pages(self) -> PageNumbers:
        return self._space.pages

    @property
    def address(self) -> int:
        return self._space.address

    @property
    def nbytes(self) -> int:
        return self._space.nbytes

    @property
    def num_mapped(self) -> int:
        return int(np.count_nonzero(self.pages != NO_PAGE))

    def map(self, first_page: int, num_pages: int, *, zeroed: bool = True) -> None:
        """Map free pages of the pool at [first_page, first_page + num_pages): all or none.

        zeroed: the pages read as zeros; without it they hold what their last owner left, which is quicker.
        Raises OutOfPages, MappingFailed, and ValueError outside the range or for a page that is mapped
        already.
        """
        where = self._span(first_page, num_pages)
        if np.any(self.pages[where] != NO_PAGE):
            raise ValueError(f"{self.owner}: a page of [{where.start}, {where.stop}) is mapped already")
        taken = self._pool.lowest_free(num_pages, self.owner)
        try:
            self._pool.backend.map(self._space, first_page, taken, zeroed=zeroed)
        finally:
            self._pool.record(taken, self.kind, self.pages[where] != NO_PAGE)

    def unmap(self, first_page: int, num_pages: int) -> None:
        """Unmap the pages at [first_page, first_page + num_pages) and return them to the pool.

        Raises ValueError if one is not mapped, and MappingFailed, perhaps half-way: `pages` says what is
        left.
        """
        where = self._span(first_page, num_pages)
        given = self.pages[where].copy()
        if np.any(given == NO_PAGE):
            raise ValueError(f"{self.owner}: a page of [{where.start}, {where.stop}) is not mapped")
        try:
            self._pool.backend.unmap(self._space, first_page, num_pages)
        finally:
            self._pool.record(given, self.kind, self.pages[where] != NO_PAGE)

    def discard(self, first_page: int, end_page: int) -> None:
        """Drop the contents of the mapped pages in [first_page, end_page), which stay mapped.

        On a CPU device their memory goes back to the system until they are used again. Raises MappingFailed.
        """
        pages = self.pages[first_page:end_page]
        self._pool.backend.discard(pages[pages != NO_PAGE])

    def resize(self, num_pages: int) -> None:
        """Map the first `num_pages` pages and no others; raises as `have` does."""
        if not 0 <= num_pages <= self.num_pages:
            raise ValueError(f"{self.owner}: {num_pages} pages of a range of {self.num_pages}")
        self.have(np.arange(self.num_pages) < num_pages)

    def have(self, is_wanted: npt.NDArray[np.bool_], *, zeroed: bool = True) -> None:
        """Map the pages that `is_wanted`, bool [num_pages], marks, and no others.

        After a failure half-way, call it again, or with what was mapped before. Raises as `map` and `unmap`
        do.
        """
        is_mapped = self.pages != NO_PAGE
        for first, length in runs_of(is_mapped & ~is_wanted):
            self.unmap(first, length)
        for first, length in runs_of(is_wanted & ~is_mapped):
            self.map(first, length, zeroed=zeroed)

    def release(self) -> None:
        """Free every page and leave the pool. Views fault from here on. Repeating it is harmless."""
        if self._is_released:
            return
        self.resize(0)
        self._is_released = True
        self._pool.forget(self)

    def write(self, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only) -> None:
        """Copy contiguous uint8 [n] from host memory to mapped pages; return when the device has it.

        then: called with the first byte and the end of each piece right after it was written.

        Any thread may call this beside the engine's steps: it holds no interpreter lock while it copies and
        uses no stream or thread of the steps. Nothing may map or unmap these pages meanwhile. Raises
        ValueError outside the range or for an unmapped page, and OSError or RuntimeError after a partial
        write.
        """
        page_bytes, end = self._pool.page_bytes, offset_bytes + source.numel()
        pages = self.pages[offset_bytes // page_bytes : -(-end // page_bytes)]
        if offset_bytes < 0 or end > self.nbytes or np.any(pages == NO_PAGE):
            raise ValueError(
                f"{self.owner}: bytes [{offset_bytes}, {end}) of a range of {self.nbytes}"
                " must be mapped to be written"
            )
        if source.numel():
            self._pool.backend.write(self._space, offset_bytes, source, then)

    def tensor(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
        offset_bytes: int = 0,
    ) -> torch.Tensor:
        """Return a view of the range; `shape` and `strides` (default: contiguous) in elements.

        The view may cover unmapped pages, which fault when they are touched. Only the page of its first byte
        must be mapped now, since CUDA gives pointers to mapped memory alone. Raises ValueError otherwise, for
        a view beyond the range, and for an offset that is not a multiple of the element size.
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
        if self.pages[offset_bytes // self._pool.page_bytes] == NO_PAGE:
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


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first index, length) of each run where the mask is true."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))

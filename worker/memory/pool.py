"""The page pool of a device, and the ranges of addresses that its pages are mapped into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import PageCounts
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
    """Owns all physical pages of a device: pages in weights + pages in KV + free pages = budget, always.

    One thread owns it, between steps. `_use[p]` says what page p serves; which range and where is the
    range's to know, and `check_integrity` compares the two.
    """

    def __init__(self, backend: Backend, budget_bytes: int) -> None:
        """The budget is rounded down to whole pages. Raises ValueError below one, MappingFailed."""
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
        """Whole pages that hold `nbytes`."""
        return -(-nbytes // self.page_bytes)

    def reserve(self, nbytes: int, *, kind: RangeKind, owner: str) -> VirtualRange:
        """Address space for `nbytes`, with no page in it yet; it costs no memory. Raises MappingFailed."""
        space = self.backend.reserve(max(1, self.pages_for(nbytes)) * self.page_bytes)
        reserved = VirtualRange(self, space, kind, owner)
        self._ranges.append(reserved)
        return reserved

    def check_integrity(self) -> None:
        """Raises BrokenInvariant if a page has two owners, none that knows of it, or the wrong kind."""
        seen = np.zeros(self.num_pages, dtype=np.int8)
        for owned in self._ranges:
            pages = owned.pages[owned.pages != NO_PAGE]
            if np.any(seen[pages] != _FREE) or len(np.unique(pages)) != len(pages):
                raise BrokenInvariant(f"a page of {owned.owner} has another owner too")
            seen[pages] = _KINDS[owned.kind]
        if not np.array_equal(seen, self._use):
            wrong = np.flatnonzero(seen != self._use)
            raise BrokenInvariant(f"{len(wrong)} pages are not where the pool believes: {wrong[:8].tolist()}")

    def close(self) -> None:
        """Release every range, then the physical memory."""
        for owned in list(self._ranges):
            owned.release()
        self.backend.close()

    def lowest_free(self, num_pages: int, owner: str) -> PageNumbers:
        """For ranges: pages to map. The lowest free numbers: live pages stay close together, a run of
        neighbours is one mmap call, and pages that a device has made already go first. Raises OutOfPages.
        """
        free = np.flatnonzero(self._use == _FREE)
        if len(free) < num_pages:
            raise OutOfPages(num_pages, len(free), self.num_pages, owner)
        return free[:num_pages]

    def record(self, pages: PageNumbers, kind: RangeKind, is_mapped: npt.NDArray[np.bool_]) -> None:
        """For ranges: these pages are mapped now, and serve `kind`, or are free."""
        self._use[pages] = np.where(is_mapped, _KINDS[kind], _FREE)

    def forget(self, released: VirtualRange) -> None:
        """For ranges: this one is gone."""
        self._ranges.remove(released)


class VirtualRange:
    """`pages[i]` is the physical page behind the range's page i, or NO_PAGE. Made by `PagePool.reserve`.

    Addresses never change while the range lives, so views, kernels and CUDA graphs stay valid while pages
    come and go below them. Unmapping waits for what the device was told before; whoever unmaps must know that
    nothing else comes to use the page.
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
        """Put pages of the pool behind [first_page, first_page + num_pages). All or nothing. zeroed: they
        read as zeros; without, as what their last owner left, and it is quicker.

        Raises OutOfPages, MappingFailed, and ValueError where the range ends or a page is mapped already.
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
        """Give the pages behind [first_page, first_page + num_pages) back.

        Raises ValueError if one is not mapped, and MappingFailed, perhaps half-way: `pages` says what went.
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
        """Have the first `num_pages` pages mapped and no other; as `have`."""
        if not 0 <= num_pages <= self.num_pages:
            raise ValueError(f"{self.owner}: {num_pages} pages of a range of {self.num_pages}")
        self.have(np.arange(self.num_pages) < num_pages)

    def have(self, is_wanted: npt.NDArray[np.bool_], *, zeroed: bool = True) -> None:
        """Have these pages mapped and no others: bool [num_pages]. After a failure half-way it can be asked
        for again, or for what was there before. Raises as `map` and `unmap` do."""
        is_mapped = self.pages != NO_PAGE
        for first, length in runs_of(is_mapped & ~is_wanted):
            self.unmap(first, length)
        for first, length in runs_of(is_wanted & ~is_mapped):
            self.map(first, length, zeroed=zeroed)

    def release(self) -> None:
        """Give every page back and leave the pool. Views must not be used any more; they fault. Repeating
        it is harmless."""
        if self._is_released:
            return
        self.resize(0)
        self._is_released = True
        self._pool.forget(self)

    def write(self, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only) -> None:
        """Copy contiguous uint8 [n] from host memory to mapped pages; the device has it when this returns.
        then: called with the first byte and the end of each piece of the range that was written, at once.

        Any thread may call this while the engine's thread runs steps: it takes no lock of the interpreter's
        while it copies, and no stream or thread that steps run on. Nobody may map or unmap these pages
        meanwhile. Raises ValueError where the range ends or a page is not mapped, and OSError or RuntimeError
        when some of it may be written.
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
    """Where the mask is true: (index of the first, length) of each run."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))

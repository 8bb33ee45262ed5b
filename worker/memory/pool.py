"""The page pool of a device, and the ranges of addresses that its pages are mapped into."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

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
    Fence,
    Finish,
    OnWritten,
    OutOfPages,
    PageNumbers,
    finished,
    write_only,
)

RangeKind = Literal["weights", "kv"]

_FREE, _LEAVING = 0, 3
_KINDS: dict[RangeKind, int] = {"weights": 1, "kv": 2}


class PageSpan(NamedTuple):
    """Pages [first, first + num) of a range."""

    owned: VirtualRange
    first: int
    num: int


# Pages that one call of the driver maps or unmaps beside the steps: 0.2 ms on an H100, for which a launch may
# have to wait.
_AT_ONCE: Final = 8


class _Left(NamedTuple):
    """Pages of a space from `first` on that were given back; NO_PAGE: it is unmapped, or was none of them."""

    owned: VirtualRange
    first: int
    pages: PageNumbers

    def unmap(self, backend: Backend, most: int) -> None:
        """Unmap them, by up to `most` at once. Raises MappingFailed."""
        for at, length in runs_of(self.pages != NO_PAGE):
            for part in range(at, at + length, most):
                backend.unmap(self.owned.space, self.first + part, min(most, at + length - part))


@dataclass(slots=True)
class _Leaving:
    """Pages that were given back, and a fence behind their last use."""

    fence: Fence
    spans: list[_Left]
    unmapping: Future[None] | None = None  # in another thread

    def unmap(self, backend: Backend, most: int) -> None:
        """Unmap the pages once their fence has passed, by up to `most` at once. Raises MappingFailed."""
        self.fence.wait()
        for span in self.spans:
            span.unmap(backend, most)


class PagePool:
    """All physical pages of a device: weights + KV + free = budget, always.

    One thread owns the pool, between steps. `_use[p]` is the use of page p; its place is known to its range,
    and `check_integrity` compares the two.

    Steps in flight may still use pages that are given back. The owner's thread does not wait for them:

    1. `unmap` takes one fence for a whole set of pages, and marks them as leaving. Their ranges count them no
       longer, but they stay mapped, and belong to no other range.
    2. `reclaim` unmaps those whose fence has passed; only then they are free. It is called between steps, and
       by `map` and `unmap`.
    3. `num_free` counts pages that are leaving, since they can be had: `map` takes others first. It waits for
       the oldest fences where these are too few, and for all where its addresses still have such pages.

    On a CPU nothing is in flight between steps, and pages are unmapped at once.

    A GPU's driver takes 20 to 30 us for each page, and steps would wait for hundreds of them. With `beside`
    the calls are made in its thread: `unmap` has it wait for the fence and unmap the pages, which `reclaim`
    counts as free afterwards, and `VirtualRange.claim` takes pages that another thread maps.
    """

    def __init__(self, backend: Backend, budget_bytes: int, beside: Executor | None = None) -> None:
        """Create the pages, as many as the budget holds.

        beside: a thread for calls of the driver, which ends with the pool; None: they are all made in the
        owner's. Raises ValueError for a budget below one page, and MappingFailed.
        """
        self.beside = beside
        self.wake: Callable[[], None] = lambda: None  # called in that thread when `reclaim` is due
        self.backend = backend
        self.page_bytes = backend.page_bytes
        self.num_pages = budget_bytes // self.page_bytes
        if self.num_pages < 1:
            raise ValueError(f"a budget of {budget_bytes} bytes holds no page of {self.page_bytes}")
        backend.create(self.num_pages)
        self._use = np.full(self.num_pages, _FREE, dtype=np.int8)
        self._counted: list[int] | None = None  # pages of each use; None: to be counted
        self._ranges: list[VirtualRange] = []
        self._leaving: deque[_Leaving] = deque()  # the oldest first
        self._claims: list[PageClaim] = []

    @property
    def num_free(self) -> int:
        """The pages that can be had, those that are leaving too."""
        return self._num_free_now + self.num_leaving

    @property
    def num_leaving(self) -> int:
        """The pages that steps in flight may still use."""
        return self._count()[_LEAVING] if self._leaving else 0

    @property
    def _num_free_now(self) -> int:
        return self._count()[_FREE]

    def _count(self) -> list[int]:
        """Return the pages of each use. Morphs ask dozens of times at one step boundary."""
        if self._counted is None:
            self._counted = np.bincount(self._use, minlength=2 + len(_KINDS)).tolist()
        return self._counted

    def _set_use(self, pages: PageNumbers, use: int | npt.NDArray[np.int_]) -> None:
        self._use[pages] = use
        self._counted = None

    def counts(self) -> PageCounts:
        free, weights, kv, leaving = self._count()
        return PageCounts(budget=self.num_pages, weights=weights, kv=kv, free=free + leaving)

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
            pages = owned.mapped[(owned.mapped != NO_PAGE) & ~owned.is_leaving]
            if np.any(seen[pages] != _FREE) or len(np.unique(pages)) != len(pages):
                raise BrokenInvariant(f"a page of {owned.owner} has another owner too")
            seen[pages] = _KINDS[owned.kind]
        for claim in self._claims:
            if not np.all((seen[claim.pages] == _FREE) | (seen[claim.pages] == _KINDS[claim.owned.kind])):
                raise BrokenInvariant(f"a page that {claim.owned.owner} has taken has another owner too")
            seen[claim.pages] = _KINDS[claim.owned.kind]
        left = [span.pages[span.pages != NO_PAGE] for leaving in self._leaving for span in leaving.spans]
        if sum(map(len, left)) != sum(int(np.count_nonzero(owned.is_leaving)) for owned in self._ranges):
            raise BrokenInvariant("other pages are leaving than were given back behind a fence")
        for pages in left:
            if np.any(seen[pages] != _FREE):
                raise BrokenInvariant("a page that is leaving has another owner")
            seen[pages] = _LEAVING
        if not np.array_equal(seen, self._use):
            wrong = np.flatnonzero(seen != self._use)
            raise BrokenInvariant(f"{len(wrong)} pages have another use than recorded: {wrong[:8].tolist()}")

    def close(self) -> None:
        """Release every range, then the physical memory."""
        for owned in list(self._ranges):
            owned.release()
        self.reclaim(self.num_pages)
        if self.beside:
            self.beside.shutdown()
        self.backend.close()

    def unmap(self, spans: Iterable[PageSpan]) -> None:
        """Give pages of any ranges back, behind one fence. Nothing new may use them from here on.

        Raises ValueError, having changed nothing, if one is not mapped; MappingFailed, perhaps half-way (the
        ranges' `pages` say what is left); and RuntimeError for an error of the device.
        """
        given = list(spans)
        for owned, first, num in given:
            owned.check_mapped(first, num)
        self.reclaim()
        if (fence := self.backend.fence()) is None:
            for owned, first, num in given:
                self._unmap_now(owned, slice(first, first + num))
            return
        left = [_Left(owned, first, owned.mapped[first : first + num].copy()) for owned, first, num in given]
        leaving = _Leaving(fence, left)
        self._leaving.append(leaving)
        for owned, first, num in given:
            owned.is_leaving[first : first + num] = True
            self._set_use(owned.mapped[first : first + num], _LEAVING)
        if self.beside:
            leaving.unmapping = self.run_beside(leaving.unmap, self.backend, _AT_ONCE)

    def run_beside(self, call: Callable[..., None], *args: object) -> Future[None]:
        """Make a call in the thread for calls of the driver; its end wakes the owner."""
        assert self.beside
        running = self.beside.submit(call, *args)
        running.add_done_callback(lambda _: self.wake())
        return running

    def reclaim(self, num_pages: int = 0) -> None:
        """Unmap pages that are leaving and whose fence has passed.

        num_pages: wait for the fences as long as fewer are free. Raises MappingFailed, and RuntimeError for
        an error of the device; the next call tries again what is left.
        """
        while self._leaving:
            oldest = self._leaving[0]
            if not self._is_unmapped(oldest, may_wait=self._num_free_now < num_pages):
                return
            self._leaving.popleft()
            for owned in {span.owned for span in oldest.spans}:
                self.forget(owned)

    def _is_unmapped(self, leaving: _Leaving, may_wait: bool) -> bool:
        """Unmap pages whose fence has passed. Return whether that is done. Raises as `reclaim` does."""
        if leaving.unmapping is None:
            if not (leaving.fence.has_passed or may_wait):
                return False
            if self.beside and not may_wait:
                leaving.unmapping = self.run_beside(leaving.unmap, self.backend, _AT_ONCE)
        unmapping = leaving.unmapping
        if unmapping and not (unmapping.done() or may_wait):
            return False
        leaving.unmapping = None  # after an error the next call begins again
        try:
            if unmapping:
                unmapping.result()
            else:
                leaving.unmap(self.backend, self.num_pages)
        finally:
            self._note_unmapped(leaving.spans)
        return True

    def _note_unmapped(self, spans: list[_Left]) -> None:
        """Count as free what is not mapped any more."""
        for owned, first, pages in spans:
            where = slice(first, first + len(pages))
            is_gone = (pages != NO_PAGE) & (owned.mapped[where] == NO_PAGE)
            self._set_use(pages[is_gone], _FREE)
            owned.is_leaving[where][is_gone] = False
            pages[is_gone] = NO_PAGE

    def lowest_free(self, num_pages: int, owner: str) -> PageNumbers:
        """Return the lowest free pages, for a range to map. Raises OutOfPages, and as `reclaim` does.

        Lowest first: neighbours are mapped by one call, and pages that the device has made already go first.
        """
        if num_pages > self.num_free:
            raise OutOfPages(num_pages, self.num_free, self.num_pages, owner)
        self.reclaim(num_pages)
        return np.flatnonzero(self._use == _FREE)[:num_pages]

    def record(self, pages: PageNumbers, kind: RangeKind, is_mapped: npt.NDArray[np.bool_]) -> None:
        """Record which of these pages are mapped, and so serve `kind`; the others are free."""
        self._set_use(pages, np.where(is_mapped, _KINDS[kind], _FREE))

    def forget(self, owned: VirtualRange) -> None:
        """Remove a range that was released, once none of its pages is mapped."""
        if owned.is_released and not np.any(owned.is_leaving) and owned in self._ranges:
            self._ranges.remove(owned)

    def _unmap_now(self, owned: VirtualRange, where: slice) -> None:
        """Unmap pages. Raises MappingFailed."""
        pages = owned.mapped[where].copy()
        try:
            self.backend.unmap(owned.space, where.start, where.stop - where.start)
        finally:
            self.record(pages, owned.kind, owned.mapped[where] != NO_PAGE)

    def begin_claim(self, owned: VirtualRange, is_missing: npt.NDArray[np.bool_], zeroed: bool) -> PageClaim:
        """Take free pages for those of a range that are missing. Raises as `VirtualRange.claim` does."""
        pages = self.lowest_free(int(is_missing.sum()), owned.owner)
        self.backend.make(pages)
        claim = PageClaim(self.backend, owned, is_missing, pages, zeroed)
        self._claims.append(claim)
        self._set_use(pages, _KINDS[owned.kind])
        return claim

    def end_claim(self, claim: PageClaim) -> None:
        """Count as free what was not mapped."""
        self._claims.remove(claim)
        self.record(claim.pages, claim.owned.kind, claim.owned.mapped[claim.is_missing] != NO_PAGE)


class PageClaim:
    """Pages of the pool taken for a range, which one other thread maps as it fills them."""

    def __init__(
        self,
        backend: Backend,
        owned: VirtualRange,
        is_missing: npt.NDArray[np.bool_],
        pages: PageNumbers,
        zeroed: bool,
    ) -> None:
        """is_missing: bool [num_pages of the range], which of them shall be mapped to `pages`, in order."""
        self.owned, self.is_missing, self.pages = owned, is_missing, pages
        self._backend, self._zeroed = backend, zeroed
        self._left: deque[tuple[int, PageNumbers]] = deque()  # the first page of a part, and what it takes
        taken = 0
        for first, length in runs_of(is_missing):
            for at in range(first, first + length, _AT_ONCE):
                num = min(_AT_ONCE, first + length - at)
                self._left.append((at, pages[taken : taken + num]))
                taken += num

    def map_until(self, end_page: int) -> None:
        """Map those below `end_page`, and neighbours of them. Raises MappingFailed."""
        while self._left and self._left[0][0] < end_page:
            self._backend.map_beside(self.owned.space, *self._left[0], zeroed=self._zeroed)
            self._left.popleft()


class VirtualRange:
    """Addresses of one owner, of which some pages are mapped to pages of the pool.

    `pages[i]` is the physical page that the range's page i is mapped to, or NO_PAGE. `PagePool.reserve` makes
    ranges. Addresses never change while the range lives, so views, kernels and CUDA graphs stay valid while
    pages are mapped and unmapped. Pages that were given back stay mapped until what was launched on the
    device before has ended (`PagePool`); the caller must see that nothing new uses them.
    """

    def __init__(self, pool: PagePool, space: AddressSpace, kind: RangeKind, owner: str) -> None:
        self.kind, self.owner = kind, owner
        self.num_pages = space.nbytes // pool.page_bytes
        self._pool, self.space = pool, space
        self.is_leaving = np.zeros(self.num_pages, dtype=np.bool_)  # mapped, but given back
        self._claim: PageClaim | None = None
        self.is_released = False

    @property
    def pages(self) -> PageNumbers:
        """The pages that the range has: without those that are leaving. To be read at once, not kept."""
        if not self._pool.num_leaving:
            return self.space.pages
        return np.where(self.is_leaving, NO_PAGE, self.space.pages)

    @property
    def mapped(self) -> PageNumbers:
        """The pages behind the addresses, those that are leaving too."""
        return self.space.pages

    @property
    def address(self) -> int:
        return self.space.address

    @property
    def nbytes(self) -> int:
        return self.space.nbytes

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
        if np.any(self.is_leaving[where]):
            self._pool.reclaim(self._pool.num_pages)
        taken = self._pool.lowest_free(num_pages, self.owner)
        try:
            self._pool.backend.map(self.space, first_page, taken, zeroed=zeroed)
        finally:
            self._pool.record(taken, self.kind, self.mapped[where] != NO_PAGE)

    def unmap(self, first_page: int, num_pages: int) -> None:
        """Give the pages at [first_page, first_page + num_pages) back; raises as `PagePool.unmap` does."""
        self._pool.unmap([PageSpan(self, first_page, num_pages)])

    def check_mapped(self, first_page: int, num_pages: int) -> None:
        """Raise ValueError unless the range has all these pages."""
        where = self._span(first_page, num_pages)
        if np.any(self.pages[where] == NO_PAGE):
            raise ValueError(f"{self.owner}: a page of [{where.start}, {where.stop}) is not mapped")

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
        self.settle()
        is_mapped = self.pages != NO_PAGE
        if unwanted := runs_of(is_mapped & ~is_wanted):
            self._pool.unmap(PageSpan(self, first, length) for first, length in unwanted)
        for first, length in runs_of(is_wanted & ~is_mapped):
            self.map(first, length, zeroed=zeroed)

    def claim(self, is_wanted: npt.NDArray[np.bool_], *, zeroed: bool = False) -> None:
        """Take free pages for those that `is_wanted` marks and that are not mapped: all or none.

        `map_claimed` maps them, and `settle` must follow. zeroed: as `map` has it. Raises OutOfPages and
        MappingFailed.
        """
        self.settle()
        is_missing = is_wanted & (self.pages == NO_PAGE)
        if np.any(self.is_leaving & is_missing):
            self._pool.reclaim(self._pool.num_pages)
        self._claim = self._pool.begin_claim(self, is_missing, zeroed)

    def map_claimed(self, end_bytes: int) -> None:
        """Map claimed pages below `end_bytes`, in the thread that fills them. Raises MappingFailed."""
        if self._claim:
            self._claim.map_until(-(-end_bytes // self._pool.page_bytes))

    def settle(self) -> None:
        """End a claim: what was mapped is the range's, the rest is free. Nothing may map it any more."""
        if claim := self._claim:
            self._claim = None
            self._pool.end_claim(claim)

    def release(self) -> None:
        """Give every page back and leave the pool. Views fault then. Repeating it is harmless."""
        if self.is_released:
            return
        self.resize(0)
        self.is_released = True
        self._pool.forget(self)

    def write(self, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only) -> None:
        """Copy contiguous uint8 [n] from host memory to mapped pages; return when the device has it.

        As `begin_write` does.
        """
        self.begin_write(offset_bytes, source, then)()

    def begin_write(self, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only) -> Finish:
        """Begin to copy contiguous uint8 [n] from host memory to mapped pages, as `Backend.begin_write` does.

        Return what waits until the device has it. then: called with the first byte and the end of each piece
        right after it was written.

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
        if not source.numel():
            return finished
        return self._pool.backend.begin_write(self.space, offset_bytes, source, then)

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
        flat = self.space.view(offset_bytes, elements * itemsize)
        return flat.view(dtype).as_strided(tuple(shape), tuple(strides))

    def _span(self, first_page: int, num_pages: int) -> slice:
        if self.is_released:
            raise ValueError(f"{self.owner}: the range was released")
        if first_page < 0 or num_pages < 1 or first_page + num_pages > self.num_pages:
            raise ValueError(
                f"{self.owner}: pages [{first_page}, {first_page + num_pages}) of a range of {self.num_pages}"
            )
        return slice(first_page, first_page + num_pages)


def runs_of(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first index, length) of each run where the mask is true."""
    framed = np.zeros(len(mask) + 2, dtype=np.bool_)
    framed[1:-1] = mask
    edges = np.flatnonzero(framed[1:] != framed[:-1])
    return [(int(a), int(b - a)) for a, b in edges.reshape(-1, 2)]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))

"""The device's budget as pages, each with exactly one owner."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bus.messages import PageCounts
from worker.memory.backend import NO_PAGE, Backend, Pages
from worker.memory.errors import BrokenInvariant, OutOfPages
from worker.memory.range import Kind, VirtualRange

_FREE = 0
_KINDS: dict[Kind, int] = {"weights": 1, "kv": 2}


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

    def reserve(self, nbytes: int, *, kind: Kind, owner: str) -> VirtualRange:
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

    def lowest_free(self, num_pages: int, owner: str) -> Pages:
        """For ranges: pages to map. The lowest free numbers: live pages stay close together, a run of
        neighbours is one mmap call, and pages that a device has made already go first. Raises OutOfPages.
        """
        free = np.flatnonzero(self._use == _FREE)
        if len(free) < num_pages:
            raise OutOfPages(num_pages, len(free), self.num_pages, owner)
        return free[:num_pages]

    def record(self, pages: Pages, kind: Kind, is_mapped: npt.NDArray[np.bool_]) -> None:
        """For ranges: these pages are mapped now, and serve `kind`, or are free."""
        self._use[pages] = np.where(is_mapped, _KINDS[kind], _FREE)

    def forget(self, released: VirtualRange) -> None:
        """For ranges: this one is gone."""
        self._ranges.remove(released)

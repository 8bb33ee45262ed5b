"""The interface of a device's memory to the pool, and the errors of pages and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

PageNumbers = npt.NDArray[np.int64]  # physical page numbers, in the order of their addresses

OnWritten = Callable[[int, int], object]

NO_PAGE = -1


def write_only(first: int, end: int) -> None:
    pass


class AddressSpace(Protocol):
    """A reserved run of addresses. It lives until the last object that refers to it is gone, views
    included: a view that outlives its pages faults, and never shows another owner's memory.

    `pages[i]` is the physical page behind the space's page i, or NO_PAGE. The backend keeps it, after every
    single call to the system: whichever call fails, it says what is mapped.
    """

    address: int
    nbytes: int
    pages: PageNumbers

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] over the addresses, without a copy. The page of its first byte must be mapped."""


class Backend(Protocol):
    """Physical memory of one device. Calls are not thread-safe; the pool's owner makes them.

    A page that was unmapped keeps its memory for its next owner: to get it from the system again takes longer
    than to fill it.
    """

    page_bytes: int
    device: torch.device

    def create(self, num_pages: int) -> None:
        """Have physical pages 0..num_pages-1; the system may be asked for each when it is first mapped. Once.
        Raises MappingFailed if the device cannot hold them."""

    def reserve(self, nbytes: int) -> AddressSpace:
        """Address space of `nbytes` (whole pages) with nothing mapped. Raises MappingFailed."""

    def map(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool = True) -> None:
        """Map physical `pages` at the space's pages first_page.. . All or nothing, unless undoing fails too:
        `space.pages` knows. Raises MappingFailed; also where the device has no memory left for a page.
        zeroed: they read as zeros, whoever had them before; without, for owners that fill what they read."""

    def unmap(self, space: AddressSpace, first_page: int, num_pages: int) -> None:
        """Undo `map`, when everything that was launched on the device so far has ended. Nothing may be
        launched on the addresses meanwhile. Raises MappingFailed; `space.pages` knows what is still mapped,
        and what it held may be lost."""

    def write(
        self, space: AddressSpace, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only
    ) -> None:
        """Copy uint8 [n] from host memory to where pages are mapped. The device has it when this returns.
        then: called with the first byte of the space and the end of each piece that was written, while a CPU
        has it in its caches; what it launches on a device runs beside the steps, as the copy does.

        Any thread may make this call: nobody may map or unmap these pages meanwhile. Raises OSError
        or RuntimeError, when some of it may be written.
        """

    def discard(self, pages: PageNumbers) -> None:
        """Return the memory of these physical pages, mapped or not, to the system until their next access.
        Their contents are lost. Raises MappingFailed."""

    def close(self) -> None:
        """Give the physical memory back. Nothing may be mapped. A backend that is dropped without it gives
        the memory back when its last space is gone."""


def runs(pages: PageNumbers) -> list[tuple[int, int, int]]:
    """Split into runs of consecutive page numbers: (index of the first, page number, length)."""
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    ends = np.append(starts[1:], len(pages))
    return [(int(s), int(pages[s]), int(e - s)) for s, e in zip(starts, ends, strict=True)]


class OutOfPages(RuntimeError):
    """The pool cannot give that many pages; nothing was changed. Free some, or wait until some are freed."""

    def __init__(self, needed: int, free: int, budget: int, owner: str) -> None:
        self.needed, self.free, self.budget, self.owner = needed, free, budget, owner
        super().__init__(f"{owner} needs {needed} pages; {free} of the device's {budget} are free")


class MappingFailed(RuntimeError):
    """The operating system or the driver refused to make, map or unmap memory."""


class OutOfBlocks(RuntimeError):
    """Fewer KV blocks are free than were asked for; nothing was taken."""

    def __init__(self, needed: int, free: int, capacity: int) -> None:
        self.needed, self.free, self.capacity = needed, free, capacity
        super().__init__(f"{needed} KV blocks needed; {free} of {capacity} are free")


class BlocksInUse(RuntimeError):
    """A cache cannot shrink over live blocks: move them below `capacity` first (`kernels.copy_blocks`)."""

    def __init__(self, blocks: Sequence[int], capacity: int) -> None:
        self.blocks, self.capacity = list(blocks), capacity
        super().__init__(
            f"{len(blocks)} KV blocks at or above {capacity} are in use, the first is {blocks[0]}"
        )


class BrokenInvariant(RuntimeError):
    """Bookkeeping contradicts itself: a defect in this program, not a condition to recover from."""

"""The interface of a device's memory to the pool, and the errors of pages and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

PageNumbers = npt.NDArray[np.int64]  # physical page numbers, in the order of their addresses

OnWritten = Callable[[int, int], object]
Finish = Callable[[], None]  # waits for what was begun

NO_PAGE = -1


def write_only(first: int, end: int) -> None:
    pass


def finished() -> None:
    """Return: what was begun has ended."""


class AddressSpace:
    """A reserved run of addresses.

    It lives until the last object that refers to it is gone, views included. A view that outlives its pages
    faults and never shows another owner's memory.

    `pages[i]` is the physical page behind the space's page i, or NO_PAGE. The backend updates it after every
    call to the system, so it is right whichever call fails.
    """

    def __init__(self, address: int, nbytes: int, page_bytes: int) -> None:
        self.address, self.nbytes = address, nbytes
        self.pages: PageNumbers = np.full(nbytes // page_bytes, NO_PAGE, dtype=np.int64)

    def view(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] over the addresses, without a copy.

        The page of the first byte must be mapped.
        """
        raise NotImplementedError


class Fence(Protocol):
    """A point behind everything that was launched on a device before it."""

    @property
    def has_passed(self) -> bool:
        """True if the device has come to it. Raises RuntimeError for an error of the device."""

    def wait(self) -> None:
        """Wait until it has. Raises RuntimeError for an error of the device."""


class Backend(Protocol):
    """The physical memory of one device.

    The pool's owner makes the calls, except `begin_write`; on a GPU other threads may map pages that were
    made (`map_beside`), and unmap pages that the owner leaves alone. An unmapped page keeps its memory for
    its next owner, since getting it from the system again takes longer than filling it.
    """

    page_bytes: int
    device: torch.device

    def create(self, num_pages: int) -> None:
        """Create physical pages 0..num_pages-1, once.

        The system may provide the memory of a page when it is first mapped. Raises MappingFailed if the
        device cannot hold them.
        """

    def reserve(self, nbytes: int) -> AddressSpace:
        """Reserve `nbytes` of addresses (whole pages) with nothing mapped. Raises MappingFailed."""

    def make(self, pages: PageNumbers) -> None:
        """Have the memory of these pages, so that another thread than the owner's may map them.

        All of them, or none that was not there. Raises MappingFailed.
        """

    def map(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool = True) -> None:
        """Map physical `pages` at the space's pages from `first_page` on: all of them, or none.

        If undoing a partial map fails too, `space.pages` says what is mapped. zeroed: the pages read as
        zeros; without it they hold what their last owner left. Raises MappingFailed, also if the device has
        no memory left for a page.
        """

    def map_beside(self, space: AddressSpace, first_page: int, pages: PageNumbers, *, zeroed: bool) -> None:
        """Map pages that were made, as `map` does, in another thread than the owner's.

        zeroed: they are zeros when this returns, and no stream waits for it.
        """

    def fence(self) -> Fence | None:
        """Return a point behind what was launched in this thread's stream and the default one.

        Other streams that use pages end or are joined before. None: nothing is in flight, ever. Raises
        RuntimeError.
        """

    def unmap(self, space: AddressSpace, first_page: int, num_pages: int) -> None:
        """Unmap pages that the device does not use any more: a fence behind their last use has passed.

        Raises MappingFailed; then `space.pages` says what is still mapped, and its contents may be lost.
        """

    def begin_write(
        self, space: AddressSpace, offset_bytes: int, source: torch.Tensor, then: OnWritten = write_only
    ) -> Finish:
        """Copy uint8 [n] from host memory to mapped pages. Return what waits until the device has it.

        A CPU has it when this returns. A GPU copies one write after the other, beside the steps; what is
        returned must be called before the source or the pages may go, also after an error.

        then: called with the first byte and the end of each piece after it was written, while a CPU has it in
        its caches. What it launches on a GPU runs behind the copy, beside the steps and the next write.

        Any thread may call this; nothing may map or unmap these pages meanwhile. Raises OSError or
        RuntimeError after a partial write.
        """

    def discard(self, pages: PageNumbers) -> None:
        """Return the memory of these physical pages to the system until their next access.

        The pages may be mapped. Their contents are lost. Raises MappingFailed.
        """

    def close(self) -> None:
        """Free the physical memory. Nothing may be mapped.

        A backend that is dropped without this call frees its memory with its last space.
        """


def runs(pages: PageNumbers) -> list[tuple[int, int, int]]:
    """Split into runs of consecutive page numbers: (index of the first, page number, length)."""
    if not len(pages):
        return []
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    ends = np.append(starts[1:], len(pages))
    return [(int(s), int(pages[s]), int(e - s)) for s, e in zip(starts, ends, strict=True)]


class OutOfPages(RuntimeError):
    """The pool cannot give that many pages; nothing was changed. Free pages first, or wait."""

    def __init__(self, needed: int, free: int, budget: int, owner: str) -> None:
        self.needed, self.free, self.budget, self.owner = needed, free, budget, owner
        super().__init__(f"{owner} needs {needed} pages; {free} of the device's {budget} are free")


class MappingFailed(RuntimeError):
    """The operating system or the driver refused to make, map or unmap memory."""


class OutOfBlocks(RuntimeError):
    """Fewer KV blocks are free than were requested; nothing was taken."""

    def __init__(self, needed: int, free: int, capacity: int) -> None:
        self.needed, self.free, self.capacity = needed, free, capacity
        super().__init__(f"{needed} KV blocks needed; {free} of {capacity} are free")


class BlocksInUse(RuntimeError):
    """A cache cannot shrink below live blocks: move them first (`KVCache.copy_blocks`)."""

    def __init__(self, blocks: Sequence[int], capacity: int) -> None:
        self.blocks, self.capacity = list(blocks), capacity
        super().__init__(
            f"{len(blocks)} KV blocks at or above {capacity} are in use, the first is {blocks[0]}"
        )


class BrokenInvariant(RuntimeError):
    """Two records contradict each other: a defect in this program, not a condition to recover from."""

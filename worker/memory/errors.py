"""What can go wrong with pages and blocks. Each says the numbers and who must act."""

from __future__ import annotations

from collections.abc import Sequence


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

"""Which KV blocks are free. Ids only: where a block lies is the cache's to know."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from worker.memory.errors import BlocksInUse, BrokenInvariant, OutOfBlocks


class BlockAllocator:
    """Block ids 0..capacity-1, the lowest free ones first.

    Lowest first, not first in first out: live blocks gather at the low end, so the tail is mostly free
    when the cache shrinks and few blocks have to move. Costs a heap operation per block.
    """

    def __init__(self, capacity: int = 0) -> None:
        self._free: list[int] = []  # a heap
        self._in_use = bytearray()  # _in_use[id]; its length is the capacity
        self.extend(capacity)

    @property
    def capacity(self) -> int:
        return len(self._in_use)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    @property
    def used(self) -> list[int]:
        return [block for block in range(self.capacity) if self._in_use[block]]

    def claim(self, blocks: Sequence[int]) -> None:
        """Take these very blocks. Raises ValueError, and takes none, if one is not free."""
        wanted = set(blocks)
        free = set(self._free)
        if not wanted <= free or len(wanted) != len(blocks):
            raise ValueError(f"KV blocks claimed that are not free: {sorted(wanted - free)[:8]}")
        self._free = sorted(free - wanted)
        for block in blocks:
            self._in_use[block] = True

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, ascending. Raises OutOfBlocks and takes none if fewer are free."""
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free), self.capacity)
        taken = [heapq.heappop(self._free) for _ in range(n)]
        for block in taken:
            self._in_use[block] = True
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises ValueError, having freed none, if one is not in use or comes twice."""
        wrong = [b for b in blocks if not (0 <= b < self.capacity and self._in_use[b])]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {wrong or list(blocks)}")
        for block in blocks:
            self._in_use[block] = False
            heapq.heappush(self._free, block)

    def live_from(self, capacity: int) -> list[int]:
        """Blocks in use at or above `capacity`: what must move before shrinking to it."""
        return [block for block in range(capacity, self.capacity) if self._in_use[block]]

    def moves_below(self, capacity: int) -> list[tuple[int, int]]:
        """(from, to) for every block in use at or above `capacity`: the lowest free ones below it are the
        targets. Changes nothing. Raises OutOfBlocks if they do not all find one."""
        live = self.live_from(capacity)
        targets = heapq.nsmallest(len(live), (block for block in self._free if block < capacity))
        if len(targets) < len(live):
            raise OutOfBlocks(len(live), len(targets), capacity)
        return list(zip(live, targets, strict=True))

    def relocate(self, moves: Sequence[tuple[int, int]]) -> None:
        """What was in each first block of `moves_below` is in the second one now; the first is free."""
        taken = {target for _, target in moves}
        self._free = [block for block in self._free if block not in taken] + [source for source, _ in moves]
        heapq.heapify(self._free)
        for source, target in moves:
            self._in_use[source], self._in_use[target] = False, True

    def extend(self, capacity: int) -> None:
        """Grow to `capacity`; the new ids are free. Raises ValueError if it is less than now."""
        if capacity < self.capacity:
            raise ValueError(f"cannot extend {self.capacity} KV blocks to {capacity}; truncate")
        self._free.extend(range(self.capacity, capacity))  # the largest ids at the end keep the heap a heap
        self._in_use.extend(bytes(capacity - self.capacity))

    def truncate(self, capacity: int) -> None:
        """Shrink to `capacity`. Raises BlocksInUse, and changes nothing, if a block above it is in use."""
        live = self.live_from(capacity)
        if live:
            raise BlocksInUse(live, capacity)
        self._free = [block for block in self._free if block < capacity]
        heapq.heapify(self._free)
        del self._in_use[capacity:]

    def check_integrity(self) -> None:
        """Raises BrokenInvariant unless every block is either free, once, or in use."""
        free = set(self._free)
        expected = {block for block in range(self.capacity) if not self._in_use[block]}
        if len(free) != len(self._free) or free != expected:
            raise BrokenInvariant(
                f"KV blocks both free and in use, or neither: {sorted(free ^ expected)[:8]}"
            )

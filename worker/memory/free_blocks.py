"""The free blocks of a pool, in the order in which they are given out."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from worker.memory.backend import BrokenInvariant
from worker.memory.prefix_index import PrefixIndex


class FreeBlocks:
    """Free block numbers: those that hold nothing of use first, the lowest first; then the indexed ones.

    Lowest first, not first in first out: live blocks gather at the low end, so few must move when the cache
    shrinks. Indexed blocks stay findable until they are needed; the least recently used goes first.
    """

    def __init__(self, blocks: Iterable[int], index: PrefixIndex) -> None:
        self.index = index
        self._plain: list[int] = []  # a heap
        self._indexed: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.replace(blocks)

    def __len__(self) -> int:
        return len(self._plain) + len(self._indexed)

    def __iter__(self) -> Iterator[int]:
        yield from self._plain
        yield from self._indexed

    def replace(self, blocks: Iterable[int]) -> None:
        """Hold these blocks and no others; indexed ones keep their order."""
        wanted = set(blocks)
        known = [block for block in self._indexed if block in wanted and block in self.index]
        self._indexed = OrderedDict.fromkeys(known)
        self._plain = []
        self.add(sorted(wanted.difference(known)))

    def add(self, blocks: Iterable[int]) -> None:
        """Add blocks that were freed; of indexed ones the last stays longest."""
        for block in blocks:
            if block in self.index:
                self._indexed[block] = None
            else:
                heapq.heappush(self._plain, block)

    def take(self, n: int) -> list[int]:
        """Remove n blocks and return them, in ascending order; there must be as many."""
        taken = [heapq.heappop(self._plain) for _ in range(min(n, len(self._plain)))]
        if len(taken) < n:
            taken += [self._indexed.popitem(last=False)[0] for _ in range(n - len(taken))]
            taken.sort()
            self.forget(taken)
        return taken

    def take_indexed(self, blocks: Iterable[int]) -> list[int]:
        """Remove those of these blocks that are free and indexed, contents and all, and return them."""
        taken = [block for block in blocks if block in self._indexed]
        for block in taken:
            del self._indexed[block]
        return taken

    def take_highest(self, n: int) -> list[int]:
        """Remove up to n blocks, the highest that hold nothing of use first; return them ascending."""
        self._plain.sort()
        kept = max(0, len(self._plain) - n)
        taken, self._plain = self._plain[kept:], self._plain[:kept]
        while len(taken) < n and self._indexed:
            taken.append(self._indexed.popitem(last=False)[0])
        self.forget(taken)
        return sorted(taken)

    def check_integrity(self) -> None:
        """Raise BrokenInvariant if a block is here twice, or findable and given out as one that is not."""
        if len(set(self)) != len(self):
            raise BrokenInvariant(f"KV blocks free twice: {sorted(self)[:8]}")
        if wrong := [block for block in self._plain if block in self.index]:
            raise BrokenInvariant(f"free KV blocks that can be found count as empty: {wrong[:8]}")

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop from the index what these blocks held."""
        for block in blocks:
            self.index.forget(block)

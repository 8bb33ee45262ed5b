"""The allocator of a KV cache's blocks."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from worker.memory.backend import BlocksInUse, BrokenInvariant, OutOfBlocks
from worker.memory.prefix_index import PrefixIndex


class BlockAllocator:
    """The block numbers 0..capacity-1, given out in the order of `FreeBlocks`."""

    def __init__(self, capacity: int = 0) -> None:
        self.index = PrefixIndex()  # index of used and free blocks
        self._free = FreeBlocks((), self.index)
        self._in_use = bytearray()  # _in_use[id]; its length is the capacity
        self.num_touched = 0  # blocks below this number may have been written
        self.on_empty: Callable[[], None] | None = None  # called when the last block in use is freed
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
        """Take these blocks. Raises ValueError, and takes none, if one is not free."""
        wanted = set(blocks)
        free = set(self._free)
        if not wanted <= free or len(wanted) != len(blocks):
            raise ValueError(f"KV blocks claimed that are not free: {sorted(wanted - free)[:8]}")
        self._free.forget(wanted)
        self._free.replace(free - wanted)
        self._use(blocks)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks, in ascending order. Raises OutOfBlocks, and takes none, if fewer are free."""
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free), self.capacity)
        taken = self._free.take(n)
        self._use(taken)
        return taken

    def reuse(self, blocks: Sequence[int]) -> None:
        """Take those of these indexed blocks that are free, with what they hold."""
        self._use(self._free.take_indexed(blocks))

    def free(self, blocks: Sequence[int]) -> None:
        """Free these blocks; of indexed ones the last is kept longest.

        Raises ValueError, and frees none, if one is not in use or given twice.
        """
        wrong = [b for b in blocks if not (0 <= b < self.capacity and self._in_use[b])]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {wrong or list(blocks)}")
        for block in blocks:
            self._in_use[block] = False
        self._free.add(blocks)
        if blocks and self.on_empty is not None and self.num_free == self.capacity:
            self.on_empty()

    def live_from(self, capacity: int) -> list[int]:
        """Return the blocks in use at or above `capacity`, which must move before shrinking to it."""
        return [block for block in range(capacity, self.capacity) if self._in_use[block]]

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Rename blocks in use whose contents were moved (from -> to); the sources are free."""
        self.index.rename(moves)
        self._free.replace({*self._free}.difference(moves.values()).union(moves))
        for source, target in moves.items():
            self._in_use[source], self._in_use[target] = False, True

    def extend(self, capacity: int) -> None:
        """Grow to `capacity` with free blocks. Raises ValueError if that is less than now."""
        if capacity < self.capacity:
            raise ValueError(f"cannot extend {self.capacity} KV blocks to {capacity}; truncate")
        self._free.add(range(self.capacity, capacity))
        self._in_use.extend(bytes(capacity - self.capacity))

    def truncate(self, capacity: int) -> None:
        """Shrink to `capacity`. Raises BlocksInUse, changing nothing, if a block above is in use."""
        live = self.live_from(capacity)
        if live:
            raise BlocksInUse(live, capacity)
        self.index.forget_where(lambda block: block >= capacity)
        self._free.replace(block for block in self._free if block < capacity)
        del self._in_use[capacity:]

    def check_integrity(self) -> None:
        """Check that every block is free once, or in use. Raises BrokenInvariant and AssertionError."""
        self.index.check_integrity(self.capacity)
        self._free.check_integrity()
        free = set(self._free)
        expected = {block for block in range(self.capacity) if not self._in_use[block]}
        if free != expected:
            raise BrokenInvariant(
                f"KV blocks both free and in use, or neither: {sorted(free ^ expected)[:8]}"
            )

    def _use(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._in_use[block] = True
        self.num_touched = max(self.num_touched, max(blocks, default=-1) + 1)


def plan_moves_below(used: Iterable[int], capacity: int, cached: Iterable[int] = ()) -> dict[int, int]:
    """Plan the moves (from -> to) of blocks in use at or above `capacity` to the lowest empty ones below it.

    cached: blocks whose contents can be found, the least recently used first. Moves overwrite those last, in
    this order. Raises OutOfBlocks if there are not enough.
    """
    taken = set(used)
    live = sorted(block for block in taken if block >= capacity)
    rank = {block: place for place, block in enumerate(cached, 1)} if live else {}
    free = sorted((rank.get(block, 0), block) for block in range(capacity) if block not in taken)
    if len(free) < len(live):
        raise OutOfBlocks(len(live), len(free), capacity)
    return {block: target for block, (_, target) in zip(live, free, strict=False)}


def in_parts(moves: Mapping[int, int], most: int) -> Iterator[dict[int, int]]:
    """Divide simultaneous moves (from -> to) into parts of about `most` moves, to make one after the other.

    A part overwrites nothing that a later part reads. A cycle is not divided.
    """
    sources = {to: block for block, to in moves.items()}
    left, part = dict(moves), dict[int, int]()
    ends = [block for block, to in moves.items() if to not in moves]  # of chains: their targets are free
    for block in [*ends, *moves]:  # what the chains leave are cycles
        is_cycle = moves[block] in moves
        while block in left:
            part[block] = left.pop(block)
            block = sources.get(block, -1)
            if len(part) >= most and not (is_cycle and block in left):
                yield part
                part = {}
    if part:
        yield part


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

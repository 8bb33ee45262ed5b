"""The allocator of KV blocks: of a whole cache, or of one member's share of a group's."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from worker.memory.backend import BlocksInUse, BrokenInvariant, OutOfBlocks
from worker.memory.prefix_index import PrefixIndex

FEW = 64  # blocks: of a request, not of a cache


class BlockAllocator:
    """The KV blocks from which one scheduler allocates, given out in the order of `FreeBlocks`.

    A cache's allocator has all blocks 0..capacity-1. That of a member of a group has a share of the group's,
    and lends of it. Numbers are the same on every rank; while layers run at two degrees, those of the lower.
    """

    def __init__(
        self, capacity: int = 0, share: Iterable[int] | None = None, used: Iterable[int] = ()
    ) -> None:
        """Have all blocks below `capacity`, or those of a `share`. Raises ValueError if `used` are others.

        The index of a share is closed until all layers are at one degree.
        """
        self.capacity = capacity  # the most blocks that one sequence could ever have
        self.index = PrefixIndex(is_open=share is None)  # index of used and free blocks
        self.num_touched = 0  # blocks below this number may have been written
        self.num_used_by_others = 0  # blocks in use by the other members
        self.on_empty: Callable[[], None] | None = None  # called when the last block in use is freed
        self._is_whole = share is None
        self._used = set(used)
        self._use(self._used)
        own = set(range(capacity) if share is None else share)
        if strange := self._used - own:
            raise ValueError(f"KV blocks in use that are not here: {sorted(strange)[:8]}")
        self._free = FreeBlocks(own - self._used, self.index)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def used(self) -> list[int]:
        """Blocks in use, ascending."""
        return sorted(self._used)

    @property
    def held(self) -> list[int]:
        """Blocks in use, and free ones whose contents can be found, ascending."""
        return sorted(self._used | self.index.blocks)

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
        wrong = [block for block in blocks if block not in self._used]
        if wrong or len(set(blocks)) != len(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {wrong or list(blocks)}")
        self._used.difference_update(blocks)
        self._free.add(blocks)
        if blocks and self.on_empty is not None and not self._used:
            self.on_empty()

    def give(self, n: int) -> list[int]:
        """Remove up to n free blocks from this share, the highest first, and return them."""
        return self._free.take_highest(n)

    def take(self, blocks: Collection[int]) -> None:
        """Add free blocks: new ones, or those of another share."""
        self._free.add(blocks)

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Rename blocks whose contents were moved (from -> to), of any member.

        One that was freed since the moves were planned is free at either place. The sources are free in a
        whole cache. A share keeps none that was in use: steps follow before the group has fewer blocks or
        parts, and would put KV there.
        """
        if not moves:
            return
        self.index.rename(moves)
        free = set(self._free)
        given_back = {to for block, to in moves.items() if block in free}
        sources = moves.keys() & (free | self._used) if self._is_whole else set()
        self._used = {moves.get(block, block) for block in self._used}
        self._free.replace((free | sources).difference(moves.values()) | given_back)

    def renumber(self, number: Callable[[int], int]) -> None:
        """Give every block its new number, and forget what they hold."""
        self.index.forget_where(lambda block: True)
        self._used = set(map(number, self._used))
        self._free.replace(list(map(number, self._free)))

    def extend(self, capacity: int) -> None:
        """Grow to `capacity` with free blocks. Raises ValueError if that is less than now."""
        if capacity < self.capacity:
            raise ValueError(f"cannot extend {self.capacity} KV blocks to {capacity}; truncate")
        self.take(range(self.capacity, capacity))
        self.capacity = capacity

    def truncate(self, capacity: int) -> None:
        """Shrink to at most `capacity`. Raises BlocksInUse, changing nothing, if a block above is in use."""
        if live := [block for block in self.used if block >= capacity]:
            raise BlocksInUse(live, capacity)
        self.index.forget_where(lambda block: block >= capacity)
        self._free.drop_from(capacity)
        self.capacity = min(self.capacity, capacity)

    def check_integrity(self) -> None:
        """Check that every block is free once, or in use. Raises BrokenInvariant and AssertionError."""
        self.index.check_integrity(self.capacity)
        self._free.check_integrity()
        free = set(self._free)
        wrong = free & self._used
        num_held, highest = len(free) + len(self._used), max(chain(free, self._used), default=-1)
        if self._is_whole and (num_held != self.capacity or highest >= self.capacity):
            wrong |= (free | self._used) ^ set(range(self.capacity))
        if wrong:
            raise BrokenInvariant(f"KV blocks both free and in use, or neither: {sorted(wrong)[:8]}")
        if len(self.index) and (strange := self.index.blocks - free - self._used):
            raise BrokenInvariant(f"KV blocks of another share can be found here: {sorted(strange)[:8]}")

    def _use(self, blocks: Iterable[int]) -> None:
        self._used.update(blocks)
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
        return chain(self._plain, self._indexed)

    def replace(self, blocks: Iterable[int]) -> None:
        """Hold these blocks and no others; indexed ones keep their order."""
        wanted = set(blocks)
        known = [block for block in self._indexed if block in wanted and block in self.index]
        self._indexed = OrderedDict.fromkeys(known)
        self._plain = []
        self.add(sorted(wanted.difference(known) if known else wanted))

    def drop_from(self, capacity: int) -> None:
        """Hold no block of this number or above; the index knows none of them."""
        self._plain = sorted([block for block in self._plain if block < capacity])
        for block in [block for block in self._indexed if block >= capacity]:
            del self._indexed[block]

    def add(self, blocks: Collection[int]) -> None:
        """Add blocks that were freed; of indexed ones the last stays longest."""
        if indexed := self.index.among(blocks):
            self._indexed.update(dict.fromkeys(block for block in blocks if block in indexed))
            blocks = [block for block in blocks if block not in indexed]
        if len(blocks) > FEW:  # the whole cache's when it grows: sorting runs takes a tenth of pushing each
            self._plain = sorted([*self._plain, *blocks])
        else:
            for block in blocks:
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
        if wrong := self.index.among(self._plain):
            raise BrokenInvariant(f"free KV blocks that can be found count as empty: {sorted(wrong)[:8]}")

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop from the index what these blocks held."""
        for block in blocks:
            self.index.forget(block)

"""The allocator of KV blocks: of a whole cache, or of one member's share of a group's."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from worker.memory.backend import BlocksInUse, BrokenInvariant, OutOfBlocks
from worker.memory.block_set import BlockNumbers, BlockSet
from worker.memory.prefix_index import PrefixIndex


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
        self._used = BlockSet()
        self._free = FreeBlocks(range(capacity) if share is None else list(share), self.index)
        self._use(list(used))
        if strange := [block for block in self._used if block not in self._free]:
            raise ValueError(f"KV blocks in use that are not here: {strange[:8]}")
        self._free.remove(self._used)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def used(self) -> list[int]:
        """Blocks in use, ascending."""
        return list(self._used)

    @property
    def held(self) -> list[int]:
        """Blocks in use, and free ones whose contents can be found, ascending."""
        return sorted({*self._used, *self.index.blocks})

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
        blocks = set(moves)
        free, used = {b for b in blocks if b in self._free}, {b for b in blocks if b in self._used}
        now_free = {moves[block] for block in free}
        now_free |= (free | used if self._is_whole else free).difference(moves.values())
        self._free.remove(blocks.union(moves.values()))
        self._used.difference_update(used)
        self._use([moves[block] for block in used])
        self._free.add(sorted(now_free))

    def renumber(self, number: Callable[[int], int]) -> None:
        """Give every block its new number, and forget what they hold."""
        self.index.forget_from(0)
        self._used = BlockSet(map(number, self._used))
        self._free = FreeBlocks(list(map(number, self._free)), self.index)

    def extend(self, capacity: int) -> None:
        """Grow to `capacity` with free blocks. Raises ValueError if that is less than now."""
        if capacity < self.capacity:
            raise ValueError(f"cannot extend {self.capacity} KV blocks to {capacity}; truncate")
        self.take(range(self.capacity, capacity))
        self.capacity = capacity

    def truncate(self, capacity: int) -> None:
        """Shrink to at most `capacity`. Raises BlocksInUse, changing nothing, if a block above is in use."""
        if len(live := self._used.numbers(capacity)):
            raise BlocksInUse(live.tolist(), capacity)
        self.index.forget_from(capacity)
        self._free.drop_from(capacity)
        self.capacity = min(self.capacity, capacity)

    def check_integrity(self, with_index: bool = True) -> None:
        """Check that every block is free once, or in use. Raises BrokenInvariant and AssertionError.

        with_index: check the prefix cache's blocks one by one, too, which takes milliseconds where there are
        many; the rest takes microseconds.
        """
        num_blocks = 1 + max(self._used.highest, self._free.highest, self.capacity - 1)
        used, free = self._used.mask(num_blocks), self._free.mask(num_blocks)
        wrong = used & free
        if self._is_whole:
            wrong |= (used | free) != (np.arange(num_blocks) < self.capacity)
        if np.any(wrong):
            blocks = np.flatnonzero(wrong)[:8].tolist()
            raise BrokenInvariant(f"KV blocks both free and in use, or neither: {blocks}")
        if with_index:
            self.index.check_integrity(self.capacity)
            self._free.check_integrity()
            if len(strange := np.flatnonzero(self.index.mask(num_blocks) & ~free & ~used)):
                raise BrokenInvariant(f"KV blocks of another share can be found here: {strange[:8].tolist()}")

    def _use(self, blocks: Collection[int]) -> None:
        self._used.update(blocks)
        self.num_touched = max(self.num_touched, max(blocks, default=-1) + 1)


def plan_moves_below(
    used: Collection[int], capacity: int, index: PrefixIndex | None = None
) -> dict[int, int]:
    """Plan the moves (from -> to) of blocks in use at or above `capacity` to the lowest empty ones below it.

    index: of blocks whose contents can be found. Moves overwrite those last, the least recently used first.
    Raises OutOfBlocks if there are not enough.
    """
    blocks: BlockNumbers = np.unique(np.fromiter(used, np.int64, len(used)))
    live, kept = blocks[blocks >= capacity].tolist(), blocks[blocks < capacity]
    if (num_free := capacity - len(kept)) < len(live):
        raise OutOfBlocks(len(live), num_free, capacity)
    if not live:
        return {}
    is_empty = np.ones(capacity, dtype=np.bool_)
    is_empty[kept] = False
    targets = np.flatnonzero(is_empty)
    if index:
        targets = np.flatnonzero(is_empty & ~index.mask(capacity))[: len(live)]
        if len(missing := live[len(targets) :]):
            cached = (block for block in index.oldest_first if block < capacity and is_empty[block])
            targets = np.append(targets, list(islice(cached, len(missing))))
    return dict(zip(live, targets.tolist(), strict=False))


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

    def __init__(self, blocks: Collection[int], index: PrefixIndex) -> None:
        self.index = index
        self._plain = BlockSet()
        self._indexed: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._known = BlockSet()  # the same ones
        self.add(blocks)

    def __len__(self) -> int:
        return len(self._plain) + len(self._indexed)

    def __contains__(self, block: int) -> bool:
        return block in self._plain or block in self._known

    def __iter__(self) -> Iterator[int]:
        return chain(self._plain, self._indexed)

    @property
    def highest(self) -> int:
        """The highest block; -1 for none."""
        return max(self._plain.highest, self._known.highest)

    def mask(self, num_blocks: int) -> npt.NDArray[np.bool_]:
        """Return bool [num_blocks]: which of the blocks below are free."""
        return self._plain.mask(num_blocks) | self._known.mask(num_blocks)

    def remove(self, blocks: Iterable[int]) -> None:
        """Remove those of these blocks that are free."""
        for block in blocks:
            self._plain.discard(block)
            if block in self._known:
                self._remove_indexed(block)

    def drop_from(self, capacity: int) -> None:
        """Hold no block of this number or above; the index knows none of them."""
        self._plain.drop_from(capacity)
        for block in self._known.numbers(capacity).tolist():
            self._remove_indexed(block)

    def add(self, blocks: Collection[int]) -> None:
        """Add blocks that were freed; of indexed ones the last stays longest."""
        if indexed := self.index.among(blocks):
            kept = [block for block in blocks if block in indexed]
            self._indexed.update(dict.fromkeys(kept))
            self._known.update(kept)
            blocks = [block for block in blocks if block not in indexed]
        self._plain.update(blocks)

    def take(self, n: int) -> list[int]:
        """Remove n blocks and return them, in ascending order; there must be as many."""
        taken = self._plain.pop_lowest(n)
        if len(taken) < n:
            taken += [self._pop_oldest() for _ in range(n - len(taken))]
            taken.sort()
            self.forget(taken)
        return taken

    def take_indexed(self, blocks: Iterable[int]) -> list[int]:
        """Remove those of these blocks that are free and indexed, contents and all, and return them."""
        taken = [block for block in blocks if block in self._known]
        for block in taken:
            self._remove_indexed(block)
        return taken

    def take_highest(self, n: int) -> list[int]:
        """Remove up to n blocks, the highest that hold nothing of use first; return them ascending."""
        taken = self._plain.pop_highest(n)
        while len(taken) < n and self._indexed:
            taken.append(self._pop_oldest())
        self.forget(taken)
        return sorted(taken)

    def check_integrity(self) -> None:
        """Raise BrokenInvariant if a block is here twice, or findable and given out as one that is not."""
        if set(self._known) != self._indexed.keys():
            raise BrokenInvariant("the free KV blocks that can be found are not those in their order of use")
        if wrong := self.index.among(self._plain) | self._indexed.keys() & set(self._plain):
            raise BrokenInvariant(f"free KV blocks that can be found count as empty: {sorted(wrong)[:8]}")

    def forget(self, blocks: Iterable[int]) -> None:
        """Drop from the index what these blocks held."""
        for block in blocks:
            self.index.forget(block)

    def _pop_oldest(self) -> int:
        block, _ = self._indexed.popitem(last=False)
        self._known.discard(block)
        return block

    def _remove_indexed(self, block: int) -> None:
        del self._indexed[block]
        self._known.discard(block)

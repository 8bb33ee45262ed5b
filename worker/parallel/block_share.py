"""The KV blocks of a group, divided among its members: each allocates from its own share, and lends.

Numbers are the same on every rank, since a block of a group takes a part of the memory of each. While layers
run at two degrees a member has the numbers of the lower one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from worker.memory import BrokenInvariant, OutOfBlocks


class BlockShare:
    """The blocks of one member, a `BlockPool` over any numbers, the lowest free ones first."""

    def __init__(self, ids: Iterable[int], used: Iterable[int], capacity: int) -> None:
        """capacity: blocks of the whole group; no sequence can have more."""
        self._used = set(used)
        self._free = sorted(set(ids) - self._used)  # a heap
        self.capacity = capacity
        self.num_used_by_others = 0

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
    def free_ids(self) -> list[int]:
        """Free blocks, ascending."""
        return sorted(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take n blocks. Raises OutOfBlocks and takes none if fewer are free here."""
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free), self.capacity)
        taken = [heapq.heappop(self._free) for _ in range(n)]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Raises ValueError, having freed none, if one is not in use or comes twice."""
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {list(blocks)}")
        self._used.difference_update(blocks)
        for block in blocks:
            heapq.heappush(self._free, block)

    def give(self, n: int) -> list[int]:
        """Remove up to n free blocks from this share, the highest first, and return them."""
        self._free.sort()
        kept = max(0, len(self._free) - n)
        given, self._free = self._free[kept:], self._free[:kept]
        return given

    def take(self, blocks: Iterable[int]) -> None:
        """Add free blocks of another share."""
        for block in blocks:
            heapq.heappush(self._free, block)

    def move(self, moves: Mapping[int, int], capacity: int) -> None:
        """Rename blocks in use of any member that were moved (from -> to) below `capacity`.

        A block that was given back since it was counted is free at its new place.
        """
        self._used = {moves.get(block, block) for block in self._used}
        given_back = {moves[block] for block in self._free if block in moves}
        self._free = sorted(set(self._free).difference(moves.values()) | given_back)
        self.drop_free_from(capacity)

    def drop_free_from(self, capacity: int) -> None:
        """Drop free blocks above `capacity` and lower `capacity`."""
        self._free = sorted(block for block in self._free if block < capacity)
        self.capacity = capacity

    def renumber(self, number: Callable[[int], int]) -> None:
        """Give every block its new number."""
        self._used = {number(block) for block in self._used}
        self._free = sorted(number(block) for block in self._free)

    def check_integrity(self) -> None:
        """Raise BrokenInvariant if a block is free twice, or free and in use."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._used:
            raise BrokenInvariant(f"KV blocks both free and in use: {sorted(free & self._used)[:8]}")


def loans(
    spare: Sequence[int], wanted: Sequence[int], wanting_s: Sequence[float]
) -> list[tuple[int, int, int]]:
    """Plan loans (giver, taker, blocks) so that members get the blocks they miss, first come, first served.

    By member: blocks that it can spare, that it wants, and how long its oldest sequence that misses some has
    been there. A member that wants nothing gives half at a time, since it may want the rest soon. One whose
    want is younger gives all: it has too few to begin with, and two such members would wait for each other.
    """
    left = [have if want else (have + 1) // 2 for have, want in zip(spare, wanted, strict=True)]
    planners = range(len(wanted))
    takers = sorted((i for i in planners if wanted[i]), key=lambda i: -wanting_s[i])
    made = []
    for position, taker in enumerate(takers):
        missing = wanted[taker]
        idle = sorted((i for i in planners if not wanted[i]), key=lambda i: -left[i])
        for giver in [*idle, *reversed(takers[position + 1 :])]:
            count = min(missing, left[giver])
            if count > 0:
                made.append((giver, taker, count))
                left[giver] -= count
                missing -= count
    return made


class SubgroupTooFull(ValueError):
    """Raised when a subgroup has more KV blocks in use than it will have room for."""

    def __init__(self, planner: int, used: int, room: int) -> None:
        super().__init__(f"subgroup {planner} has {used} KV blocks in use and will have {room}")
        self.planner, self.used, self.room = planner, used, room


def plan_block_moves(used: Sequence[Sequence[int]], capacity_after: int) -> list[dict[int, int]]:
    """Plan the moves of blocks before a group of n subgroups splits.

    Subgroup j keeps the numbers c * n + j with c < capacity_after. used: the numbers in use, by subgroup.
    Returns moves (from -> to) by subgroup, of the blocks that are not there yet. Targets are free as far as
    possible; else they are sources themselves, which move too: `in_parts` says how to copy them. Raises
    SubgroupTooFull where a subgroup has more in use than it will have.
    """
    n = len(used)
    taken = {block for blocks in used for block in blocks}
    moves: list[dict[int, int]] = []
    for subgroup, blocks in enumerate(used):
        if len(blocks) > capacity_after:
            raise SubgroupTooFull(subgroup, len(blocks), capacity_after)
        own = range(subgroup, capacity_after * n, n)
        right = {block for block in blocks if block in own}
        targets = sorted(set(own) - right, key=lambda block: (block in taken, block))
        moves.append(dict(zip((block for block in blocks if block not in right), targets, strict=False)))
    return moves


def in_parts(moves: Mapping[int, int], most: int) -> Iterator[dict[int, int]]:
    """Divide simultaneous moves (from -> to) into parts of about `most` moves to make one after the other.

    Each part reads all its sources before it writes, and overwrites nothing that a later part reads. A cycle
    is not divided.
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

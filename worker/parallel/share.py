"""The KV blocks of a group, shared out among its planners: each allocates from its own, and lends.

Numbers are the same on every rank, since a block of a group is a part of the memory of each. While layers
run at two degrees a planner has the numbers of the lower one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from worker.memory import BrokenInvariant, OutOfBlocks


class BlockShare:
    """The blocks of one planner, a `BlockPool` over any numbers, the lowest free ones first."""

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
        return sorted(self._used)

    @property
    def free_ids(self) -> list[int]:
        return sorted(self._free)

    def allocate(self, n: int) -> list[int]:
        """Raises OutOfBlocks and takes none if fewer are free here."""
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free), self.capacity)
        taken = [heapq.heappop(self._free) for _ in range(n)]
        self._used.update(taken)
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Raises ValueError, having freed none, if one is not in use or comes twice."""
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {list(blocks)}")
        self._used.difference_update(blocks)
        for block in blocks:
            heapq.heappush(self._free, block)

    def give(self, n: int) -> list[int]:
        """Up to n free ones leave this share, the highest first."""
        self._free.sort()
        kept = max(0, len(self._free) - n)
        given, self._free = self._free[kept:], self._free[:kept]
        return given

    def take(self, blocks: Iterable[int]) -> None:
        """Free ones of another share."""
        for block in blocks:
            heapq.heappush(self._free, block)

    def move(self, moves: Mapping[int, int], capacity: int) -> None:
        """Blocks in use, of any planner, lie elsewhere (from -> to), and none is at or above `capacity`. One
        that was given back since they were counted is free where it would have come to lie."""
        self._used = {moves.get(block, block) for block in self._used}
        given_back = {moves[block] for block in self._free if block in moves}
        self._free = sorted(set(self._free).difference(moves.values()) | given_back)
        self.drop_free_from(capacity)

    def drop_free_from(self, capacity: int) -> None:
        """What is above belongs to nobody from here on, and no more than that to anyone."""
        self._free = sorted(block for block in self._free if block < capacity)
        self.capacity = capacity

    def renumber(self, number: Callable[[int], int]) -> None:
        self._used = {number(block) for block in self._used}
        self._free = sorted(number(block) for block in self._free)

    def check_integrity(self) -> None:
        """Raises BrokenInvariant if a block is free twice, or free and in use."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._used:
            raise BrokenInvariant(f"KV blocks both free and in use: {sorted(free & self._used)[:8]}")


def loans(
    spare: Sequence[int], wanted: Sequence[int], wanting_s: Sequence[float]
) -> list[tuple[int, int, int]]:
    """(giver, taker, blocks) so that planners get what they miss, first come, first served.

    By planner: blocks that it can spare and that it wants, and how long its first that misses some has been
    there.

    Who wants nothing gives half at a time, the rest may be wanted there soon. Who came later and wants some,
    too, gives all: it has not enough to begin with, and two of them would wait for each other for ever.
    """
    left = [have if want else (have + 1) // 2 for have, want in zip(spare, wanted, strict=True)]
    planners = range(len(wanted))
    takers = sorted((i for i in planners if wanted[i]), key=lambda i: -wanting_s[i])
    made = []
    for place, taker in enumerate(takers):
        missing = wanted[taker]
        idle = sorted((i for i in planners if not wanted[i]), key=lambda i: -left[i])
        for giver in [*idle, *reversed(takers[place + 1 :])]:
            count = min(missing, left[giver])
            if count > 0:
                made.append((giver, taker, count))
                left[giver] -= count
                missing -= count
    return made


class NoRoom(ValueError):
    """A planner's blocks do not fit where it goes. `planner`: its subgroup; `used` and `room`: blocks."""

    def __init__(self, planner: int, used: int, room: int) -> None:
        super().__init__(f"subgroup {planner} has {used} KV blocks in use and will have {room}")
        self.planner, self.used, self.room = planner, used, room


def homes(used: Sequence[Sequence[int]], capacity_after: int) -> list[dict[int, int]]:
    """Where each subgroup's blocks must lie before the group parts: number c * n + j with c < capacity_after.

    used: by subgroup, the numbers in use. Returns moves (from -> to) by subgroup, of the blocks that do not
    lie right yet. Targets are free as far as there are free ones; else they are sources themselves, since
    what lies in another's place moves, too: `in_parts` says how to copy them. Raises NoRoom where a subgroup
    has more in use than it will have.
    """
    n = len(used)
    taken = {block for blocks in used for block in blocks}
    moves: list[dict[int, int]] = []
    for subgroup, blocks in enumerate(used):
        if len(blocks) > capacity_after:
            raise NoRoom(subgroup, len(blocks), capacity_after)
        own = range(subgroup, capacity_after * n, n)
        right = {block for block in blocks if block in own}
        targets = sorted(set(own) - right, key=lambda block: (block in taken, block))
        moves.append(dict(zip((block for block in blocks if block not in right), targets, strict=False)))
    return moves


def in_parts(moves: Mapping[int, int], most: int) -> Iterator[dict[int, int]]:
    """The moves (from -> to), all meant at once, as parts to be made one after the other: each reads all its
    sources before it writes, and overwrites nothing that a later one reads. Of about `most` moves; a cycle is
    not divided."""
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

"""The KV blocks of a group, divided among its members: each allocates from its own share, and lends.

Numbers are the same on every rank; while layers run at two degrees, those of the lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from worker.memory import BrokenInvariant, FreeBlocks, OutOfBlocks, PrefixIndex


class BlockShare:
    """The blocks of one member, a `BlockPool` over any numbers, given out in the order of `FreeBlocks`.

    Its index is closed until all layers are at one degree.
    """

    def __init__(self, ids: Iterable[int], used: Iterable[int], capacity: int) -> None:
        """capacity: blocks of the whole group; no sequence can have more."""
        self.index = PrefixIndex(is_open=False)
        self._used = set(used)
        self._free = FreeBlocks(set(ids) - self._used, self.index)
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
        taken = self._free.take(n)
        self._used.update(taken)
        return taken

    def reuse(self, blocks: Sequence[int]) -> None:
        """Take those of these indexed blocks that are free, with what they hold."""
        self._used.update(self._free.take_indexed(blocks))

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; of indexed ones the last is kept longest.

        Raises ValueError, having freed none, if one is not in use or comes twice.
        """
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise ValueError(f"KV blocks freed that are not in use, or freed twice: {list(blocks)}")
        self._used.difference_update(blocks)
        self._free.add(blocks)

    def give(self, n: int) -> list[int]:
        """Remove up to n free blocks from this share, the highest first, and return them."""
        return self._free.take_highest(n)

    def take(self, blocks: Iterable[int]) -> None:
        """Add free blocks of another share."""
        self._free.add(blocks)

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Rename moved blocks (from -> to) of any member; one given back since is free at its new place."""
        self.index.rename(moves)
        self._used = {moves.get(block, block) for block in self._used}
        given_back = {moves[block] for block in self._free if block in moves}
        self._free.replace(set(self._free).difference(moves.values()) | given_back)

    def drop_free_from(self, capacity: int) -> None:
        """Drop free blocks above `capacity` and lower `capacity`."""
        self.index.forget_where(lambda block: block >= capacity)
        self._free.replace(block for block in self._free if block < capacity)
        self.capacity = capacity

    def renumber(self, number: Callable[[int], int]) -> None:
        """Give every block its new number, and forget what they hold."""
        self.index.forget_where(lambda block: True)
        self._used = {number(block) for block in self._used}
        self._free.replace([number(block) for block in self._free])

    def check_integrity(self) -> None:
        """Raise BrokenInvariant if a block is free twice, or free and in use."""
        self._free.check_integrity()
        free = set(self._free)
        if free & self._used:
            raise BrokenInvariant(f"KV blocks both free and in use: {sorted(free & self._used)[:8]}")
        if strange := self.index.blocks - free - self._used:
            raise BrokenInvariant(f"KV blocks of another share can be found here: {sorted(strange)[:8]}")


def loans(
    spare: Sequence[int], wanted: Sequence[int], wanting_s: Sequence[float]
) -> list[tuple[int, int, int]]:
    """Plan loans (giver, taker, blocks) so that members get the blocks they miss, first come, first served.

    All by member. A member that wants nothing gives half at a time, since it may want the rest soon. One
    whose want is younger gives all: two members with too few blocks would wait for each other.
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
    """Plan the moves (from -> to), by subgroup, before a group of n subgroups splits.

    Subgroup j keeps the numbers c * n + j with c < capacity_after. used: by subgroup. Targets are free as far
    as possible; else they are sources too, see `worker.memory.in_parts`. Raises SubgroupTooFull.
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

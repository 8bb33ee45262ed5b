"""Loans of KV blocks between the members of a group, and their moves before it splits."""

from __future__ import annotations

from collections.abc import Sequence


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

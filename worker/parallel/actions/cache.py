"""The KV cache of a group gets more pages, or fewer, on every member alike."""

from __future__ import annotations

from worker.distributed.messages import Grow, Shrink
from worker.parallel.member import Member


def grow(member: Member, action: Grow) -> None:
    member.place.cache.grow(action.pages)
    member.take_new_blocks(member.share.capacity, action.blocks)


def shrink(member: Member, action: Shrink) -> None:
    """Live blocks move below first."""
    moves = action.moves
    member.copy_blocks(moves)

    def number(block: int) -> int:
        return moves.get(block, block)

    member.share.move(moves, action.blocks)
    member.place.instance.renumber_all_blocks(number)
    member.place.cache.shrink(action.pages)

"""The KV cache of a group gets more pages, or fewer, on every member alike."""

from __future__ import annotations

from worker.distributed.messages import GrowKV, ShrinkKV
from worker.parallel.member import Member


def grow(member: Member, action: GrowKV) -> None:
    """Add the pages; the new blocks are the leader's, who lends them."""
    member.place.cache.grow(action.pages)
    member.take_new_blocks(member.share.capacity, action.blocks)
    _note(member, action, action.pages)


def shrink(member: Member, action: ShrinkKV) -> None:
    """Move live blocks below the new end, then take the pages."""
    moves = action.moves
    member.copy_blocks(moves)

    def number(block: int) -> int:
        return moves.get(block, block)

    member.share.move(moves, action.blocks)
    member.place.instance.renumber_all_blocks(number)
    member.place.cache.shrink(action.pages)
    member.place.resizer.num_blocks_moved += len(moves)
    _note(member, action, -action.pages)


def _note(member: Member, action: GrowKV | ShrinkKV, pages: int) -> None:
    """Remember a size that an operator has ordered: it holds when the group parts, too."""
    member.place.target.count_resized(action)
    if action.purpose == "order":
        member.pages_alone = max(member.pages_alone + pages, member.place.cache.pages_for(1))

"""A group goes back to its smaller degree: blocks move home, weights come in beside the steps, and then every
subgroup is on its own."""

from __future__ import annotations

from collections.abc import Sequence

from worker.distributed.messages import PartingBegins
from worker.parallel.actions import rows
from worker.parallel.member import Member
from worker.parallel.share import BlockShare


def begin(member: Member, action: PartingBegins, used: Sequence[Sequence[int]]) -> None:
    """used: by rank, as counted. Blocks that finished in this very step are still counted, and free again
    where they come to lie."""
    with member.moving():
        member.copy_blocks(action.moves)
        _part_blocks(member, action, used)
        cache = member.place.cache
        cache.shrink(cache.pages_per_layer - action.pages[member.rank])
        if member.low:
            member.low.close()
        member.low, member.next_low = member.next_low, None
        member.rows = rows.coming(member, action)


def end(member: Member) -> None:
    """All layers are at the low degree."""
    if member.rows:
        member.costs.rows_s, member.rows = member.rows.seconds, None
    member.is_over = True
    if member.formation.low == 1:
        member.place.leave_with(member.share)
    member.reshaped(member.formation.low)


def _part_blocks(member: Member, action: PartingBegins, used: Sequence[Sequence[int]]) -> None:
    """Each subgroup has its own, in its own numbers; what nobody uses there is shared out evenly."""
    place = member.place
    formation = member.formation.beginning(action.low, place.num_layers, grows=False)
    n, subgroup = formation.num_subgroups, formation.subgroup(member.rank)

    def number(block: int) -> int:
        return action.moves.get(block, block) // n

    ranks = formation.ranks_of(subgroup)
    counted = {rank: {number(block) for block in used[rank]} for rank in ranks}
    nobodys = sorted(set(range(action.blocks)).difference(*counted.values()))
    own = counted[member.rank].union(nobodys[ranks.index(member.rank) :: len(ranks)])
    member.use(BlockShare(own, map(number, member.share.used), action.blocks))
    place.instance.renumber_all_blocks(number)
    member.formation = formation

"""Layers change their degree, the last one first, and once all have it the group has one set of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from worker.distributed.kv_exchange import Moved, exchange
from worker.distributed.messages import Settle
from worker.parallel.actions import rows
from worker.parallel.member import Member


def move(member: Member, to: int, used: Sequence[Sequence[int]]) -> None:
    """The layers from `to` up to the boundary of now, weights and KV. used: blocks by rank. Raises
    PeerLost, and WrongVariant for rows that came damaged."""
    formation, weights = member.formation, member.place.weights
    live = formation.by_subgroup(used)
    with member.moving():
        for layer in reversed(range(to, formation.boundary)):
            if formation.grows:
                member.costs.pages_freed += weights.narrow(layer, formation.high_shard(member.rank))
                _exchange(member, layer, live)
            else:
                _exchange(member, layer, live)
                if member.rows:
                    member.rows.finish(layer)
                weights.widen(layer, formation.low_shard(member.rank))
            member.on_progress()  # all may go between two steps, each with a GiB of rows from its peers
        member.formation = formation.moved(to)


def settle(member: Member, action: Settle) -> None:
    """All layers are at the high degree: blocks get its numbers, the cache the pages that are free."""
    n, subgroup = member.formation.num_subgroups, member.formation.subgroup(member.rank)
    share, cache = member.share, member.place.cache

    def number(block: int) -> int:
        return block * n + subgroup

    share.renumber(number)
    member.place.instance.renumber_all_blocks(number)
    cache.grow(max(0, action.pages[member.rank] - cache.pages_per_layer))
    member.take_new_blocks(share.capacity * n, action.blocks)
    member.formation = member.formation.grown()
    member.reshaped(member.formation.size)
    rows.get_to_know(member, is_probed=action.is_probed)


def _exchange(member: Member, layer: int, live: Sequence[Sequence[int]]) -> None:
    formation, place = member.formation, member.place

    def trade() -> Moved:
        return exchange(
            place.cache.layers_at(formation.size)[layer],
            live,
            formation.subgroup(member.rank),
            member.high,
            formation.peers(member.rank),
            place.stage_bytes,
            formation.grows,
        )

    moved = rows.exchanged(member, trade, least_bytes=place.stage_bytes // 2)
    member.costs.bytes_exchanged += moved.bytes

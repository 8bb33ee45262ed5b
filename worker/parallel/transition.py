"""The work of each member between two steps while the degree changes (Gyges §4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from worker.distributed.all_gather import all_gather
from worker.distributed.kv_exchange import Moved, exchange
from worker.distributed.messages import BeginSplit, FinishMerge
from worker.memory import BlockAllocator
from worker.parallel.formation import Formation
from worker.parallel.member import Member
from worker.parallel.rows import HostRows, PeerRows, RowSource

Blocks = Sequence[Sequence[int]]  # KV blocks in use, by rank


def move_boundary(member: Member, to: int, used: Blocks) -> None:
    """Change the degree of the layers from `to` to the boundary. Raises PeerLost and WrongVariant."""
    formation, weights = member.formation, member.local.weights
    live = formation.by_subgroup(used)
    with member.moving():
        for layer in reversed(range(to, formation.boundary)):
            if formation.grows:
                member.costs.pages_freed += weights.narrow(layer, formation.high_shard(member.rank))
                _exchange_kv(member, layer, live)
            else:
                _exchange_kv(member, layer, live)
                if member.rows:
                    member.rows.finish(layer)
                weights.widen(layer, formation.low_shard(member.rank))
            # All layers may change between two steps, each with a GiB of rows from peers: that is no hang.
            member.on_progress()
        member.formation = replace(formation, boundary=to)


def finish_merge(member: Member, action: FinishMerge) -> None:
    """Give blocks the numbers of the high degree and the cache the pages that the weights have freed."""
    n, subgroup = member.formation.num_subgroups, member.formation.subgroup(member.rank)
    share, cache = member.share, member.local.cache

    def number(block: int) -> int:
        return block * n + subgroup

    share.renumber(number)
    share.index.open()
    member.local.instance.renumber_all_blocks(number)
    cache.grow(max(0, action.pages[member.rank] - cache.pages_per_layer))
    member.take_new_blocks(share.capacity * n, action.blocks)
    member.formation = Formation(member.formation.members, member.formation.size)
    member.reshaped(member.formation.size)
    probe_link_bandwidth(member, is_probed=action.is_probed)


def begin_split(member: Member, action: BeginSplit, used: Blocks) -> None:
    """Move blocks to where their subgroup keeps them, and begin to bring in the missing weights.

    Blocks freed in this very step are in `used` too, and become free at their new place.
    """
    with member.moving():
        cache = member.local.cache
        cache.copy_blocks(action.moves, member.formation.size, member.local.stage_bytes)
        _split_blocks(member, action, used)
        cache.shrink(cache.pages_per_layer - action.pages[member.rank])
        if member.low:
            member.low.close()
        member.low, member.next_low = member.next_low, None
        member.rows = _row_source(member, action)


def end_split(member: Member) -> None:
    """Leave the group, since all layers are at the low degree."""
    if member.rows:
        member.costs.rows_s, member.rows = member.rows.seconds, None
    member.is_over = True
    if member.formation.low == 1:
        member.local.leave_group(member.share)
    member.reshaped(member.formation.low)


def probe_link_bandwidth(member: Member, *, is_probed: bool) -> None:
    """Measure what the choice between rows of peers and of the host needs and no transform has measured yet.

    The host's rate beside the steps; that of peers if the leader asks for it. Raises PeerLost.
    """
    local = member.local
    if not local.copier.rate.bytes_per_s:
        local.copier.start(local.weights.rehearsal())
    if not is_probed:
        return
    group, stage_bytes = member.high, local.stage_bytes
    each = max(1, stage_bytes // (2 * group.size))
    scratch = _Scratch(group.size * each, local.instance.device)
    parts = [[(rank * each, (rank + 1) * each)] for rank in range(group.size)]

    def send() -> Moved:
        return all_gather(scratch, parts, group, range(group.size), stage_bytes)

    send()  # makes what the connection needs, which takes longer than to use it
    _timed(member, send)


def _split_blocks(member: Member, action: BeginSplit, used: Blocks) -> None:
    """Give each subgroup its own blocks, in its own numbers; its members share the free ones evenly."""
    local = member.local
    formation = Formation(member.formation.members, action.low, local.num_layers, grows=False)
    n, subgroup = formation.num_subgroups, formation.subgroup(member.rank)

    def number(block: int) -> int:
        return action.moves.get(block, block) // n

    ranks = formation.ranks_of(subgroup)
    counted = {rank: {number(block) for block in used[rank]} for rank in ranks}
    free = sorted(set(range(action.blocks)).difference(*counted.values()))
    own = counted[member.rank].union(free[ranks.index(member.rank) :: len(ranks)])
    member.formation = formation
    member.use(BlockAllocator(action.blocks, own, map(number, member.share.used)))
    local.instance.renumber_all_blocks(number)


def _row_source(member: Member, action: BeginSplit) -> RowSource:
    """Bring in the rows that the low degree needs, the way that the leader has chosen for all."""
    local, shard = member.local, member.formation.low_shard(member.rank)
    if not action.is_from_peers:
        return HostRows(local.weights, shard, local.num_layers, local.copier)
    return PeerRows(
        local.weights,
        shard,
        local.num_layers,
        ahead=action.layers_per_step,
        gather=lambda layer: _gather_rows(member, layer),
    )


def _gather_rows(member: Member, layer: int) -> None:
    """Fill the pages that `PeerRows` mapped with what the peers have. Raises PeerLost and WrongVariant."""
    formation, weights = member.formation, member.local.weights
    peers = formation.peers(member.rank)
    parts = [weights.spans(layer, formation.high_shard(peer)) for peer in peers]
    stage_bytes = member.local.stage_bytes
    _timed(member, lambda: all_gather(weights.ffn(layer), parts, member.high, peers, stage_bytes))


def _exchange_kv(member: Member, layer: int, live: Blocks) -> None:
    formation, local = member.formation, member.local

    def trade() -> Moved:
        return exchange(
            local.cache.layers_at(formation.size)[layer],
            live,
            formation.subgroup(member.rank),
            member.high,
            formation.peers(member.rank),
            local.stage_bytes,
            formation.grows,
            local.cache.parts_at(formation.size) // local.cache.parts_at(formation.low),
        )

    moved = _timed(member, trade, least_bytes=local.stage_bytes // 2)
    member.costs.bytes_exchanged += moved.bytes


def _timed(member: Member, call: Callable[[], Moved], *, least_bytes: int = 0) -> Moved:
    """Make an exchange and note its rate, unless it was of too few bytes to tell the link's bandwidth."""
    local = member.local
    began = time.monotonic()
    moved = call()
    if local.instance.device.type == "cuda":
        torch.cuda.synchronize(local.instance.device)  # else it is only on its way
    if moved.bytes >= least_bytes:
        local.exchanges.add(moved.bytes, time.monotonic() - began)
    member.costs.peak_bytes = max(member.costs.peak_bytes, moved.peak_bytes)
    return moved


class _Scratch:
    """Memory to send, outside the pool."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self._bytes[begin:end]

    def put(self, begin: int, source: torch.Tensor) -> None:
        self._bytes[begin : begin + len(source)] = source

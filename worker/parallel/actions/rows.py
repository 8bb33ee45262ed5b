"""What members of a group send each other, measured; and the FFN rows that they miss when it parts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.distributed.all_gather import all_gather
from worker.distributed.kv_exchange import Moved
from worker.distributed.messages import PartingBegins
from worker.parallel.filling import Fetching, Filling, Rows
from worker.parallel.member import Member


def coming(member: Member, action: PartingBegins) -> Rows:
    """Those that the low degree needs, as the leader has chosen for all. The formation is that of the
    parting."""
    place, shard = member.place, member.formation.low_shard(member.rank)
    if not action.is_from_peers:
        return Filling(place.weights, shard, place.num_layers, place.copier)
    return Fetching(
        place.weights,
        shard,
        place.num_layers,
        ahead=action.layers_per_step,
        gather=lambda layer: _gather(member, layer),
        clock=member.clock,
    )


def exchanged(member: Member, call: Callable[[], Moved], *, least_bytes: int = 0) -> Moved:
    """Do it, and note how long its bytes took if there were so many: a few tell of the calls, not of the
    way."""
    place = member.place
    began = member.clock()
    moved = call()
    if place.instance.device.type == "cuda":
        torch.cuda.synchronize(place.instance.device)  # else it is only on its way
    if moved.bytes >= least_bytes:
        place.exchanges.add(moved.bytes, member.clock() - began)
    member.costs.peak_bytes = max(member.costs.peak_bytes, moved.peak_bytes)
    return moved


def get_to_know(member: Member, *, is_probed: bool) -> None:
    """What the choice is made by, where nothing has told it yet: what a copy of the host's takes before the
    first, beside the steps; and how fast all send each other, if the leader asks for it. Raises PeerLost."""
    place = member.place
    if not place.copier.rate.bytes_per_s:
        place.copier.start(place.weights.rehearsal())
    if is_probed:
        _probe(member)


def _probe(member: Member) -> None:
    """Send each other what fits into a stage."""
    group, stage_bytes = member.high, member.place.stage_bytes
    each = max(1, stage_bytes // (2 * group.size))
    scratch = _Scratch(group.size * each, member.place.instance.device)
    parts = [[(rank * each, (rank + 1) * each)] for rank in range(group.size)]

    def send() -> Moved:
        return all_gather(scratch, parts, group, range(group.size), stage_bytes)

    send()  # makes what the way needs, which takes longer than to use it
    exchanged(member, send)


def _gather(member: Member, layer: int) -> None:
    """The pages that `Fetching` mapped get what the peers have in theirs. Raises PeerLost and
    WrongVariant."""
    formation, weights = member.formation, member.place.weights
    peers = formation.peers(member.rank)
    parts = [weights.spans(layer, formation.high_shard(peer)) for peer in peers]
    stage_bytes = member.place.stage_bytes
    exchanged(member, lambda: all_gather(weights.ffn(layer), parts, member.high, peers, stage_bytes))


class _Scratch:
    """Memory that belongs to nobody."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self._bytes[begin:end]

    def put(self, begin: int, source: torch.Tensor) -> None:
        self._bytes[begin : begin + len(source)] = source

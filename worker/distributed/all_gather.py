"""Every rank has a part of something and gets the others', in stages: the FFN's rows of a group that parts.

The peers of a rank, those with its low shard, have all that it needs byte for byte, in the same variant and
at the same places. What one sends goes to all of its peers alike, so an outbox holds it once; as messages it
goes out once for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from worker.distributed.carriers import Outboxes, outboxes_of
from worker.distributed.communicator import Communicator
from worker.distributed.kv_exchange import Moved
from worker.shape.checks import ROW_BYTES
from worker.shape.copies import ByteSpan


class Memory(Protocol):
    """Bytes by their places; `worker.shape.checks.CheckedPages` has a layer's."""

    def read(self, begin: int, end: int) -> torch.Tensor: ...

    def put(self, begin: int, source: torch.Tensor) -> None: ...


def all_gather(
    memory: Memory,
    parts: Sequence[Sequence[ByteSpan]],
    group: Communicator,
    peers: Sequence[int],
    stage_bytes: int,
) -> Moved:
    """Every rank of `group` must call it, those with other peers too.

    ==============  ====================================================================================
    memory          of this rank: its own part is there, the others' are put
    parts[j]        places of what peers[j] has. All ranks' are as long, rounded up to rows of `row_sums`,
                    but for one that may be shorter
    peers           ranks in `group` that share parts, ascending, with this one
    stage_bytes     bound of a stage's buffers
    ==============  ====================================================================================

    Raises PeerLost, and what `put` raises; then some of it may be put.
    """
    own, n = list(peers).index(group.rank), len(peers)
    longest = max(end - begin for begin, end in ((0, _length(part)) for part in parts))
    if n == 1 or not longest:
        return Moved(0, 0, 0)
    first = parts[own][0]
    device = memory.read(first[0], first[0] + 1).device
    carrier = _carrier_for(device, group, peers, stage_bytes)
    stages = range(0, longest, carrier.per_stage)
    num_bytes = 0
    for begin in stages:
        cuts = [list(_cut(part, begin, begin + carrier.per_stage)) for part in parts]
        came = carrier.round([memory.read(*span) for span in cuts[own]], [_length(cut) for cut in cuts])
        for j, cut in enumerate(cuts):
            if j != own:
                num_bytes += _put(memory, cut, came[j])
    return Moved(num_bytes, len(stages), carrier.nbytes)


def _put(memory: Memory, spans: Sequence[ByteSpan], source: torch.Tensor) -> int:
    at = 0
    for begin, end in spans:
        memory.put(begin, source[at : at + end - begin])
        at += end - begin
    return at


def _length(spans: Sequence[ByteSpan]) -> int:
    return sum(end - begin for begin, end in spans)


def _cut(spans: Sequence[ByteSpan], first: int, last: int) -> Iterator[ByteSpan]:
    """Bytes first <= i < last of the spans one behind the other."""
    at = 0
    for begin, end in spans:
        start, stop = max(begin, begin + first - at), min(end, begin + last - at)
        if start < stop:
            yield start, stop
        at += end - begin


# ------------------------------------------------------------------------------------- the ways


class _Carrier(Protocol):
    per_stage: int  # bytes of each part
    nbytes: int  # of memory that it takes

    def round(self, mine: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        """Send `mine` to all peers.

        Returns what each peer sent, valid until the next round (this rank's own entry is undefined). sizes:
        bytes of each peer's part. Raises PeerLost.
        """


class _ByOutboxes:
    def __init__(self, boxes: Outboxes, group: Communicator, peers: Sequence[int], per_stage: int) -> None:
        self._boxes, self._group, self._peers = boxes, group, peers
        self.per_stage, self.nbytes = per_stage, 2 * boxes.nbytes

    def round(self, mine: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        at, box = 0, self._boxes.own
        for piece in mine:
            box[at : at + len(piece)].copy_(piece)
            at += len(piece)
        filled = self._boxes.turn(self._group)
        return [filled[peer][:size] for peer, size in zip(self._peers, sizes, strict=True)]


class _ByMessages:
    def __init__(
        self, device: torch.device, group: Communicator, peers: Sequence[int], per_stage: int
    ) -> None:
        self._group, self._peers = group, peers
        self._sent = torch.empty((len(peers) - 1) * per_stage, dtype=torch.uint8, device=device)
        self._received = torch.empty_like(self._sent)
        self.per_stage, self.nbytes = per_stage, 2 * len(self._sent)

    def round(self, mine: Sequence[torch.Tensor], sizes: Sequence[int]) -> list[torch.Tensor]:
        group, peers = self._group, self._peers
        of_each = [0 if peer == group.rank else size for peer, size in zip(peers, sizes, strict=True)]
        times, length = len(peers) - 1, sum(map(len, mine))
        sent, received = self._sent[: times * length], self._received[: sum(of_each)]
        if length:
            torch.cat([*mine] * times, out=sent)
        come, out = [0] * group.size, [0] * group.size
        for peer, size in zip(peers, of_each, strict=True):
            come[peer], out[peer] = size, 0 if peer == group.rank else length
        group.all_to_all(received, sent, come, out)
        return list(received.split(of_each))


def _carrier_for(
    device: torch.device, group: Communicator, peers: Sequence[int], stage_bytes: int
) -> _Carrier:
    """Stages end with rows of `row_sums`."""
    if device.type == "cpu":
        per_stage = _whole_rows(stage_bytes // 2)
        if boxes := outboxes_of(group, per_stage):
            return _ByOutboxes(boxes, group, peers, per_stage)
    return _ByMessages(device, group, peers, _whole_rows(stage_bytes // (2 * (len(peers) - 1))))


def _whole_rows(nbytes: int) -> int:
    return max(1, nbytes // ROW_BYTES) * ROW_BYTES

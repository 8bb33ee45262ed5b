"""An all-gather in stages, of the FFN's rows of a group that splits."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from worker.distributed.carriers import carrier_for
from worker.distributed.communicator import Communicator
from worker.distributed.kv_exchange import Moved
from worker.shape.checks import ROW_BYTES
from worker.shape.copier import ByteSpan


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
    """Put the others' parts into `memory`, in stages; every rank of `group` must call it.

    parts[j]: places of what peers[j] has; all have as many bytes, rounded up to rows of `row_sums`, but for
    one that may have fewer. peers: ranks in `group` that share parts, ascending, with this one. stage_bytes:
    bound of a stage's buffers. Raises PeerLost, and what `put` raises; then some of it may be put.
    """
    own, n = list(peers).index(group.rank), len(peers)
    longest = max(map(_length, parts))
    if n == 1 or not longest:
        return Moved(0, 0, 0)
    first = parts[own][0][0]
    carrier = carrier_for(
        memory.read(first, first + 1).device, group, peers, stage_bytes, ROW_BYTES, is_alike=True
    )
    stages = range(0, longest, carrier.per_peer)
    num_bytes = 0
    for begin in stages:
        cuts = [list(_cut(part, begin, begin + carrier.per_peer)) for part in parts]
        come = [0 if j == own else _length(cut) for j, cut in enumerate(cuts)]
        out = [0 if j == own else _length(cuts[own]) for j in range(n)]
        came = carrier.trade(out, come, functools.partial(_read, memory, cuts[own]))
        for cut, source in zip(cuts, came, strict=True):
            if len(source):
                _put(memory, cut, source)
        num_bytes += sum(come)
    return Moved(num_bytes, len(stages), carrier.nbytes)


def _read(memory: Memory, spans: Sequence[ByteSpan], _peer: int, out: torch.Tensor) -> None:
    torch.cat([memory.read(*span) for span in spans], out=out)


def _put(memory: Memory, spans: Sequence[ByteSpan], source: torch.Tensor) -> None:
    pieces = source.split([end - begin for begin, end in spans])
    for (begin, _), piece in zip(spans, pieces, strict=True):
        memory.put(begin, piece)


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

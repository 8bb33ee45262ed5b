"""The KV cache of one layer changes its tensor-parallel degree: a transposition in place, in stages.

n subgroups of degree d are together one group of degree n*d. Heads are outermost within a block, so block c
of a subgroup is n sub-blocks at the same addresses, numbered c*n .. c*n + n-1 by the group; sub-block c*n + g
has the heads of subgroup g's members. What each rank needs lies with the others (the rank of subgroup r, the
rank of subgroup g, both with the same low shard):

::

    at r: sub-block c*n + g   <->   at g: sub-block c*n + r

Afterwards every rank has its own heads of every subgroup's block c: of subgroup j's as number c*n + j. The
same call takes it back. Each stage fills the places that it sent away, so no page is mapped, nothing is moved
up afterwards, and the only memory it takes is the stage's (Gyges §4.1.2: in-place, phased migration).

Where there are fewer KV heads than ranks, several ranks have the same one. A subgroup's block is then only
m < n sub-blocks, and r = n / m ranks need each: the rank of subgroup g has sub-block p(g) = g // r of every
block. Places differ before and after::

    to the group's degree     sub-block c*m + p(g)  at r   ->   c*n + r  at g       to each that needs it
    back                      c*n + g  at r   ->   c*m + p(r)  at g                 from one that has it

Blocks take more room in the group, so they spread from the last to the first, and come back from the first to
the last: a stage then overwrites nothing that a later one reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker.distributed.carriers import carrier_for
from worker.distributed.communicator import Communicator

_WORD = torch.int64  # rows are moved as words: torch scatters bytes one by one, 8 times slower
Rows = npt.NDArray[np.int64]
Places = list[Rows]  # rows of this rank, by subgroup; none of its own


@dataclass(frozen=True, slots=True)
class _Stage:
    """The rows of this rank that one stage sends and fills, and those that move within it (from, to)."""

    out: Places
    come: Places
    moves: tuple[Rows, Rows]


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes sent by one rank, stages, and the most memory taken besides the cache."""

    bytes: int
    stages: int
    peak_bytes: int


def exchange(
    layer: torch.Tensor,
    live: Sequence[Sequence[int]],
    subgroup: int,
    group: Communicator,
    peers: Sequence[int],
    stage_bytes: int,
    grows: bool | None = None,
    parts: int = 0,
) -> Moved:
    """Exchange sub-blocks of the live blocks with the other subgroups; every rank of `group` must call it.

    ==============  ====================================================================================
    layer           [blocks * m, heads, 2, block_tokens, D]: `KVCache.layers_at` the group's degree
    live[j]         subgroup j's blocks in use, in its own numbers; the same on every rank. What lies in the
                    others is undefined afterwards
    subgroup        of this rank
    peers[j]        the rank in `group` with this rank's low shard in subgroup j, ascending
    stage_bytes     bound of a stage's buffers; one block goes at a time where that alone takes more
    grows           to the group's degree (True) or back (False), which says who needs a block that is live in
                    one of two subgroups only. None: it goes both ways, twice the bytes for such a block, and
                    not where ranks have the same heads
    parts           m: how many sub-blocks a subgroup's block is, where there are fewer than n
    ==============  ====================================================================================

    Every live block's number must have memory on every rank. Raises PeerLost: then this rank has written
    whole stages only, and which of them the others completed is unknown. Raises ValueError for what does not
    fit together.
    """
    n = len(live)
    parts = parts or n
    _check(layer, live, subgroup, group, peers)
    if n % parts or (parts < n and grows is None):
        raise ValueError(f"blocks of {parts} parts go to {n} subgroups one way at a time, and evenly")
    if n == 1 or not any(live):
        return Moved(0, 0, 0)
    rows = layer.view(layer.shape[0], -1).view(_WORD)
    row_bytes = rows.shape[1] * _WORD.itemsize
    carrier = carrier_for(rows.device, group, peers, stage_bytes, row_bytes)
    stages = list(_stages(live, subgroup, carrier.per_peer // row_bytes, grows, parts))
    num_bytes = most_moved = 0
    for stage in stages:
        sent, awaited = ([len(places) * row_bytes for places in way] for way in (stage.out, stage.come))
        moved = rows[torch.from_numpy(stage.moves[0]).to(rows.device)]  # before these places are filled
        received = carrier.trade(sent, awaited, functools.partial(_take, rows, stage.out))
        for places, source in zip(stage.come, received, strict=True):
            if len(places):
                _put(rows, places, source.view(_WORD).view(len(places), -1))
        if len(moved):
            _put(rows, stage.moves[1], moved)
        num_bytes, most_moved = num_bytes + sum(sent), max(most_moved, moved.nbytes)
    return Moved(num_bytes, len(stages), carrier.nbytes + most_moved)


def _take(rows: torch.Tensor, out: Places, peer: int, buffer: torch.Tensor) -> None:
    index = torch.from_numpy(out[peer]).to(rows.device)
    torch.index_select(rows, 0, index, out=buffer.view(_WORD).view(len(index), -1))


def _put(rows: torch.Tensor, places: npt.NDArray[np.int64], source: torch.Tensor) -> None:
    if rows.device.type == "cpu":
        rows.numpy()[places] = source.numpy()  # a row at once; torch goes word by word, 1.6 times as long
    else:
        rows.index_copy_(0, torch.from_numpy(places).to(rows.device), source)


def _stages(
    live: Sequence[Sequence[int]], subgroup: int, per_stage: int, grows: bool | None, parts: int
) -> Iterator[_Stage]:
    """Yield the stages: of the same blocks on every rank, so that all call alike."""
    n, sharing = len(live), len(live) // parts
    blocks = np.unique(np.concatenate([np.asarray(part, np.int64) for part in live]))
    is_live = [np.isin(blocks, np.asarray(part, np.int64)) for part in live]
    up, down, own = grows is not False, grows is not True, subgroup // sharing

    def both(rising: Rows, falling: Rows, is_source: bool) -> Rows:
        """Return the rows that go either way; where both do, they are in the same places."""
        if up and down:
            return np.union1d(rising, falling)
        return rising if up else falling if is_source else falling[:0]

    def stage_of(stage: slice) -> _Stage:
        mine = blocks[stage][is_live[subgroup][stage]]
        out, come = list[Rows](), list[Rows]()
        for other, live_there in enumerate(is_live):
            theirs, of_other = blocks[stage][live_there[stage]], other // sharing
            # On the way back each rank that has a head sends it to one in `sharing` of those without it.
            is_source = of_other != own and other % sharing == subgroup % sharing
            out.append(both(mine * parts + of_other, theirs * n + other, is_source))
            come.append(both(theirs * n + other, mine * parts + of_other, is_source))
        out[subgroup] = come[subgroup] = blocks[:0]
        low, high = mine * parts + own, mine * n + subgroup
        if sharing == 1:
            low, high = low[:0], high[:0]  # they are the same places
        return _Stage(out, come, (low, high) if up else (high, low))

    starts = range(0, len(blocks), per_stage)
    for first in reversed(starts) if up and sharing > 1 else starts:
        yield stage_of(slice(first, first + per_stage))


def _check(
    layer: torch.Tensor,
    live: Sequence[Sequence[int]],
    subgroup: int,
    group: Communicator,
    peers: Sequence[int],
) -> None:
    n, highest = len(live), max((max(part) for part in live if part), default=-1)
    if len(peers) != n or not 0 <= subgroup < n or peers[subgroup] != group.rank:
        raise ValueError(f"rank {group.rank} is not the one of subgroup {subgroup} among the peers {peers}")
    if list(peers) != sorted(set(peers)) or peers[-1] >= group.size:
        raise ValueError(f"peers must be ascending ranks below {group.size}, not {list(peers)}")
    if min((min(part) for part in live if part), default=0) < 0 or (highest + 1) * n > layer.shape[0]:
        raise ValueError(
            f"live blocks up to {highest} of {n} subgroups; the layer has {layer.shape[0] // n} of each"
        )
    if not layer.is_contiguous() or layer[0].nbytes % _WORD.itemsize:
        raise ValueError(
            f"a layer of shape {tuple(layer.shape)} and strides {layer.stride()} has no contiguous rows of"
            f" whole {_WORD}; only the header-centric layout can be exchanged in place"
        )

"""KV from 4 x TP1 to TP4 at 90 % use: in place, against migrating and trimming (Gyges §4.1.2, Figure 5).

In place: `worker.distributed.kv_exchange` over a header-centric cache; rows sent make room for rows received.
Migrate and trim: the cache is page-friendly, [block, K/V, token, head, dim]. Heads of the other ranks are
packed piece by piece and sent; what comes lands in pages mapped for it; then the cache is full of holes, so
the heads that stay are moved up, piece by piece, and the pages after them unmapped. It gets compiled loops
and pages that are not zeroed, and receives straight to where blocks stay. In stages, its packing takes no
more memory than ours. Both go through sockets and through the engine's outboxes, and are compared alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from bench.common.engines import take_turns_by_layer
from bench.transform.ranks import Timed, through_sockets, timed
from worker.distributed.carriers import Outboxes
from worker.distributed.communicator import Communicator
from worker.distributed.kv_exchange import exchange
from worker.memory import CpuBackend, KVCache, PagePool

PAGE_BYTES = 64 * 1024
USE = 0.9
STAGES = tuple(n << 20 for n in (2, 4, 8, 12, 16, 32))
SWEEPS = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one layer's cache on one rank, in float32."""

    blocks: int = 1536
    heads: int = 8
    block_tokens: int = 16
    head_dim: int = 64

    @property
    def block_bytes(self) -> int:
        return 2 * self.heads * self.block_tokens * self.head_dim * 4


@dataclass(frozen=True, slots=True)
class KVTimes:
    time: Timed
    extra_bytes: int  # most memory besides the cache's own pages
    bytes: int  # sent


def measure(group: Communicator, sizes: Sizes, layers: int, rounds: int, stage_bytes: int) -> dict[str, Any]:
    """Return on one rank what each layer took in each round, by way, and the times by the size of a stage."""
    live = _live(sizes, group.size)
    pool = PagePool(CpuBackend(PAGE_BYTES), 4 * layers * sizes.blocks * sizes.block_bytes)
    ours, theirs = InPlace(pool, sizes, layers, group, live), Trimmed(pool, sizes, group, live)
    boxes = Outboxes(group, stage_bytes // 2)
    ways: dict[str, Callable[[int], KVTimes]] = {
        "in place": lambda layer: ours.exchange(layer, stage_bytes),
        "in place, through sockets": lambda layer: ours.exchange_through_sockets(layer, stage_bytes),
        "migrate and trim": lambda layer: theirs.migrate(1 << 40),
        "migrate and trim, in stages": lambda layer: theirs.migrate(stage_bytes),
        "migrate and trim, by outboxes": lambda layer: theirs.migrate(stage_bytes // 2, boxes),
    }
    took = take_turns_by_layer(ways, layers, rounds)
    sweep = {
        size: [ours.exchange(layer, size).time for _ in range(SWEEPS) for layer in range(layers)]
        for size in STAGES
    }
    ours.release()
    pool.check_integrity()
    pool.close()
    return {"took": took, "sweep": sweep}


def _live(sizes: Sizes, n: int) -> list[list[int]]:
    """Return the blocks in use on each rank, scattered among the free ones."""
    return [
        sorted(random.Random(rank).sample(range(sizes.blocks), int(USE * sizes.blocks))) for rank in range(n)
    ]


def _mark(rank: int, block: int, head: int) -> float:
    return float(10_000 * rank + 10 * block + head)


class InPlace:
    """The engine's exchange, over a cache of several layers."""

    def __init__(
        self, pool: PagePool, sizes: Sizes, layers: int, group: Communicator, live: list[list[int]]
    ) -> None:
        self._sizes, self._group, self._live, self._pool = sizes, group, live, pool
        self._is_high = [False] * layers
        self.cache = KVCache(
            pool,
            num_layers=layers,
            num_kv_heads=sizes.heads,
            head_dim=sizes.head_dim,
            block_tokens=sizes.block_tokens,
            dtype=torch.float32,
            max_blocks=sizes.blocks,
            owner="bench",
        )
        self.cache.grow(self.cache.pages_for(sizes.blocks))
        for layer in self.cache.layers:
            for block in range(sizes.blocks):
                for head in range(sizes.heads):
                    layer[block, head] = _mark(group.rank, block, head)

    def exchange(self, layer: int, stage_bytes: int) -> KVTimes:
        """Exchange a layer up, or down if it is up; both ways move as many bytes."""
        grows = not self._is_high[layer]
        group, high = self._group, self.cache.layers_at(self._group.size)[layer]
        used = self._pool.counts().kv
        time, moved = timed(
            group,
            lambda: exchange(high, self._live, group.rank, group, range(group.size), stage_bytes, grows),
        )
        extra = moved.peak_bytes + (self._pool.counts().kv - used) * PAGE_BYTES
        self._is_high[layer] = grows
        self._check(layer, high)
        return KVTimes(time, extra, moved.bytes)

    def exchange_through_sockets(self, layer: int, stage_bytes: int) -> KVTimes:
        """Do the same with messages, as the other ways send."""
        with through_sockets(self._group):
            return self.exchange(layer, stage_bytes)

    def _check(self, layer: int, high: torch.Tensor) -> None:
        rank, n, each = self._group.rank, self._group.size, self._sizes.heads // self._group.size
        for j in range(n):
            block = self._live[j][-1]
            if self._is_high[layer]:
                held, wanted = high[block * n + j, 0], _mark(j, block, rank * each)
            else:
                block = self._live[rank][-1]
                held, wanted = self.cache.layers[layer][block, j], _mark(rank, block, j)
            if not bool((held == wanted).all()):
                raise RuntimeError(f"rank {rank}: block {block} of rank {j} is not what it was")

    def release(self) -> None:
        self.cache.release()


class Trimmed:
    """Migrating and trimming one layer, which is mapped and filled again each time."""

    def __init__(self, pool: PagePool, sizes: Sizes, group: Communicator, live: list[list[int]]) -> None:
        self._pool, self._sizes, self._group, self._live = pool, sizes, group, live
        self._part_bytes = sizes.block_bytes // group.size

    def migrate(self, stage_bytes: int, boxes: Outboxes | None = None) -> KVTimes:
        """Migrate the layer, packing at most `stage_bytes` at once, through the boxes or else sockets."""
        sizes, pool = self._sizes, self._pool
        held = pool.pages_for(sizes.blocks * sizes.block_bytes)
        # Addresses after the cache for the most that can come: they cost nothing.
        space = pool.reserve(3 * held * PAGE_BYTES, kind="kv", owner="bench, to be trimmed")
        space.map(0, held)
        shape = (sizes.blocks, 2 * sizes.block_tokens, sizes.heads, sizes.head_dim)
        cache = space.tensor(torch.float32, shape)
        for block in range(sizes.blocks):
            for head in range(sizes.heads):
                cache[block, :, head] = _mark(self._group.rank, block, head)
        time, (packed, came) = timed(self._group, lambda: self._run(space, cache, held, stage_bytes, boxes))
        self._check(space, held)
        space.release()
        sent = (self._group.size - 1) * len(self._live[self._group.rank]) * self._part_bytes
        return KVTimes(time, packed + came * PAGE_BYTES, sent)

    def _run(
        self, space: Any, cache: torch.Tensor, held: int, stage_bytes: int, boxes: Outboxes | None
    ) -> tuple[int, int]:
        rank, n = self._group.rank, self._group.size
        arriving = sum(len(part) for part in self._live) - len(self._live[rank])
        came = self._pool.pages_for(arriving * self._part_bytes)
        space.map(held, came, zeroed=False)
        width = self._sizes.heads // n * self._sizes.head_dim
        arrived = space.tensor(
            torch.float32,
            (arriving, 2 * self._sizes.block_tokens * width),
            offset_bytes=held * PAGE_BYTES,
        )
        pieces = cache.flatten(2).numpy()
        packed = 2 * boxes.nbytes if boxes else 0
        first = 0
        for stage in self._stages(stage_bytes):
            out_bytes = (n - 1) * len(stage[rank]) * self._part_bytes
            out = boxes.own[:out_bytes] if boxes else torch.empty(out_bytes, dtype=torch.uint8)
            packed = max(packed, out_bytes)
            out = out.view(torch.float32).view(-1, arrived.shape[1])
            self._pack(pieces, stage[rank], out, width)
            end = first + sum(map(len, stage)) - len(stage[rank])
            self._carry(stage, out, arrived[first:end], boxes)
            first = end
        mine = np.asarray(self._live[rank])
        front = cache.view(-1).numpy()
        _trim(pieces, mine, rank * width, front[: len(mine) * arrived.shape[1]].reshape(len(mine), -1, width))
        kept = self._pool.pages_for(len(mine) * self._part_bytes)
        space.unmap(kept, held - kept)
        return packed, came

    def _carry(
        self,
        stage: list[npt.NDArray[np.int64]],
        out: torch.Tensor,
        arrived: torch.Tensor,
        boxes: Outboxes | None,
    ) -> None:
        """Send a stage; `arrived` gets the parts of the other ranks' blocks, by rank."""
        rank, n = self._group.rank, self._group.size
        sizes_in = [0 if j == rank else len(stage[j]) for j in range(n)]
        if boxes is None:
            sizes_out = [0 if j == rank else len(stage[rank]) for j in range(n)]
            self._group.all_to_all(arrived, out, sizes_in, sizes_out)
            return
        filled = boxes.turn(self._group)
        for j, part in enumerate(arrived.split(sizes_in)):
            first = (rank - (rank > j)) * part.nbytes  # after what it packed for lower ranks
            part.view(-1).copy_(filled[j][first : first + part.nbytes].view(torch.float32))

    def _stages(self, stage_bytes: int) -> Iterator[list[npt.NDArray[np.int64]]]:
        n = self._group.size
        per_stage = max(1, stage_bytes // ((n - 1) * self._part_bytes))
        longest = max(len(part) for part in self._live)
        for first in range(0, longest, per_stage):
            yield [np.asarray(part[first : first + per_stage], np.int64) for part in self._live]

    def _pack(self, pieces: Any, blocks: npt.NDArray[np.int64], out: torch.Tensor, width: int) -> None:
        target = out.numpy().reshape(-1, len(blocks), pieces.shape[1], width)
        others = [j for j in range(self._group.size) if j != self._group.rank]
        for place, j in enumerate(others):
            _trim(pieces, blocks, j * width, target[place])

    def _check(self, space: Any, held: int) -> None:
        rank, n, sizes = self._group.rank, self._group.size, self._sizes
        each = sizes.heads // n
        shape = (1, 2 * sizes.block_tokens, each, sizes.head_dim)
        last = (len(self._live[rank]) - 1) * self._part_bytes
        kept = space.tensor(torch.float32, shape, offset_bytes=last)
        first = space.tensor(torch.float32, shape, offset_bytes=held * PAGE_BYTES)
        other = 0 if rank else 1
        for found, j, block in ((kept, rank, self._live[rank][-1]), (first, other, self._live[other][0])):
            if not bool((found[0, :, 0] == _mark(j, block, rank * each)).all()):
                raise RuntimeError(f"rank {rank}: block {block} of rank {j} is not what it was")


@njit(cache=True)  # type: ignore[untyped-decorator]
def _trim(pieces: Any, blocks: Any, start: int, target: Any) -> None:
    """Copy pieces [start, start + width) of each token of blocks[i] to target[i], which may precede them."""
    width = target.shape[2]
    for i in range(len(blocks)):
        for token in range(pieces.shape[1]):
            for k in range(width):
                target[i, token, k] = pieces[blocks[i], token, start + k]

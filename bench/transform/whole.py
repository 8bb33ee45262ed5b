"""The whole transformation, 4 x TP1 to TP4 with all layers at once, against going through shared host memory.

Ours: for each layer the FFN is narrowed by unmapping and the KV exchanged in place (what a group does between
two steps). Through host memory (Seesaw-like): every rank stops, writes its weights and live KV to /dev/shm,
frees its memory, maps what it has in the new shape and reads that. With `waiting`, the weights are not
written, since they lie in host memory already. Ways take turns, each from the same state.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.common.engines import take_turns
from bench.common.loading import load_model
from bench.transform.ranks import Timed, timed
from worker.distributed.communicator import Communicator
from worker.distributed.kv_exchange import exchange
from worker.memory import CpuBackend, KVCache, PagePool, VirtualRange
from worker.model.shard import Shard
from worker.morph.reshard import make_resharder
from worker.morph.variants import NoVariants

PAGE_BYTES = 64 * 1024
BLOCK_TOKENS = 16
ALONE = Shard()
OURS, THROUGH_HOST, WAITING = "in place", "through host memory", "the same, weights waiting there"


@dataclass(frozen=True, slots=True)
class WholeTimes:
    time: Timed
    weights_seconds: float  # part of this time for weights
    longest_layer: float  # cost of the longest step with one layer per step
    weight_bytes: int  # bytes of the rank before
    kv_bytes: int  # live, of the rank


def measure(
    group: Communicator, folder: Path, kv_bytes: int, use: float, rounds: int, stage_bytes: int, shm: Path
) -> dict[str, list[WholeTimes]]:
    """Return what each way took in each round on one rank.

    The share `use` of the cache's `kv_bytes` is live.
    """
    rank = _Rank(group, folder, kv_bytes, use, stage_bytes, shm)
    ways: dict[str, Callable[[], WholeTimes]] = {
        OURS: rank.in_place,
        THROUGH_HOST: lambda: rank.through_host(writes_weights=True),
        WAITING: lambda: rank.through_host(writes_weights=False),
    }
    took = take_turns(ways, rounds)
    rank.close()
    return took


class _Rank:
    def __init__(
        self, group: Communicator, folder: Path, kv_bytes: int, use: float, stage_bytes: int, shm: Path
    ) -> None:
        self._group, self._stage_bytes, self._shm = group, stage_bytes, shm
        self._pool = PagePool(CpuBackend(PAGE_BYTES), (4 << 30) + kv_bytes)
        self._model = load_model(folder, self._pool, dtype=torch.float32, max_tp=group.size)
        self._weights = make_resharder(self._model, self._pool, NoVariants())
        config = self._model.config
        self._cache = KVCache(
            self._pool,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=BLOCK_TOKENS,
            dtype=torch.float32,
            max_blocks=kv_bytes // config.kv_block_bytes(BLOCK_TOKENS, torch.float32),
            owner="bench",
        )
        self._cache.grow(self._cache.pages_for(self._cache.max_blocks))
        self._live = list(range(int(use * self._cache.num_blocks)))
        for i, layer in enumerate(self._cache.layers):
            layer[self._live] = float(100 * group.rank + i)

    def in_place(self) -> WholeTimes:
        group, shard = self._group, Shard(self._group.rank, self._group.size)
        layers = list(reversed(range(len(self._model.layers))))
        views = self._cache.layers_at(group.size)
        each: list[float] = []
        narrowing = 0.0

        def up() -> None:
            nonlocal narrowing
            for layer in layers:
                began = time.perf_counter()
                self._weights.narrow(layer, shard)
                narrowing += time.perf_counter() - began
                self._exchange(views[layer], grows=True)
                each.append(time.perf_counter() - began)

        took, _ = timed(group, up)
        self._check(views)
        for layer in layers:
            self._exchange(views[layer], grows=False)
            self._weights.map(layer, ALONE)
            self._weights.fill(layer, ALONE)(lambda: True)
            self._weights.widen(layer, ALONE)
        return WholeTimes(took, narrowing, max(each), self._weight_bytes(), self._kv_bytes())

    def through_host(self, *, writes_weights: bool) -> WholeTimes:
        group, pool = self._group, self._pool
        shard = Shard(group.rank, group.size)
        parts = list(self._parts(shard))
        with self._segment(parts) as (mine, of_all):
            if not writes_weights:
                self._write_weights(parts, mine)
            fresh = [pool.reserve(memory.nbytes, kind="weights", owner="bench") for memory, _ in parts]
            blocks = pool.reserve(len(self._live) * self._cache.block_bytes, kind="kv", owner="bench")
            kv = self._cache.layers

            def move() -> float:
                began = time.perf_counter()
                if writes_weights:
                    self._write_weights(parts, mine)
                weights_s = time.perf_counter() - began
                at = sum(memory.nbytes for memory, _ in parts)
                for layer in kv:
                    live = layer[: len(self._live)]
                    _copy(mine[at:], live)
                    at += live.nbytes
                group.all_reduce(torch.zeros(1))
                began = time.perf_counter()
                self._read_weights(parts, fresh, mine)
                weights_s += time.perf_counter() - began
                self._read_kv(of_all, blocks, sum(memory.nbytes for memory, _ in parts))
                return weights_s

            took, weights_s = timed(group, move)
            for memory in (*fresh, blocks):
                memory.release()
            group.all_reduce(torch.zeros(1))
        return WholeTimes(took, weights_s, took.seconds, self._weight_bytes(), self._kv_bytes())

    def close(self) -> None:
        self._cache.release()

    # ------------------------------------------------------------------------------- in place

    def _exchange(self, view: torch.Tensor, *, grows: bool) -> None:
        group = self._group
        live = [self._live] * group.size
        exchange(view, live, group.rank, group, range(group.size), self._stage_bytes, grows)

    def _check(self, views: Sequence[torch.Tensor]) -> None:
        for i, view in enumerate(views):
            for j in range(self._group.size):
                if not bool((view[self._live[-1] * self._group.size + j] == 100 * j + i).all()):
                    raise RuntimeError(f"layer {i}: the last block of rank {j} is not what it was")

    # ------------------------------------------------------------------------------- through host memory

    def _parts(self, shard: Shard) -> Iterator[tuple[VirtualRange, np.ndarray]]:
        """Yield every range of weights, and which of its pages the new shape has."""
        for layer, weights in enumerate(self._model.weights):
            plans = self._model.plan.layers[layer]
            for half, plan in zip((weights.attention, weights.feed_forward), plans, strict=True):
                yield half.memory, plan.at(shard).pages(PAGE_BYTES)

    @contextmanager
    def _segment(
        self, parts: Sequence[tuple[VirtualRange, np.ndarray]]
    ) -> Iterator[tuple[memoryview, list[memoryview]]]:
        """Yield this rank's part of shared memory and those of all ranks, and delete them afterwards."""
        group = self._group
        nbytes = sum(memory.nbytes for memory, _ in parts) + self._kv_bytes()
        own = self._shm / str(group.rank)
        with own.open("wb") as file:
            os.ftruncate(file.fileno(), nbytes)
        group.all_reduce(torch.zeros(1))
        maps = []
        for rank in range(group.size):
            with (self._shm / str(rank)).open("r+b") as file:
                maps.append(memoryview(mmap.mmap(file.fileno(), 0)))
        yield maps[group.rank], maps
        own.unlink()

    def _write_weights(self, parts: Sequence[tuple[VirtualRange, np.ndarray]], mine: memoryview) -> None:
        at = 0
        for memory, _ in parts:
            _copy(mine[at:], memory.tensor(torch.uint8, (memory.nbytes,)))
            at += memory.nbytes

    def _read_weights(
        self,
        parts: Sequence[tuple[VirtualRange, np.ndarray]],
        fresh: Sequence[VirtualRange],
        mine: memoryview,
    ) -> None:
        source = torch.frombuffer(mine, dtype=torch.uint8)
        at = 0
        for (memory, needed), target in zip(parts, fresh, strict=True):
            edges = np.flatnonzero(np.diff(needed, prepend=False, append=False))
            for first, end in edges.reshape(-1, 2).tolist():
                target.map(first, end - first)
                begin, stop = first * PAGE_BYTES, min(end * PAGE_BYTES, memory.nbytes)
                target.write(begin, source[at + begin : at + stop])
            at += memory.nbytes

    def _read_kv(self, of_all: Sequence[memoryview], blocks: VirtualRange, skipped: int) -> None:
        """Read this rank's heads of all ranks' blocks, layer by layer, into memory that was freed before."""
        rank, n = self._group.rank, self._group.size
        heads, *rest = self._cache.block_shape
        part = (len(self._live), n, heads // n, *rest)
        each = len(self._live) * self._cache.block_bytes
        for layer in range(self._cache.num_layers):
            blocks.map(0, blocks.num_pages)
            target = blocks.tensor(torch.float32, (n, len(self._live), heads // n, *rest))
            for j, source in enumerate(of_all):
                begin = skipped + layer * each
                seen = torch.frombuffer(source[begin : begin + each], dtype=torch.float32).view(part)
                target[j].copy_(seen[:, rank])
            if layer + 1 < self._cache.num_layers:
                blocks.unmap(0, blocks.num_pages)

    def _weight_bytes(self) -> int:
        return sum(memory.nbytes for memory, _ in self._parts(ALONE))

    def _kv_bytes(self) -> int:
        return len(self._live) * self._cache.block_bytes * self._cache.num_layers


def _copy(target: memoryview, source: torch.Tensor) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    ctypes.memmove(address, source.data_ptr(), source.nbytes)

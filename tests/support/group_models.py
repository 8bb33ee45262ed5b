"""Ranks of one process, a thread each: models that run alone, or as groups, or as both at a boundary.

Ranks are numbered by their shards at the high degree, N of them. Low shard s of subgroup j is rank s * n + j,
with n subgroups; block c of a rank is c * degree + its shard in a group's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore, PrefixStore

from kernels import AttentionPlan
from tests.support.model_folders import Runner
from worker.distributed.communicator import Communicator, connect
from worker.model import Segment, Shard
from worker.model.layer import build_attention, build_feed_forward
from worker.model.weights import tensors_of

T = TypeVar("T")
Chunks = dict[int, list[int]]  # sequence -> its next tokens
TIMEOUT_S = 30.0


@dataclass
class Rank:
    """`twin` runs the same requests alone, in the same blocks: the oracle."""

    runner: Runner
    twin: Runner
    groups: dict[int, Communicator] = field(default_factory=dict)  # degree -> the group it is in

    def shard(self, degree: int) -> Shard:
        return Shard(self.groups[degree].rank, degree) if degree > 1 else Shard()


class Ranks:
    """`low` is the lower of the two degrees; the higher is all of them."""

    def __init__(self, folder: Path, size: int, low: int = 1, **load: Any) -> None:
        self.size, self.low, self.subgroups = size, low, size // low
        load = {"max_tp": 4} | load
        self.ranks = [Rank(Runner(folder, **load), Runner(folder, **load)) for _ in range(size)]
        self.num_layers = len(self.ranks[0].runner.model.layers)
        self._connect()
        self.reshape(0, is_rising=True)

    def use_degrees(self, boundary: int, *, is_rising: bool) -> None:
        """Layers [0, boundary) are at the degree that is left, the others at the new one."""
        self.boundary = boundary
        self.degrees = (self.low, self.size) if is_rising else (self.size, self.low)

    def reshape(self, boundary: int, *, is_rising: bool) -> None:
        """Brings the layers there; new views of the same memory."""
        self.use_degrees(boundary, is_rising=is_rising)
        for rank in self.ranks:
            model = rank.runner.model
            for i, layer in enumerate(model.layers):
                shard = rank.shard(self.degrees[i >= boundary])
                stored, window = model.weights[i], model.config.sliding_windows[i]
                layer.attention = build_attention(model.config, stored.attention.tensors, shard, window)
                plan = model.plan.layers[i][1].at(shard)
                layer.feed_forward = build_feed_forward(
                    model.config, tensors_of(stored.feed_forward.memory, plan), shard=shard
                )
                layer.shard = shard

    def scatter(self) -> None:
        """Every rank gets its part of the keys and values that the twins have."""
        for h, rank in enumerate(self.ranks):
            for i, own in enumerate(self.expected_kv(h)):
                rank.runner.kv.layers[i].copy_(own.view(rank.runner.kv.layers[i].shape))

    def expected_kv(self, rank: int) -> list[torch.Tensor]:
        """Return what its cache holds when the twins' keys and values lie at the degree of each layer."""
        made = []
        for i in range(self.num_layers):
            shard = self.ranks[rank].shard(self.degrees[i >= self.boundary])
            members = self._members(rank, shard.size)
            wholes = [self.ranks[h].twin.kv.layers[i] for h in members]
            heads = shard.part(wholes[0].shape[1], "KV heads")
            made.append(torch.stack([whole[:, heads] for whole in wholes], 1).flatten(0, 1))
        return made

    def prefill(self, chunks: list[Chunks]) -> None:
        """Every rank alone, by its twin."""
        for rank, own in zip(self.ranks, chunks, strict=True):
            if own:
                rank.twin.step(own)
                rank.runner._plan(own)
        self.scatter()

    def step(
        self, chunks: list[Chunks], rows: list[list[int]] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(logits, the twin's logits) of each rank. rows: of its own tokens; default: each chunk's last."""
        rows = rows or [last_rows(own) for own in chunks]
        got = self.logits(chunks, rows)
        wanted = [
            rank.twin.step(own, mine) if own else torch.empty(0, got[0].shape[1])
            for rank, own, mine in zip(self.ranks, chunks, rows, strict=True)
        ]
        return list(zip(got, wanted, strict=True))

    def logits(
        self, chunks: list[Chunks], rows: list[list[int]], own: slice | None = None
    ) -> list[torch.Tensor]:
        """Return the logits of each rank. own: of the rows that all ask for; default: its own."""
        plans = [
            rank.runner._plan(own) if own else None for rank, own in zip(self.ranks, chunks, strict=True)
        ]

        def run(h: int) -> torch.Tensor:
            segments, token_ids, logit_rows, mine = self._inputs(h, chunks, plans, rows)
            rank = self.ranks[h]
            return rank.runner.model.forward_segments(
                token_ids, segments, rank.runner.kv, logit_rows, own or mine
            )

        return together(run, self.size)

    def close(self) -> None:
        for rank in self.ranks:
            for group in rank.groups.values():
                group.close()
            rank.runner.close()
            rank.twin.close()

    # ----------------------------------------------------------------------------- a step's parts

    def _inputs(
        self, h: int, chunks: list[Chunks], plans: list[AttentionPlan | None], rows: list[list[int]]
    ) -> tuple[list[Segment], torch.Tensor, torch.Tensor, slice]:
        segments = []
        for first, end, degree in self._runs():
            members = self._in_rows(self._members(h, degree))
            before = [m for m in range(self.size) if self._row_key(m) < self._row_key(members[0])]
            start = sum(num_tokens(chunks[m]) for m in before)
            segments.append(
                Segment(
                    first,
                    end,
                    self._merge(members, plans, degree),
                    degree,
                    self.ranks[h].groups.get(degree),
                    slice(start, start + sum(num_tokens(chunks[m]) for m in members)),
                    is_giver=h < self.subgroups,
                )
            )
        first_members, last_members = (self._in_rows(self._members(h, segments[at].degree)) for at in (0, -1))
        token_ids = [t for m in first_members for chunk in chunks[m].values() for t in chunk]
        logit_rows, own, at = list[int](), slice(0), 0
        for m in last_members:
            if m == h:
                own = slice(len(logit_rows), len(logit_rows) + len(rows[m]))
            logit_rows += [at + row for row in rows[m]]
            at += num_tokens(chunks[m])
        return segments, torch.tensor(token_ids, dtype=torch.int64), torch.tensor(logit_rows).long(), own

    def _runs(self) -> list[tuple[int, int, int]]:
        (first, last), b, end = self.degrees, self.boundary, self.num_layers
        return [run for run in ((0, b, first), (b, end, last)) if run[0] < run[1]]

    def _row_key(self, rank: int) -> tuple[int, int]:
        """The rows of a batch go subgroup by subgroup."""
        return rank % self.subgroups, rank // self.subgroups

    def _in_rows(self, members: list[int]) -> list[int]:
        return sorted(members, key=self._row_key)

    def _members(self, rank: int, degree: int) -> list[int]:
        """Return the members of its group, in the order of their shards there."""
        if degree == 1:
            return [rank]
        if degree == self.size:
            return list(range(self.size))
        return list(range(rank % self.subgroups, self.size, self.subgroups))

    def _merge(self, members: list[int], plans: list[AttentionPlan | None], degree: int) -> AttentionPlan:
        own = [(plan, self.ranks[m].shard(degree)) for m in members if (plan := plans[m])]
        return merge(own, self.ranks[0].runner.kv.block_tokens)

    def _connect(self) -> None:
        store = HashStore()
        for degree in {self.low, self.size} - {1}:

            def join(h: int, degree: int = degree) -> None:
                members = self._members(h, degree)
                prefix = PrefixStore(f"{degree} {members}", store)
                self.ranks[h].groups[degree] = connect(prefix, members.index(h), degree, timeout_s=TIMEOUT_S)

            together(join, self.size)


def merge(plans: list[tuple[AttentionPlan, Shard]], block_tokens: int) -> AttentionPlan:
    """One plan of all rows; block c of a shard is c * size + its rank."""
    if not plans:
        empty = torch.empty(0, dtype=torch.int64)
        return AttentionPlan(torch.zeros(1, dtype=torch.int32), empty, empty.view(0, 0), empty, empty, 0, 0)
    width = max(plan.block_table.shape[1] for plan, _ in plans)
    cu, tables, slots = [torch.zeros(1, dtype=torch.int32)], [], []
    for plan, shard in plans:
        cu.append(plan.cu_seqlens_q[1:] + cu[-1][-1])
        table = plan.block_table * shard.size + shard.rank
        tables.append(torch.nn.functional.pad(table, (0, width - table.shape[1])))
        block, offset = plan.slot_mapping // block_tokens, plan.slot_mapping % block_tokens
        slots.append((block * shard.size + shard.rank) * block_tokens + offset)
    return AttentionPlan(
        cu_seqlens_q=torch.cat(cu),
        context_lens=torch.cat([plan.context_lens for plan, _ in plans]),
        block_table=torch.cat(tables),
        slot_mapping=torch.cat(slots),
        positions=torch.cat([plan.positions for plan, _ in plans]),
        max_q_len=max(plan.max_q_len for plan, _ in plans),
        max_context_len=max(plan.max_context_len for plan, _ in plans),
    )


def together(call: Callable[[int], T], times: int) -> list[T]:
    """call(0), call(1), ... each in a thread of its own, as ranks would; what the first of them raises is
    raised."""
    with ThreadPoolExecutor(times) as pool:
        futures = [pool.submit(call, h) for h in range(times)]
        return [future.result(2 * TIMEOUT_S) for future in futures]


def num_tokens(chunks: Chunks) -> int:
    return sum(map(len, chunks.values()))


def last_rows(chunks: Chunks) -> list[int]:
    at, rows = 0, []
    for chunk in chunks.values():
        at += len(chunk)
        rows.append(at - 1)
    return rows

"""Steps of a model over a paged cache, and its pool of pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bench.common.loading import load_model
from bus.precisions import KVPrecision
from kernels import AttentionPlan
from worker.memory import CpuBackend, KVCache, PagePool
from worker.model import Model


def make_pool(megabytes: int = 8, page_bytes: int = 4096) -> PagePool:
    return PagePool(CpuBackend(page_bytes), megabytes * 1024 * 1024)


class Runner:
    """Runs steps of a model over a paged cache whose blocks are handed out in a shuffled order."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        block_tokens: int = 5,
        kv_precision: KVPrecision = "full",
        **load: Any,
    ) -> None:
        self.pool = make_pool()
        self.model: Model = load_model(folder, self.pool, dtype=dtype, **load)
        config = self.model.config
        self.kv = KVCache(
            self.pool,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
            max_blocks=128,
            owner="test",
            precision=kv_precision,
        )
        self.kv.grow(self.kv.pages_for(128))
        for layer in self.kv.layers:
            # Whatever is read without having been written shows; as codes it is 127 times 3e38.
            layer.fill_(torch.nan if kv_precision == "full" else 127)
        order = torch.randperm(128, generator=torch.Generator().manual_seed(1)).tolist()
        self._unused = [block for block in order if block < self.kv.num_blocks]
        self._blocks: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, chunks: dict[int, list[int]], rows: list[int] | None = None) -> torch.Tensor:
        """Feed each sequence its next tokens; logits of `rows` (default: of every token), in float32."""
        token_ids = [token for chunk in chunks.values() for token in chunk]
        plan = self._plan(chunks)
        wanted = list(range(len(token_ids))) if rows is None else rows
        return self.model.forward(
            torch.tensor(token_ids), plan, self.kv, torch.tensor(wanted, dtype=torch.int64)
        )

    def close(self) -> None:
        self.kv.release()
        self.model.release()
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_pages
        self.pool.close()

    def _plan(self, chunks: dict[int, list[int]]) -> AttentionPlan:
        size = self.kv.block_tokens
        cu, contexts, tables, slots, positions = [0], [], [], [], list[int]()
        for seq, tokens in chunks.items():
            start = self._lengths.get(seq, 0)
            end = self._lengths[seq] = start + len(tokens)
            blocks = self._blocks.setdefault(seq, [])
            while len(blocks) * size < end:
                blocks.append(self._unused.pop())
            cu.append(cu[-1] + len(tokens))
            contexts.append(end)
            tables.append(blocks)
            positions += range(start, end)
            slots += [blocks[p // size] * size + p % size for p in range(start, end)]
        width = max(map(len, tables))
        return AttentionPlan(
            cu_seqlens_q=torch.tensor(cu, dtype=torch.int32),
            context_lens=torch.tensor(contexts, dtype=torch.int32),
            block_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            positions=torch.tensor(positions),
            max_q_len=max(len(tokens) for tokens in chunks.values()),
            max_context_len=max(contexts),
        )

"""Attention of steps of an 8B model on a device: its input, and what it gives by plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels import AttentionPlan

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 32, 8, 128, 16


def attention_of(
    device: torch.device, lengths: Sequence[tuple[int, int]], copies: int
) -> tuple[list[AttentionPlan], torch.Tensor, torch.Tensor]:
    """Return a plan for each of the copies of the sequences' blocks, queries and a cache in any order."""
    counts = [-(-context // BLOCK_TOKENS) for _, context in lengths]
    each, widest = sum(counts), max(counts)
    order = torch.randperm(copies * each, dtype=torch.int32)
    plans = []
    for copy in range(copies):
        own = order[copy * each : (copy + 1) * each].split(counts)
        table = torch.stack([torch.nn.functional.pad(row, (0, widest - len(row))) for row in own])
        new = torch.tensor([0, *(length for length, _ in lengths)], dtype=torch.int32)
        unused = torch.zeros(0, dtype=torch.int64, device=device)
        plans.append(
            AttentionPlan(
                cu_seqlens_q=new.cumsum(0, dtype=torch.int32).to(device),
                context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32).to(device),
                block_table=table.to(device),
                slot_mapping=unused,
                positions=unused,
                max_q_len=max(length for length, _ in lengths),
                max_context_len=max(context for _, context in lengths),
            )
        )
    tokens = sum(length for length, _ in lengths)
    q = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    shape = (copies * each, KV_HEADS, 2, BLOCK_TOKENS, HEAD_DIM)
    return plans, q, torch.randn(shape, dtype=torch.bfloat16, device=device)


def attended(
    q: torch.Tensor, kv: torch.Tensor, plan: AttentionPlan, length: int, context: int
) -> torch.Tensor:
    """Return what attention gives for sequences of one length and context, by torch, sequence by sequence.

    The result is float32 [tokens, HEADS, HEAD_DIM].
    """
    made = []
    behind = (
        torch.arange(context, device=q.device)
        - torch.arange(context - length, context, device=q.device)[:, None]
    )
    for s, queries in enumerate(q.split(length)):
        blocks = kv[plan.block_table[s].long()].float()  # [blocks, Hkv, 2, bt, D]
        keys, values = blocks.permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :context]
        rows = []
        for some, ages in zip(queries.split(1024), behind.split(1024), strict=True):
            wide = some.float().transpose(0, 1).unflatten(0, (KV_HEADS, -1)).flatten(1, 2)
            scores = (wide @ keys.transpose(1, 2)).unflatten(1, (-1, len(some))) * HEAD_DIM**-0.5
            weights = scores.masked_fill(ages > 0, float("-inf")).softmax(-1)
            rows.append((weights.flatten(1, 2) @ values).unflatten(1, (-1, len(some))).flatten(0, 1))
        made.append(torch.cat(rows, 1).transpose(0, 1))
    return torch.cat(made)

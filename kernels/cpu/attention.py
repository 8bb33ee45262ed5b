"""Paged attention on the CPU: FlashAttention's online softmax (Dao et al. 2022) over the blocks in place.

A work item is one KV head of one sequence and some of its rows. Row r is query r // group of the step and
head r % group of the KV head's group: heads that share keys read them once. Threads take items, costliest
first. Queries are scaled by log2(e) too, so that the softmax is made of 2^x.

Decodes (`attention_few`) and prefill chunks (`attention_many`) are worked on in different ways.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import math

import numpy as np
import torch

from kernels import calls
from kernels.cpu.attention_call import CODE, FEW, LAYOUT, ROWS, SPAN, AttentionCall, aligned
from kernels.cpu.attention_few import attend_few
from kernels.cpu.attention_many import attend_many
from kernels.cpu.compiled import compiled
from kernels.cpu.simd import KINDS, LANES, read_i32, words
from kernels.cpu.team import Kernel, next_item
from kernels.kv_codes import is_codes
from kernels.plan import AttentionPlan


@compiled
def _attend_items(kind, cache, scaled):
    a = AttentionCall(*words(kind, LAYOUT))
    buffer, scratch = aligned(a.head_dim * ROWS * 2 + (SPAN + 4) * ROWS)
    item = next_item(kind)
    while item >= 0:
        entry = a.items + item // a.num_kv_heads * 8
        seq, first_row = read_i32(entry), read_i32(entry + 4)
        rows = (read_i32(a.bounds + seq * 4 + 4) - read_i32(a.bounds + seq * 4)) * a.group
        if rows <= FEW:
            attend_few(a, kind, cache, scaled, seq, item % a.num_kv_heads, scratch)
        else:
            attend_many(a, kind, cache, scaled, seq, item % a.num_kv_heads, first_row, scratch)
        item = next_item(kind)
    buffer[0] = 0  # keeps the buffer alive to here


def _attend(kind):
    _attend_items(kind, kind, None)


def _attend_codes(kind):
    """Attend to a cache of codes (`kernels.kv_codes`)."""
    _attend_items(kind, CODE, True)


ATTEND, ATTEND_CODES = Kernel(_attend, LAYOUT), Kernel(_attend_codes, LAYOUT)
LOG2_E = math.log2(math.e)


def work_items(plan: AttentionPlan, group: int) -> torch.Tensor:
    """Return int32 [n, 2]: sequence and first row of each item, costliest first; once per step."""
    items = plan.derived.get(("cpu", group))
    if not isinstance(items, torch.Tensor):
        rows = np.diff(plan.cu_seqlens_q.numpy()) * group
        tiles = np.where(rows <= FEW, np.minimum(rows, 1), -(-rows // ROWS))
        seqs = np.repeat(np.arange(len(rows)), tiles)
        first_rows = (np.arange(len(seqs)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * ROWS
        cost = np.minimum(rows[seqs] - first_rows, ROWS) * plan.context_lens.numpy()[seqs]
        order = np.argsort(-cost, kind="stable")
        items = torch.from_numpy(np.stack([seqs[order], first_rows[order]], axis=1).astype(np.int32))
        plan.derived["cpu", group] = items
    return items


def rework(plan: AttentionPlan, like: AttentionPlan) -> None:
    """Write the work items of `like` to those of `plan`, which has as many."""
    for key, items in plan.derived.items():
        if isinstance(key, tuple) and key[0] == "cpu" and isinstance(items, torch.Tensor):
            items.copy_(work_items(like, key[1]))


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    size, num_kv_heads, head_dim = q.element_size(), kv.shape[1], q.shape[2]
    has_codes = kv.dtype != q.dtype and is_codes(kv) and kv.is_contiguous()
    if q.dtype not in KINDS or head_dim % LANES or not (has_codes or kv.dtype == q.dtype):
        return calls.paged_attention.reference(q, kv, plan, scale, out, sliding_window, softcap, sinks)
    kv_size, token = (1, head_dim) if has_codes else (size, kv.stride(3) * size)
    group = q.shape[1] // num_kv_heads
    items = work_items(plan, group)
    (ATTEND_CODES if has_codes else ATTEND)(
        q.dtype,
        len(items) * num_kv_heads,
        *(items.data_ptr(), q.data_ptr(), q.stride(0) * size, q.stride(1) * size),
        *(kv.data_ptr(), *(stride * kv_size for stride in kv.stride()[:3]), token),
        *(out.data_ptr(), out.stride(0) * size, out.stride(1) * size),
        *(plan.block_table.data_ptr(), plan.block_table.stride(0) * 4),
        *(plan.cu_seqlens_q.data_ptr(), plan.context_lens.data_ptr()),
        *(num_kv_heads, group, head_dim, kv.shape[3], sliding_window, size, kv_size),
        *(0 if sinks is None else sinks.data_ptr(), scale * LOG2_E, softcap * LOG2_E),
    )
    return out

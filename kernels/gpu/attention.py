"""Paged attention for GPUs: the launches and grids for the sequences of a step.

Compiled once per dtype, head dimension, group and block size (`attention_kernels`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_kernels import chunk_kernel, decode_kernel, join_kernel
from kernels.gpu.device import num_processors, properties
from kernels.kv_codes import SCALE_BYTES, is_codes
from kernels.plan import AttentionPlan

# Rows of a chunk's tile and keys of one iteration. Exact float32 products run on no tensor core: their tiles
# are unrolled into registers, and 64 x 64 takes 12 s to compile.
TILES = {torch.bfloat16: (64, 64), torch.float16: (64, 64), torch.float32: (32, 32)}
LEAST_ROWS = 16  # the smallest side of tl.dot
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256  # fewer are not worth joining


def paged_attention(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor | None = None,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if q.shape[0] == 0:
        return out
    num_seqs, window = plan.context_lens.shape[0], sliding_window or 2**30
    table, log2_e = plan.block_table, math.log2(math.e)
    step = (
        *(plan.cu_seqlens_q, plan.context_lens, table, table.stride(0)),
        *(scale * log2_e, window, softcap * log2_e, sinks),
    )
    sizes = {
        "GROUP": q.shape[1] // kv.shape[1],
        "BLOCK_TOKENS": kv.shape[3],
        "HEAD_DIM": q.shape[2],
        "BLOCK_DIM": max(LEAST_ROWS, triton.next_power_of_2(q.shape[2])),
        "BLOCK_N": TILES[q.dtype][1],
        "OPERAND": operand(q),
        "SCALE_BYTES": SCALE_BYTES if is_codes(kv) else 0,
        "HAS_CAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
    }
    if q.shape[0] > num_seqs:
        _attend_chunks(q, kv, out, num_seqs, step, sizes)
    if plan.max_q_len == 1 or num_seqs > 1:  # one long sequence alone: no decode
        keys = min(plan.max_context_len, window)
        splits = num_splits(num_seqs * kv.shape[1], keys, num_processors(q.device))
        _attend_decodes(q, kv, out, num_seqs, splits, step, sizes)
    return out


def _attend_chunks(
    q: Tensor, kv: Tensor, out: Tensor, num_seqs: int, step: tuple[Any, ...], sizes: dict[str, Any]
) -> None:
    block_rows = max(TILES[q.dtype][0], triton.next_power_of_2(sizes["GROUP"]))
    block_q = block_rows // sizes["GROUP"]
    chunk_kernel[(q.shape[0] // block_q + num_seqs, kv.shape[1])](
        *(q, kv, out, *step, num_seqs, *q.stride()[:2], *_strides(q, kv), *out.stride()[:2]),
        **sizes,
        BLOCK_ROWS=block_rows,
        BLOCK_Q=block_q,
        num_warps=_chunk_warps(q),
        num_stages=2,
    )


def _attend_decodes(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    num_seqs: int,
    splits: int,
    step: tuple[Any, ...],
    sizes: dict[str, Any],
) -> None:
    num_heads, head_dim = q.shape[1:]
    partial = torch.empty(num_seqs, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    state = torch.empty(num_seqs, num_heads, splits, 2, dtype=torch.float32, device=q.device)
    decode_kernel[(num_seqs, kv.shape[1], splits)](
        *(q, kv, partial, state, *step, splits, num_heads, *q.stride()[:2], *_strides(q, kv)),
        **sizes,
        BLOCK_ROWS=max(LEAST_ROWS, triton.next_power_of_2(sizes["GROUP"])),
        num_warps=4,
        num_stages=2,
    )
    join_kernel[(num_seqs, num_heads)](
        *(partial, state, out, step[0], splits, num_heads, *out.stride()[:2]),
        HEAD_DIM=head_dim,
        BLOCK_DIM=sizes["BLOCK_DIM"],
        BLOCK_SPLITS=MAX_SPLITS,
        num_warps=2,
    )


def _chunk_warps(q: Tensor) -> int:
    """Return the warps of a chunk's tile.

    The tensor cores of 9.0 and 10.0 keep sums or operands outside of registers. Elsewhere four warps have too
    few registers for a tile of 64 x 128: Triton 3.6 and 3.7 spilled 40 to 170 bytes of each thread for 8.0.
    """
    return 4 if q.dtype == torch.float32 or properties(q.device).arch // 10 in (9, 10) else 8


def _strides(q: Tensor, kv: Tensor) -> tuple[int, ...]:
    """Return the distances of blocks, heads, keys from values, and tokens, in elements of the cache."""
    return (*kv.stride()[:3], q.shape[2] if is_codes(kv) else kv.stride(3))


def operand(q: Tensor) -> Any:
    """Return the dtype that tl.dot multiplies: the tensors', but float32 for bfloat16 in the interpreter."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def num_splits(programs: int, keys: int, processors: int) -> int:
    """Return the programs per (sequence, KV head) that give each processor two, if there are enough keys."""
    wanted = -(-2 * processors // programs)
    return max(1, min(wanted, -(-keys // KEYS_PER_SPLIT), MAX_SPLITS))

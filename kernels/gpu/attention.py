"""Paged attention for GPUs: the launches and grids for the sequences of a step.

Compiled once per dtype, head dimension, group and block size (`attention_kernels`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention_configs import (
    CHUNKS,
    CODE_CHUNKS,
    DECODES,
    EXACT,
    OLDER_CHUNKS,
    AttentionConfig,
    fitting,
)
from kernels.gpu.attention_kernels import chunk_kernel, decode_kernel, join_kernel
from kernels.gpu.device import num_processors, properties
from kernels.kv_codes import SCALE_BYTES, is_codes
from kernels.plan import AttentionPlan

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
    gpu = properties(q.device)
    chunk, decode = configs(
        q.dtype, triton.next_power_of_2(q.shape[2]), is_codes(kv), gpu.arch, gpu.shared_bytes
    )
    return attend(q, kv, plan, scale, out, chunk, decode, sliding_window, softcap, sinks)


def attend(
    q: Tensor,
    kv: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    chunk: AttentionConfig,
    decode: AttentionConfig,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend as paged_attention does, in programs of these configs."""
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
        "OPERAND": operand(q),
        "SCALE_BYTES": SCALE_BYTES if is_codes(kv) else 0,
        "HAS_CAP": softcap > 0,
        "HAS_SINKS": sinks is not None,
    }
    if q.shape[0] > num_seqs:
        _attend_chunks(q, kv, out, num_seqs, step, sizes, chunk)
    if plan.max_q_len == 1 or num_seqs > 1:  # one long sequence alone: no decode
        keys = min(plan.max_context_len, window)
        splits = num_splits(num_seqs * kv.shape[1], keys, num_processors(q.device), decode.waves)
        _attend_decodes(q, kv, out, num_seqs, splits, step, sizes, decode)
    return out


@cache
def configs(
    dtype: torch.dtype, head_dim: int, has_codes: bool, arch: int, shared_bytes: int
) -> tuple[AttentionConfig, AttentionConfig]:
    """Return the configs of chunks and of decodes for a GPU of this capability and shared memory."""
    if dtype == torch.float32:
        return EXACT, EXACT
    chunks = CODE_CHUNKS if has_codes else CHUNKS
    if arch // 10 not in (9, 10):
        chunks = OLDER_CHUNKS
    return fitting(chunks, head_dim, shared_bytes), fitting(DECODES, head_dim, shared_bytes)


def _attend_chunks(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    num_seqs: int,
    step: tuple[Any, ...],
    sizes: dict[str, Any],
    config: AttentionConfig,
) -> None:
    block_rows = max(config.block_rows, triton.next_power_of_2(sizes["GROUP"]))
    block_q = block_rows // sizes["GROUP"]
    chunk_kernel[(q.shape[0] // block_q + num_seqs, kv.shape[1])](
        *(q, kv, out, *step, num_seqs, *q.stride()[:2], *_strides(q, kv), *out.stride()[:2]),
        **sizes,
        BLOCK_ROWS=block_rows,
        BLOCK_Q=block_q,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def _attend_decodes(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    num_seqs: int,
    splits: int,
    step: tuple[Any, ...],
    sizes: dict[str, Any],
    config: AttentionConfig,
) -> None:
    num_heads, head_dim = q.shape[1:]
    partial = state = None
    if splits > 1:
        partial = torch.empty(num_seqs, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
        state = torch.empty(num_seqs, num_heads, splits, 2, dtype=torch.float32, device=q.device)
    decode_kernel[(num_seqs, kv.shape[1], splits)](
        *(q, kv, out, partial, state, *step, splits, num_heads),
        *(*q.stride()[:2], *_strides(q, kv), *out.stride()[:2]),
        **sizes,
        BLOCK_ROWS=max(LEAST_ROWS, triton.next_power_of_2(sizes["GROUP"])),
        BLOCK_N=config.block_n,
        IS_WHOLE=splits == 1,
        IS_ONE_LOOP=config.is_one_loop,
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )
    if splits == 1:
        return
    join_kernel[(num_seqs, num_heads)](
        *(partial, state, out, step[0], splits, num_heads, *out.stride()[:2]),
        HEAD_DIM=head_dim,
        BLOCK_DIM=sizes["BLOCK_DIM"],
        BLOCK_SPLITS=MAX_SPLITS,
        num_warps=2,
    )


def _strides(q: Tensor, kv: Tensor) -> tuple[int, ...]:
    """Return the distances of blocks, heads, keys from values, and tokens, in elements of the cache."""
    return (*kv.stride()[:3], q.shape[2] if is_codes(kv) else kv.stride(3))


def operand(q: Tensor) -> Any:
    """Return the dtype that tl.dot multiplies: the tensors', but float32 for bfloat16 in the interpreter."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def num_splits(programs: int, keys: int, processors: int, waves: int = 2) -> int:
    """Return the programs per (sequence, KV head) that give each processor `waves`, if keys suffice."""
    wanted = -(-waves * processors // programs)
    return max(1, min(wanted, -(-keys // KEYS_PER_SPLIT), MAX_SPLITS))

"""Paged attention for GPUs: FlashAttention's online softmax (Dao et al. 2022) over the blocks in place.

A program owns one KV head and a tile of rows; row r is query r // GROUP of the tile and head r % GROUP of the
KV head's group, so heads that share keys load them once. Two kernels run side by side in a mixed step, each
leaving the other's sequences alone:

=======  =========================  =========================================================================
chunks   grid (tiles, Hkv)          sequences with more than one new token. Tiles are numbered without asking
                                    the device: sequence s starts at tile cu[s] // BLOCK_Q + s, which leaves
                                    every sequence at least the tiles it needs
decodes  grid (S, Hkv, splits)      sequences with one. A long context is split among programs, whose partial
                                    results a third kernel joins (Flash-Decoding, Dao et al. 2023)
=======  =========================  =========================================================================

Scores carry log2(e), so that the softmax is made of 2^x. Strides count elements. Compiled once per dtype,
head dimension, group and block size; lengths, windows and strides are run-time values. What changes from step
to step is not specialised: where it became 1 or a multiple of 16, the compiler would run in mid-service.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.plan import AttentionPlan

# Rows of a chunk's tile and keys of one iteration. Exact float32 products run on no tensor core: their tiles
# are unrolled into registers, and 64 x 64 takes 12 s to compile.
TILES = {torch.bfloat16: (64, 64), torch.float16: (64, 64), torch.float32: (32, 32)}
LEAST_ROWS = 16  # the smallest side of tl.dot
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256  # fewer than this do not repay the joining


@triton.jit
def _attend_rows(
    q,
    positions,
    kv_ptr,
    table_ptr,
    first_key,
    last_key,
    window,
    block_stride,
    value_stride,
    token_stride,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """q OPERAND [BLOCK_ROWS, BLOCK_DIM], scaled; positions int32 [BLOCK_ROWS] of the queries; kv_ptr at the
    KV head; keys first_key <= j < last_key, first_key a multiple of BLOCK_N.

    Returns the weighted sum of the values [BLOCK_ROWS, BLOCK_DIM], its divisor and the running maximum.
    """
    columns = tl.arange(0, BLOCK_DIM)
    peak = tl.full([BLOCK_ROWS], -1.0e30, tl.float32)  # finite: a hidden key then gives 0 and no NaN
    divisor = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS, BLOCK_DIM], tl.float32)
    for start in range(first_key, last_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        is_key = keys < last_key
        block = tl.load(table_ptr + keys // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        place = kv_ptr + block * block_stride + keys % BLOCK_TOKENS * token_stride
        inside = is_key[:, None] & (columns < HEAD_DIM)[None, :]
        key = tl.load(place[:, None] + columns[None, :], mask=inside, other=0.0)
        value = tl.load(place[:, None] + value_stride + columns[None, :], mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(key.to(OPERAND)), input_precision="ieee")
        age = positions[:, None] - keys[None, :]
        seen = (age >= 0) & (age < window) & is_key[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        correction = tl.exp2(peak - new_peak)
        weights = tl.exp2(scores - new_peak[:, None])
        divisor = divisor * correction + tl.sum(weights, 1)
        total = total * correction[:, None]
        total += tl.dot(weights.to(OPERAND), value.to(OPERAND), input_precision="ieee")
        peak = new_peak
    return total, divisor, peak


@triton.jit(do_not_specialize=("window", "num_seqs", "table_stride"))
def _chunk_kernel(
    q_ptr,
    kv_ptr,
    out_ptr,
    bounds_ptr,
    contexts_ptr,
    table_ptr,
    scale,
    window,
    num_seqs,
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid (T // BLOCK_Q + S, Hkv). q, out [T, Hq, D]; kv [B, Hkv, 2, bt, D]; table int32 [S, max_blocks]."""
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    low = tl.full([], 0, tl.int32)
    high = low + num_seqs
    while high - low > 1:  # the last sequence whose first tile is not past this one
        middle = (low + high) // 2
        is_past = tl.load(bounds_ptr + middle) // BLOCK_Q + middle > tile
        low, high = tl.where(is_past, low, middle), tl.where(is_past, middle, high)
    begin = tl.load(bounds_ptr + low)
    length = tl.load(bounds_ptr + low + 1) - begin
    first_query = (tile - (begin // BLOCK_Q + low)) * BLOCK_Q
    if (first_query < length) & (length > 1):
        rows = tl.arange(0, BLOCK_ROWS)
        queries = first_query + rows // GROUP
        is_row = (rows < BLOCK_Q * GROUP) & (queries < length)
        columns = tl.arange(0, BLOCK_DIM)
        inside = is_row[:, None] & (columns < HEAD_DIM)[None, :]
        tokens, heads = (begin + queries).to(tl.int64), head * GROUP + rows % GROUP
        source = q_ptr + tokens * q_token_stride + heads * q_head_stride
        q = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0)
        q = (q.to(tl.float32) * scale).to(OPERAND)
        context = tl.load(contexts_ptr + low)
        before = context - length
        last_key = tl.minimum(context, before + first_query + BLOCK_Q)
        first_key = tl.maximum(0, before + first_query - window + 1) // BLOCK_N * BLOCK_N
        total, divisor, _ = _attend_rows(
            q,
            before + queries,
            kv_ptr + head * head_stride,
            table_ptr + low.to(tl.int64) * table_stride,
            first_key,
            last_key,
            window,
            block_stride,
            value_stride,
            token_stride,
            BLOCK_TOKENS,
            HEAD_DIM,
            BLOCK_DIM,
            BLOCK_ROWS,
            BLOCK_N,
            OPERAND,
        )
        target = out_ptr + tokens * out_token_stride + heads * out_head_stride
        result = (total / divisor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(target[:, None] + columns[None, :], result, mask=inside)


@triton.jit(do_not_specialize=("window", "num_splits", "table_stride"))
def _decode_kernel(
    q_ptr,
    kv_ptr,
    partial_ptr,
    state_ptr,
    bounds_ptr,
    contexts_ptr,
    table_ptr,
    scale,
    window,
    num_splits,
    num_heads,
    q_token_stride,
    q_head_stride,
    block_stride,
    head_stride,
    value_stride,
    token_stride,
    table_stride,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Grid (S, Hkv, splits). Writes partial float32 [S, Hq, splits, HEAD_DIM] and state float32
    [S, Hq, splits, 2]: divisor and maximum; a split without keys leaves divisor 0."""
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin = tl.load(bounds_ptr + seq)
    if tl.load(bounds_ptr + seq + 1) - begin == 1:
        rows = tl.arange(0, BLOCK_ROWS)
        columns = tl.arange(0, BLOCK_DIM)
        inside = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
        heads = head * GROUP + rows
        source = q_ptr + begin.to(tl.int64) * q_token_stride + heads * q_head_stride
        q = tl.load(source[:, None] + columns[None, :], mask=inside, other=0.0)
        q = (q.to(tl.float32) * scale).to(OPERAND)
        context = tl.load(contexts_ptr + seq)
        first_tile = tl.maximum(0, context - window) // BLOCK_N
        tiles = tl.cdiv(context, BLOCK_N) - first_tile
        share = tl.cdiv(tiles, num_splits)
        first_key = (first_tile + split * share) * BLOCK_N
        total, divisor, peak = _attend_rows(
            q,
            tl.full([BLOCK_ROWS], 0, tl.int32) + context - 1,
            kv_ptr + head * head_stride,
            table_ptr + seq * table_stride,
            first_key,
            tl.minimum(context, first_key + share * BLOCK_N),
            window,
            block_stride,
            value_stride,
            token_stride,
            BLOCK_TOKENS,
            HEAD_DIM,
            BLOCK_DIM,
            BLOCK_ROWS,
            BLOCK_N,
            OPERAND,
        )
        place = (seq * num_heads + heads) * num_splits + split
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + columns[None, :], total, mask=inside)
        tl.store(state_ptr + place * 2, divisor, mask=rows < GROUP)
        tl.store(state_ptr + place * 2 + 1, peak, mask=rows < GROUP)


@triton.jit(do_not_specialize=("num_splits",))
def _join_kernel(
    partial_ptr,
    state_ptr,
    out_ptr,
    bounds_ptr,
    num_splits,
    num_heads,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Grid (S, Hq): the splits of one decode's head become its output."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(bounds_ptr + seq)
    if tl.load(bounds_ptr + seq + 1) - begin == 1:
        splits = tl.arange(0, BLOCK_SPLITS)
        columns = tl.arange(0, BLOCK_DIM)
        place = (seq * num_heads + head) * num_splits + splits
        divisor = tl.load(state_ptr + place * 2, mask=splits < num_splits, other=0.0)
        peak = tl.load(state_ptr + place * 2 + 1, mask=splits < num_splits, other=-1.0e30)
        share = tl.exp2(peak - tl.max(peak, 0))
        inside = (splits < num_splits)[:, None] & (columns < HEAD_DIM)[None, :]
        partial = tl.load(partial_ptr + place[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
        result = tl.sum(partial * share[:, None], 0) / tl.sum(divisor * share, 0)
        target = out_ptr + begin.to(tl.int64) * out_token_stride + head * out_head_stride + columns
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=columns < HEAD_DIM)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    sliding_window: int = 0,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if q.shape[0] == 0:
        return out
    shapes = {
        "GROUP": q.shape[1] // kv.shape[1],
        "BLOCK_TOKENS": kv.shape[3],
        "HEAD_DIM": q.shape[2],
        "BLOCK_DIM": max(LEAST_ROWS, triton.next_power_of_2(q.shape[2])),
        "OPERAND": _operand(q),
    }
    scale *= math.log2(math.e)
    window = sliding_window or 2**30
    if q.shape[0] > plan.context_lens.shape[0]:
        _attend_chunks(q, kv, plan, scale, out, window, shapes)
    if plan.max_q_len == 1 or plan.context_lens.shape[0] > 1:  # one long sequence alone: no decode
        _attend_decodes(q, kv, plan, scale, out, window, shapes)
    return out


def _attend_chunks(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor,
    window: int,
    shapes: dict[str, Any],
) -> None:
    num_seqs, group = plan.context_lens.shape[0], shapes["GROUP"]
    block_rows = max(TILES[q.dtype][0], triton.next_power_of_2(group))
    block_q = block_rows // group
    _chunk_kernel[(q.shape[0] // block_q + num_seqs, kv.shape[1])](
        *(q, kv, out, plan.cu_seqlens_q, plan.context_lens, plan.block_table, scale, window, num_seqs),
        *(q.stride(0), q.stride(1), *kv.stride()[:4], out.stride(0), out.stride(1)),
        plan.block_table.stride(0),
        **shapes,
        BLOCK_ROWS=block_rows,
        BLOCK_Q=block_q,
        BLOCK_N=TILES[q.dtype][1],
        num_warps=4,
        num_stages=2,
    )


def _attend_decodes(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor,
    window: int,
    shapes: dict[str, Any],
) -> None:
    num_seqs, num_heads, head_dim = plan.context_lens.shape[0], q.shape[1], q.shape[2]
    splits = num_splits(num_seqs * kv.shape[1], min(plan.max_context_len, window), _num_processors(q.device))
    partial = torch.empty(num_seqs, num_heads, splits, head_dim, dtype=torch.float32, device=q.device)
    state = torch.empty(num_seqs, num_heads, splits, 2, dtype=torch.float32, device=q.device)
    _decode_kernel[(num_seqs, kv.shape[1], splits)](
        *(q, kv, partial, state, plan.cu_seqlens_q, plan.context_lens, plan.block_table, scale, window),
        *(splits, num_heads, q.stride(0), q.stride(1), *kv.stride()[:4], plan.block_table.stride(0)),
        **shapes,
        BLOCK_ROWS=max(LEAST_ROWS, triton.next_power_of_2(shapes["GROUP"])),
        BLOCK_N=TILES[q.dtype][1],
        num_warps=4,
        num_stages=2,
    )
    _join_kernel[(num_seqs, num_heads)](
        *(partial, state, out, plan.cu_seqlens_q, splits, num_heads, out.stride(0), out.stride(1)),
        HEAD_DIM=head_dim,
        BLOCK_DIM=shapes["BLOCK_DIM"],
        BLOCK_SPLITS=MAX_SPLITS,
        num_warps=2,
    )


def _operand(q: torch.Tensor) -> Any:
    """What tl.dot multiplies: the tensors' dtype, but for bfloat16 in the interpreter: numpy has none."""
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return tl.float32
    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[q.dtype]


def num_splits(programs: int, keys: int, processors: int) -> int:
    """Programs per (sequence, KV head), so that two wait on every processor, as far as the keys go."""
    wanted = -(-2 * processors // programs)
    return max(1, min(wanted, -(-keys // KEYS_PER_SPLIT), MAX_SPLITS))


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # the interpreter: enough that splitting is tested
    properties: Any = torch.cuda.get_device_properties(device)
    count: int = properties.multi_processor_count
    return count

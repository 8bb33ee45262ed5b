"""Paged attention on the CPU: FlashAttention's online softmax (Dao et al. 2022) over the blocks in place.

A work item is one KV head of one sequence and some of its rows. Row r is query r // group of the step and
head r % group of the KV head's group: heads that share keys read them once. Threads take items, costliest
first. Queries are scaled by log2(e) too, so that the softmax is made of 2^x.

====  ===========================  ========================================================================
few   up to FEW rows: decodes      the score of a token is a dot product. Reading the cache takes the time,
                                   so the next block is fetched while this one is worked on
many  up to ROWS rows of a         lanes are rows. The queries are transposed once per item; scores and
      prefill chunk                output are tiles of matrix products (`kernels.cpu.tile`)
====  ===========================  ========================================================================
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from kernels import reference
from kernels.cpu.simd import (
    KINDS,
    LANES,
    address_of,
    hmax,
    hsum,
    prefetch,
    read,
    read_f64,
    read_i32,
    read_i64,
    vexp2,
    vfma,
    vload,
    vmax,
    vsplat,
    vsplat_load,
    vstore,
    vwhere_le,
    write_f32,
)
from kernels.cpu.team import Kernel, compiled, next_item
from kernels.cpu.tile import tile
from kernels.plan import AttentionPlan

FEW = 8  # rows; more than this and transposing the queries pays
ROWS = 48  # rows of a prefill item: three vectors, so that an 8 x 3 tile of scores fills 24 registers
ROW_BYTES = ROWS * 4
CHUNK = 64  # tokens between two corrections of the running maximum
SPAN = CHUNK + LANES  # row of the score buffer: whole vectors, and room for tiles that overshoot
NEVER = -1e30  # running maximum before the first key; finite, so that a hidden key gives 2^-inf = 0, no NaN
F32 = np.float32


class Call(NamedTuple):
    """Words of one call. Addresses and strides in bytes."""

    items: int  # int32 [n, 2]: sequence, first row
    q: int
    q_token: int
    q_head: int
    kv: int
    kv_block: int
    kv_head: int
    kv_value: int  # from a key to its value
    kv_token: int
    out: int
    out_token: int
    out_head: int
    table: int
    table_row: int
    bounds: int  # cu_seqlens_q
    contexts: int
    num_kv_heads: int
    group: int
    head_dim: int
    block_tokens: int
    window: int  # 0: none
    element: int  # bytes of one
    scale: float


LAYOUT = "q" * (len(Call._fields) - 1) + "d"


@compiled
def _unpack(params):
    w = params + 16
    return Call(
        read_i64(w), read_i64(w + 8), read_i64(w + 16), read_i64(w + 24), read_i64(w + 32),
        read_i64(w + 40), read_i64(w + 48), read_i64(w + 56), read_i64(w + 64), read_i64(w + 72),
        read_i64(w + 80), read_i64(w + 88), read_i64(w + 96), read_i64(w + 104), read_i64(w + 112),
        read_i64(w + 120), read_i64(w + 128), read_i64(w + 136), read_i64(w + 144), read_i64(w + 152),
        read_i64(w + 160), read_i64(w + 168), read_f64(w + 176),
    )  # fmt: skip


@compiled
def _aligned(floats):
    """A buffer whose rows do not straddle cache lines, which would halve the speed of loads."""
    buffer = np.empty(floats + LANES, np.float32)
    return buffer, (buffer.ctypes.data + 63) // 64 * 64


@compiled
def _block(a, seq, head, token):
    """Address of the key of a token, and how many tokens of its block follow, it included."""
    index, offset = token // a.block_tokens, token % a.block_tokens
    block = read_i32(a.table + seq * a.table_row + index * 4)
    return a.kv + block * a.kv_block + head * a.kv_head + offset * a.kv_token, a.block_tokens - offset


# --------------------------------------------------------------------------- few rows


@compiled
def _dots(a, kind, rows, size, keys, q, scores, ahead):
    """scores[r, j] = q[r] . keys[j]; lines `ahead` bytes on, keys and values, are fetched on the way."""
    width = LANES * a.element
    vectors = a.head_dim // LANES
    for j in range(size):
        key = keys + j * a.kv_token
        if ahead != 0:
            for line in range(0, a.head_dim * a.element, 64):
                prefetch(key + ahead + line)
                prefetch(key + ahead + a.kv_value + line)
        for r in range(rows):
            row = q + r * a.head_dim * 4
            total = vload(kind, key) * vload(F32, row)
            for v in range(1, vectors):
                total = vfma(vload(kind, key + v * width), vload(F32, row + v * 64), total)
            write_f32(scores + (r * SPAN + j) * 4, hsum(total))


@compiled
def _soften(scores, count, old_max):
    """Scores of one row, whole vectors up to count, become 2^(score - max). Returns max and their sum."""
    peak = vsplat(old_max)
    for j in range(0, count, LANES):
        peak = vmax(peak, vload(F32, scores + j * 4))
    new_max = hmax(peak)
    peak = vsplat(new_max)
    total = vsplat(F32(0.0))
    for j in range(0, count, LANES):
        weight = vexp2(vload(F32, scores + j * 4) - peak)
        vstore(F32, scores + j * 4, weight)
        total = total + weight
    return new_max, hsum(total)


@compiled
def _weigh_few(a, kind, rows, size, values, weights, out):
    """out[r] += sum over j < size of weights[r, j] * values[j]."""
    width, line, span = LANES * a.element, a.head_dim * 4, SPAN * 4
    for v in range(0, a.head_dim // LANES // 4 * 4, 4):
        r = 0
        while r < rows:
            w, b, c = weights + r * span, values + v * width, out + r * line + v * 64
            if rows - r >= 4:
                tile(4, 4, 1, F32, kind, size, w, span, 4, b, a.kv_token, c, line)
                r += 4
            elif rows - r >= 2:
                tile(2, 4, 1, F32, kind, size, w, span, 4, b, a.kv_token, c, line)
                r += 2
            else:
                tile(1, 4, 1, F32, kind, size, w, span, 4, b, a.kv_token, c, line)
                r += 1
    for v in range(a.head_dim // LANES // 4 * 4, a.head_dim // LANES):
        for r in range(rows):
            w, b, c = weights + r * span, values + v * width, out + r * line + v * 64
            tile(1, 1, 1, F32, kind, size, w, span, 4, b, a.kv_token, c, line)


@compiled
def _few(a, kind, seq, head, scratch):
    start = read_i32(a.bounds + seq * 4)
    rows = (read_i32(a.bounds + seq * 4 + 4) - start) * a.group
    context = read_i32(a.contexts + seq * 4)
    first_position = context - rows // a.group
    line, width = a.head_dim * 4, LANES * a.element
    q = scratch
    out = q + FEW * line
    scores = out + FEW * line
    state = scores + FEW * SPAN * 4  # running maximum and sum of each row
    scale = vsplat(F32(a.scale))
    for r in range(rows):
        source = a.q + (start + r // a.group) * a.q_token + (head * a.group + r % a.group) * a.q_head
        for v in range(a.head_dim // LANES):
            vstore(F32, q + r * line + v * 64, vload(kind, source + v * width) * scale)
            vstore(F32, out + r * line + v * 64, vsplat(F32(0.0)))
        write_f32(state + r * 8, F32(NEVER))
        write_f32(state + r * 8 + 4, F32(0.0))

    token = 0
    if a.window > 0:
        token = max(0, first_position - a.window + 1)
    while token < context:
        count = min(CHUNK, context - token)
        done = 0
        while done < count:
            keys, room = _block(a, seq, head, token + done)
            size = min(room, count - done)
            ahead = 0
            if token + done + room < context:
                following, _ = _block(a, seq, head, token + done + room)
                ahead = following - keys
            _dots(a, kind, rows, size, keys, q, scores + done * 4, ahead)
            done += size
        for r in range(rows):
            position = first_position + r // a.group
            row = scores + r * SPAN * 4
            low = 0
            if a.window > 0:
                low = max(0, min(count, position - a.window + 1 - token))
            for j in range(low):
                write_f32(row + j * 4, F32(-np.inf))
            for j in range(max(0, min(count, position + 1 - token)), (count + 15) // 16 * 16):
                write_f32(row + j * 4, F32(-np.inf))
            old_max = read(F32, state + r * 8)
            new_max, total = _soften(row, count, old_max)
            correction = vexp2(vsplat(old_max) - vsplat(new_max))
            if new_max > old_max:
                for v in range(a.head_dim // LANES):
                    place = out + r * line + v * 64
                    vstore(F32, place, vload(F32, place) * correction)
            write_f32(state + r * 8, new_max)
            # All lanes of the correction are equal.
            write_f32(state + r * 8 + 4, read(F32, state + r * 8 + 4) * hmax(correction) + total)
        done = 0
        while done < count:
            keys, room = _block(a, seq, head, token + done)
            size = min(room, count - done)
            _weigh_few(a, kind, rows, size, keys + a.kv_value, scores + done * 4, out)
            done += size
        token += count

    for r in range(rows):
        target = a.out + (start + r // a.group) * a.out_token + (head * a.group + r % a.group) * a.out_head
        inverse = vsplat(F32(1.0) / read(F32, state + r * 8 + 4))
        for v in range(a.head_dim // LANES):
            vstore(kind, target + v * width, vload(F32, out + r * line + v * 64) * inverse)


# --------------------------------------------------------------------------- many rows


@compiled
def _scores_of(a, kind, size, room, keys, q, scores):
    """scores[j, r] = keys[j] . q[r] with q transposed to [head_dim, ROWS]. May write up to 7 rows past size
    where the block has them; they are hidden later."""
    j = 0
    while j < size:
        key, row = keys + j * a.kv_token, scores + j * ROW_BYTES
        if j + 8 <= room:
            tile(8, 3, 0, kind, F32, a.head_dim, key, a.kv_token, a.element, q, ROW_BYTES, row, ROW_BYTES)
            j += 8
        else:
            tile(1, 3, 0, kind, F32, a.head_dim, key, a.kv_token, a.element, q, ROW_BYTES, row, ROW_BYTES)
            j += 1


@compiled
def _soften_lanes(scores, count, token, hides, window, positions, state, corrections):
    """Softmax down the columns: a lane is a row of queries. True if any maximum grew."""
    grew = False
    for lane in range(0, ROW_BYTES, 64):
        column = scores + lane
        position = vload(F32, positions + lane)
        old_max = vload(F32, state + lane)
        peak = old_max
        for j in range(count):
            score = vload(F32, column + j * ROW_BYTES)
            if hides:
                hidden = vsplat(F32(-np.inf))
                score = vwhere_le(vsplat(F32(token + j)), position, score, hidden)
                if window > 0:
                    score = vwhere_le(position, vsplat(F32(token + j + window - 1)), score, hidden)
                vstore(F32, column + j * ROW_BYTES, score)
            peak = vmax(peak, score)
        correction = vexp2(old_max - peak)
        total = vload(F32, state + ROW_BYTES + lane) * correction
        for j in range(count):
            weight = vexp2(vload(F32, column + j * ROW_BYTES) - peak)
            vstore(F32, column + j * ROW_BYTES, weight)
            total = total + weight
        vstore(F32, state + lane, peak)
        vstore(F32, state + ROW_BYTES + lane, total)
        vstore(F32, corrections + lane, correction)
        grew = grew or hmax(peak - old_max) > 0
    return grew


@compiled
def _weigh_many(a, kind, rows, size, values, weights, out):
    """out[r] += sum over j < size of weights[j, r] * values[j]; whole tiles, so up to 5 rows too many."""
    width, line, vectors = LANES * a.element, a.head_dim * 4, a.head_dim // LANES
    for r in range(0, rows, 6):
        w, row = weights + r * 4, out + r * line
        for v in range(0, vectors // 4 * 4, 4):
            tile(
                6, 4, 1, F32, kind, size, w, 4, ROW_BYTES, values + v * width, a.kv_token, row + v * 64, line
            )
        for v in range(vectors // 4 * 4, vectors):
            tile(
                6, 1, 1, F32, kind, size, w, 4, ROW_BYTES, values + v * width, a.kv_token, row + v * 64, line
            )


@compiled
def _many(a, kind, seq, head, first_row, scratch):
    start = read_i32(a.bounds + seq * 4)
    length = read_i32(a.bounds + seq * 4 + 4) - start
    before = read_i32(a.contexts + seq * 4) - length
    rows = min(ROWS, length * a.group - first_row)
    first_position = before + first_row // a.group
    last_position = before + (first_row + rows - 1) // a.group
    line, width, vectors = a.head_dim * 4, LANES * a.element, a.head_dim // LANES
    q = scratch
    out = q + a.head_dim * ROW_BYTES
    scores = out + ROWS * line
    state = scores + SPAN * ROW_BYTES
    positions = state + 2 * ROW_BYTES
    corrections = positions + ROW_BYTES

    scale = F32(a.scale)
    for r in range(ROWS):
        row = first_row + min(r, rows - 1)  # lanes without a row repeat the last one
        source = a.q + (start + row // a.group) * a.q_token + (head * a.group + row % a.group) * a.q_head
        for d in range(a.head_dim):
            write_f32(q + d * ROW_BYTES + r * 4, read(kind, source + d * a.element) * scale)
        write_f32(positions + r * 4, F32(before + row // a.group))
        write_f32(state + r * 4, F32(NEVER))
        write_f32(state + ROW_BYTES + r * 4, F32(0.0))
        for v in range(vectors):
            vstore(F32, out + r * line + v * 64, vsplat(F32(0.0)))

    token = 0
    if a.window > 0:
        token = max(0, first_position - a.window + 1)
    while token <= last_position:
        count = min(CHUNK, last_position + 1 - token)
        done = 0
        while done < count:
            keys, room = _block(a, seq, head, token + done)
            size = min(room, count - done)
            _scores_of(a, kind, size, room, keys, q, scores + done * ROW_BYTES)
            done += size
        hides = token + count - 1 > first_position or (a.window > 0 and last_position - a.window >= token)
        if _soften_lanes(scores, count, token, hides, a.window, positions, state, corrections):
            for r in range(rows):
                correction = vsplat_load(F32, corrections + r * 4)
                for v in range(vectors):
                    place = out + r * line + v * 64
                    vstore(F32, place, vload(F32, place) * correction)
        done = 0
        while done < count:
            keys, room = _block(a, seq, head, token + done)
            size = min(room, count - done)
            _weigh_many(a, kind, rows, size, keys + a.kv_value, scores + done * ROW_BYTES, out)
            done += size
        token += count

    for r in range(rows):
        row = first_row + r
        target = (
            a.out + (start + row // a.group) * a.out_token + (head * a.group + row % a.group) * a.out_head
        )
        inverse = vsplat(F32(1.0) / read(F32, state + ROW_BYTES + r * 4))
        for v in range(vectors):
            vstore(kind, target + v * width, vload(F32, out + r * line + v * 64) * inverse)


# --------------------------------------------------------------------------- the kernel and its call


def _attend(kind):
    params = address_of(kind)
    a = _unpack(params)
    buffer, scratch = _aligned(a.head_dim * ROWS * 2 + (SPAN + 4) * ROWS)
    item = next_item(params)
    while item >= 0:
        entry = a.items + item // a.num_kv_heads * 8
        seq, first_row = read_i32(entry), read_i32(entry + 4)
        rows = (read_i32(a.bounds + seq * 4 + 4) - read_i32(a.bounds + seq * 4)) * a.group
        if rows <= FEW:
            _few(a, kind, seq, item % a.num_kv_heads, scratch)
        else:
            _many(a, kind, seq, item % a.num_kv_heads, first_row, scratch)
        item = next_item(params)
    buffer[0] = 0  # keeps the buffer alive to here


ATTEND = Kernel(_attend, LAYOUT)


def work_items(plan: AttentionPlan, group: int) -> torch.Tensor:
    """int32 [n, 2]: sequence and first row of each item, costliest first; made once per step."""
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


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    out: torch.Tensor | None = None,
    sliding_window: int = 0,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
    size, num_kv_heads, head_dim = q.element_size(), kv.shape[1], q.shape[2]
    if q.dtype not in KINDS or kv.dtype != q.dtype or head_dim % LANES:
        return reference.paged_attention(q, kv, plan, scale, out, sliding_window)
    group = q.shape[1] // num_kv_heads
    items = work_items(plan, group)
    ATTEND(
        q.dtype,
        len(items) * num_kv_heads,
        *(items.data_ptr(), q.data_ptr(), q.stride(0) * size, q.stride(1) * size),
        *(kv.data_ptr(), *(stride * size for stride in kv.stride()[:4])),
        *(out.data_ptr(), out.stride(0) * size, out.stride(1) * size),
        *(plan.block_table.data_ptr(), plan.block_table.stride(0) * 4),
        *(plan.cu_seqlens_q.data_ptr(), plan.context_lens.data_ptr()),
        *(num_kv_heads, group, head_dim, kv.shape[3], sliding_window, size),
        scale * math.log2(math.e),
    )
    return out

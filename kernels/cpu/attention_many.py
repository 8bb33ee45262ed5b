"""Attention of up to ROWS rows of a prefill chunk.

A lane is a row: the queries are transposed once, and scores and output are tiles of matrix products.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import numpy as np

from kernels.cpu.attention_call import (
    BF16,
    CHUNK,
    F32,
    ROW_BYTES,
    ROWS,
    SPAN,
    block_of,
    cap,
    first_state,
    scales_of,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.simd import (
    LANES,
    hmax,
    read,
    read_i32,
    vexp2,
    vload,
    vmax,
    vsplat,
    vsplat_load,
    vstore,
    vwhere_le,
    write_f32,
)
from kernels.cpu.tile import tile
from kernels.kv_codes import SCALE_BYTES


@compiled
def _scores_of(a, cache, size, room, keys, q, scores):
    """Compute scores[j, r] = keys[j] . q[r] with q transposed to [head_dim, ROWS].

    It may write up to 7 rows past size if the block has them; they are hidden later.
    """
    j = 0
    while j < size:
        key, row = keys + j * a.kv_token, scores + j * ROW_BYTES
        if j + 8 <= room:
            tile(8, 3, 0, cache, F32, a.head_dim, key, a.kv_token, a.kv_element, q, ROW_BYTES, row, ROW_BYTES)
            j += 8
        else:
            tile(1, 3, 0, cache, F32, a.head_dim, key, a.kv_token, a.kv_element, q, ROW_BYTES, row, ROW_BYTES)
            j += 1


@compiled
def _scale(size, scales, scores):
    """Multiply row j < size of the scores, or weights, by the scale of token j."""
    for j in range(size):
        factor = vsplat_load(BF16, scales + j * SCALE_BYTES)
        for lane in range(0, ROW_BYTES, 64):
            place = scores + j * ROW_BYTES + lane
            vstore(F32, place, vload(F32, place) * factor)


@compiled
def _soften_lanes(a, scores, count, token, hides, positions, state, corrections):
    """Apply the softmax down the columns: a lane is a row of queries. Returns True if a maximum grew."""
    grew = False
    for lane in range(0, ROW_BYTES, 64):
        column = scores + lane
        position = vload(F32, positions + lane)
        old_max = vload(F32, state + lane)
        peak = old_max
        for j in range(count):
            score = vload(F32, column + j * ROW_BYTES)
            if a.softcap > 0:
                score = cap(a, score)
                vstore(F32, column + j * ROW_BYTES, score)
            if hides:
                hidden = vsplat(F32(-np.inf))
                score = vwhere_le(vsplat(F32(token + j)), position, score, hidden)
                if a.window > 0:
                    score = vwhere_le(position, vsplat(F32(token + j + a.window - 1)), score, hidden)
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
def _weigh_many(a, cache, rows, size, values, weights, out):
    """Add the sum over j < size of weights[j, r] * values[j] to out[r], in whole tiles: up to 5 more rows."""
    width, line, vectors = LANES * a.kv_element, a.head_dim * 4, a.head_dim // LANES
    for r in range(0, rows, 6):
        w, row = weights + r * 4, out + r * line
        for v in range(0, vectors // 4 * 4, 4):
            tile(
                6, 4, 1, F32, cache, size, w, 4, ROW_BYTES, values + v * width, a.kv_token, row + v * 64, line
            )
        for v in range(vectors // 4 * 4, vectors):
            tile(
                6, 1, 1, F32, cache, size, w, 4, ROW_BYTES, values + v * width, a.kv_token, row + v * 64, line
            )


@compiled
def attend_many(a, kind, cache, scaled, seq, head, first_row, scratch):
    """Attend for the rows of an item. cache and scaled: as of `attend_few`."""
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
        peak, total = first_state(a, kind, head * a.group + row % a.group)
        write_f32(state + r * 4, peak)
        write_f32(state + ROW_BYTES + r * 4, total)
        for v in range(vectors):
            vstore(F32, out + r * line + v * 64, vsplat(F32(0.0)))

    token = 0
    if a.window > 0:
        token = max(0, first_position - a.window + 1)
    while token <= last_position:
        count = min(CHUNK, last_position + 1 - token)
        done = 0
        while done < count:
            keys, room = block_of(a, seq, head, token + done)
            size = min(room, count - done)
            _scores_of(a, cache, size, room, keys, q, scores + done * ROW_BYTES)
            if scaled is not None:
                _scale(size, scales_of(a, room, keys), scores + done * ROW_BYTES)
            done += size
        hides = token + count - 1 > first_position or (a.window > 0 and last_position - a.window >= token)
        if _soften_lanes(a, scores, count, token, hides, positions, state, corrections):
            for r in range(rows):
                correction = vsplat_load(F32, corrections + r * 4)
                for v in range(vectors):
                    place = out + r * line + v * 64
                    vstore(F32, place, vload(F32, place) * correction)
        done = 0
        while done < count:
            keys, room = block_of(a, seq, head, token + done)
            size = min(room, count - done)
            if scaled is not None:
                _scale(size, scales_of(a, room, keys) + a.kv_value, scores + done * ROW_BYTES)
            _weigh_many(a, cache, rows, size, keys + a.kv_value, scores + done * ROW_BYTES, out)
            done += size
        token += count

    for r in range(rows):
        row = first_row + r
        target = (
            a.out + (start + row // a.group) * a.out_token + (head * a.group + row % a.group) * a.out_head
        )
        divisor = read(F32, state + ROW_BYTES + r * 4)
        inverse = vsplat(F32(1.0) / divisor if divisor > F32(0.0) else F32(0.0))  # 0: a context without keys
        for v in range(vectors):
            vstore(kind, target + v * width, vload(F32, out + r * line + v * 64) * inverse)

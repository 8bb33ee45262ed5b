"""Attention of up to FEW rows: decodes.

The score of a token is a dot product. Reading the cache takes most of the time, so each block is prefetched
while the one before it is computed.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import numpy as np

from kernels.cpu.attention_call import BF16, CHUNK, F32, FEW, SPAN, block_of, cap, first_state, scales_of
from kernels.cpu.compiled import compiled
from kernels.cpu.simd import (
    LANES,
    hmax,
    hsum,
    prefetch,
    read,
    read_i32,
    vexp2,
    vfma,
    vload,
    vmax,
    vsplat,
    vstore,
    write_f32,
)
from kernels.cpu.tile import tile
from kernels.kv_codes import SCALE_BYTES


@compiled
def _dots(a, cache, rows, size, keys, q, scores, ahead):
    """Compute scores[r, j] = q[r] . keys[j]; prefetch the keys and values `ahead` bytes further on."""
    width = LANES * a.kv_element
    vectors = a.head_dim // LANES
    for j in range(size):
        key = keys + j * a.kv_token
        if ahead != 0:
            for line in range(0, a.head_dim * a.kv_element, 64):
                prefetch(key + ahead + line)
                prefetch(key + ahead + a.kv_value + line)
        for r in range(rows):
            row = q + r * a.head_dim * 4
            total = vload(cache, key) * vload(F32, row)
            for v in range(1, vectors):
                total = vfma(vload(cache, key + v * width), vload(F32, row + v * 64), total)
            write_f32(scores + (r * SPAN + j) * 4, hsum(total))


@compiled
def _scale(rows, size, scales, scores):
    """Multiply column j < size of the scores, or weights, by the scale of token j."""
    whole = size // LANES * LANES
    for j in range(0, whole, LANES):
        factor = vload(BF16, scales + j * SCALE_BYTES)
        for r in range(rows):
            place = scores + (r * SPAN + j) * 4
            vstore(F32, place, vload(F32, place) * factor)
    for j in range(whole, size):
        for r in range(rows):
            place = scores + (r * SPAN + j) * 4
            write_f32(place, read(F32, place) * read(BF16, scales + j * SCALE_BYTES))


@compiled
def _soften(scores, count, old_max):
    """Replace the scores of one row, whole vectors up to count, by 2^(score - max). Returns max and sum."""
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
def _weigh_few(a, cache, rows, size, values, weights, out):
    """Add the sum over j < size of weights[r, j] * values[j] to out[r]."""
    width, line, span = LANES * a.kv_element, a.head_dim * 4, SPAN * 4
    for v in range(0, a.head_dim // LANES // 4 * 4, 4):
        r = 0
        while r < rows:
            w, b, c = weights + r * span, values + v * width, out + r * line + v * 64
            if rows - r >= 4:
                tile(4, 4, 1, F32, cache, size, w, span, 4, b, a.kv_token, c, line)
                r += 4
            elif rows - r >= 2:
                tile(2, 4, 1, F32, cache, size, w, span, 4, b, a.kv_token, c, line)
                r += 2
            else:
                tile(1, 4, 1, F32, cache, size, w, span, 4, b, a.kv_token, c, line)
                r += 1
    for v in range(a.head_dim // LANES // 4 * 4, a.head_dim // LANES):
        for r in range(rows):
            w, b, c = weights + r * span, values + v * width, out + r * line + v * 64
            tile(1, 1, 1, F32, cache, size, w, span, 4, b, a.kv_token, c, line)


@compiled
def _hide(row, first, last):
    """Hide the keys first <= j < last from a row."""
    for j in range(first, last):
        write_f32(row + j * 4, F32(-np.inf))


@compiled
def _begin(a, kind, start, head, rows, q, out, state):
    """Scale the queries and clear the results; state is the running maximum and sum of each row."""
    scale = vsplat(F32(a.scale))
    for r in range(rows):
        source = a.q + (start + r // a.group) * a.q_token + (head * a.group + r % a.group) * a.q_head
        for v in range(a.head_dim // LANES):
            query = vload(kind, source + v * LANES * a.element) * scale
            vstore(F32, q + (r * a.head_dim + v * LANES) * 4, query)
            vstore(F32, out + (r * a.head_dim + v * LANES) * 4, vsplat(F32(0.0)))
        peak, total = first_state(a, kind, head * a.group + r % a.group)
        write_f32(state + r * 8, peak)
        write_f32(state + r * 8 + 4, total)


@compiled
def _scores_of_chunk(a, cache, scaled, seq, head, rows, token, count, context, q, scores):
    done = 0
    while done < count:
        keys, room = block_of(a, seq, head, token + done)
        size = min(room, count - done)
        ahead = 0
        if token + done + room < context:
            following, _ = block_of(a, seq, head, token + done + room)
            ahead = following - keys
        _dots(a, cache, rows, size, keys, q, scores + done * 4, ahead)
        if scaled is not None:
            _scale(rows, size, scales_of(a, room, keys), scores + done * 4)
        done += size


@compiled
def _soften_chunk(a, rows, token, count, first_position, scores, state, out):
    """Turn scores into weights; scale `out` down in rows whose maximum grew."""
    for r in range(rows):
        position = first_position + r // a.group
        row, line = scores + r * SPAN * 4, out + r * a.head_dim * 4
        if a.softcap > 0:
            for j in range(0, count, LANES):
                vstore(F32, row + j * 4, cap(a, vload(F32, row + j * 4)))
        if a.window > 0:
            _hide(row, 0, min(count, position - a.window + 1 - token))
        _hide(row, max(0, min(count, position + 1 - token)), (count + LANES - 1) // LANES * LANES)
        old_max = read(F32, state + r * 8)
        new_max, total = _soften(row, count, old_max)
        correction = vexp2(vsplat(old_max) - vsplat(new_max))
        if new_max > old_max:
            for v in range(a.head_dim // LANES):
                vstore(F32, line + v * 64, vload(F32, line + v * 64) * correction)
        write_f32(state + r * 8, new_max)
        # All lanes of the correction are equal.
        write_f32(state + r * 8 + 4, read(F32, state + r * 8 + 4) * hmax(correction) + total)


@compiled
def _weigh_chunk(a, cache, scaled, seq, head, rows, token, count, weights, out):
    done = 0
    while done < count:
        keys, room = block_of(a, seq, head, token + done)
        size = min(room, count - done)
        if scaled is not None:
            _scale(rows, size, scales_of(a, room, keys) + a.kv_value, weights + done * 4)
        _weigh_few(a, cache, rows, size, keys + a.kv_value, weights + done * 4, out)
        done += size


@compiled
def _finish(a, kind, start, head, rows, state, out):
    for r in range(rows):
        target = a.out + (start + r // a.group) * a.out_token + (head * a.group + r % a.group) * a.out_head
        divisor = read(F32, state + r * 8 + 4)
        inverse = vsplat(F32(1.0) / divisor if divisor > F32(0.0) else F32(0.0))  # 0: a context without keys
        for v in range(a.head_dim // LANES):
            result = vload(F32, out + (r * a.head_dim + v * LANES) * 4) * inverse
            vstore(kind, target + v * LANES * a.element, result)


@compiled
def attend_few(a, kind, cache, scaled, seq, head, scratch):
    """Attend for all rows of a sequence.

    cache: the kind of its elements. scaled: None if these are the numbers themselves, without scales.
    """
    start = read_i32(a.bounds + seq * 4)
    rows = (read_i32(a.bounds + seq * 4 + 4) - start) * a.group
    context = read_i32(a.contexts + seq * 4)
    first_position = context - rows // a.group
    q = scratch
    out = q + FEW * a.head_dim * 4
    scores = out + FEW * a.head_dim * 4
    state = scores + FEW * SPAN * 4

    _begin(a, kind, start, head, rows, q, out, state)
    token = 0
    if a.window > 0:
        token = max(0, first_position - a.window + 1)
    while token < context:
        count = min(CHUNK, context - token)
        _scores_of_chunk(a, cache, scaled, seq, head, rows, token, count, context, q, scores)
        _soften_chunk(a, rows, token, count, first_position, scores, state, out)
        _weigh_chunk(a, cache, scaled, seq, head, rows, token, count, scores, out)
        token += count
    _finish(a, kind, start, head, rows, state, out)

"""Products of up to MOST_FEW tokens with quantised weights, in whole numbers, on processors with AMX.

A token's inputs become whole numbers of 24 bits: x = scale * q with the largest |q| at LARGEST, so that q is
three digits in base 256, each in [-128, 127]. A digit of a token is a column of bytes. Codes are bytes as
well, and AMX adds the products of 64 of both in int32, without rounding:

    out[t, n] = scale[t] * sum over digits of 256^digit * sum over tiles of
                scale[n, group] * (sum of code * digit - zero[n, group] * sum of digits)

A tile's term is a whole number below 2^24, exact in float32, so the sums over tiles round as those of a
product in float32 do. The column of a digit has the same sum whatever the other columns are: a token's
result does not depend on the number of tokens.

Codes of 8 bits go from the pages into registers as they lie; fewer bits are spread to bytes, ROWS outputs by
64 inputs at a time. Weights are read once, in the order in which they lie, and prefetched a block ahead.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu import amx
from kernels.cpu.attention_call import aligned
from kernels.cpu.bytes_tile import (
    ROWS,
    TILE_BYTES,
    add_tiles,
    largest,
    spread,
    turn,
    widen_levels,
    write_digits,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.quantized_call import BYTES, LAYOUT, levels_row, read_weight, words_of
from kernels.cpu.simd import (
    LANES,
    address_of,
    hmax,
    hsum,
    prefetch,
    read,
    read_i64,
    vfma,
    vload,
    vsplat,
    vstore,
    write_f32,
)
from kernels.cpu.team import Kernel, next_item
from kernels.packing import TILE
from kernels.quantized import QuantizedWeight

F32 = np.float32
MOST_FEW = 16  # tokens
DIGITS = 3
LARGEST = F32(127 * 2**16)  # three digits hold 127 * (1 + 2^8 + 2^16)
ITEMS_OF_THREAD = 2  # a thread reads long streams, and may take over from a busy one


@compiled
def _column_tiles(tokens):
    """Return the registers that the digits of all tokens fill."""
    return (DIGITS * tokens + LANES - 1) // LANES


@compiled
def _write_place(place, source, inverse, before, column, digits, sums):
    """Write a tile's digits of one place, and their sum, to a column of the registers behind `before`."""
    register, lane = before + column // LANES, column % LANES
    total = write_digits(place, source, inverse, digits + register * TILE_BYTES + lane * 4)
    write_f32(sums + (register * LANES + lane) * 4, hsum(total))


def _prepare(kind):
    """Write the digits of each token; an item is a token.

    Words: x and its row stride, factors of the inputs (float32) or 0; digits [tiles, column tiles, 16, 16, 4]
    int8, the sums of the digits [tiles, column tiles, 16] and the scales [tokens], float32; tokens, inputs,
    bytes of an element of x.
    """
    p = address_of(kind)
    x, x_row, factors, digits = read_i64(p + 16), read_i64(p + 24), read_i64(p + 32), read_i64(p + 40)
    sums, scales, tokens, inputs = read_i64(p + 48), read_i64(p + 56), read_i64(p + 64), read_i64(p + 72)
    size = read_i64(p + 80)
    columns = _column_tiles(tokens)
    item = next_item(p)
    if item < 0:
        return
    buffer, row = aligned(inputs)
    while item >= 0:
        top, spoilt = vsplat(F32(0.0)), vsplat(F32(0.0))
        for k in range(0, inputs, LANES):
            values = vload(kind, x + item * x_row + k * size)
            if factors != 0:
                values = values * vload(F32, factors + k * 4)
            vstore(F32, row + k * 4, values)
            top = largest(top, values)
            spoilt = vfma(values, vsplat(F32(0.0)), spoilt)  # NaN if any value is infinite or none
        most = hmax(top)
        write_f32(scales + item * 4, most / LARGEST + hsum(spoilt))
        inverse = vsplat(LARGEST / most if most > F32(0.0) else F32(0.0))
        for tile in range(inputs // TILE):
            source, first = row + tile * TILE * 4, item * DIGITS
            _write_place(0, source, inverse, tile * columns, first, digits, sums)
            _write_place(1, source, inverse, tile * columns, first + 1, digits, sums)
            _write_place(2, source, inverse, tile * columns, first + 2, digits, sums)
            if item == tokens - 1:  # leftovers may make sums of denormal numbers, which are slow
                for column in range(tokens * DIGITS, columns * LANES):
                    write_f32(sums + (tile * columns * LANES + column) * 4, F32(0.0))
        item = next_item(p)
    buffer[0] = 0  # keeps the buffer alive to here


@compiled
def _read_levels(w, unit, row, levels):
    """Read the levels of rows [row, row + ROWS) of a unit."""
    line = levels_row(w)
    scales = w.scales + unit * w.scales_unit + row * w.scales_row
    zeros = w.zeros + unit * w.zeros_unit + row * w.zeros_row
    for r in range(ROWS):
        place = levels + r * line
        widen_levels(scales + r * w.scales_row, zeros + r * w.zeros_row, w.groups, place, line // 2)


@compiled
def _multiply_rows(w, unit, row, digits, sums, columns, scratch, levels, totals, bytes_of_codes):
    """Compute totals [ROWS, columns, 16] for rows [row, row + ROWS) of the outputs' unit.

    The codes of the ROWS rows behind are prefetched, some of them in each walk through the tiles, so that the
    memory is always at work.
    """
    of_row = columns * LANES * 4
    for i in range(ROWS * columns):
        vstore(F32, totals + i * LANES * 4, vsplat(F32(0.0)))
    walks = columns if w.bits == 8 else columns + 1
    lines = (ROWS * w.bits // 8 + walks - 1) // walks  # lines of a tile in each walk
    for piece in range(w.in_units):
        _read_levels(w, unit + piece, row, levels)
        codes = w.codes + (unit + piece) * w.codes_unit + row * w.codes_row
        ahead = codes + ROWS * w.codes_row
        codes_tile, codes_row = TILE, w.codes_row
        if w.bits != 8:
            spread(w, codes, ahead, lines, bytes_of_codes)
            ahead += w.tiles * lines * 64
            codes, codes_tile, codes_row = bytes_of_codes, TILE_BYTES, TILE
        for column in range(columns):
            place = piece * w.tiles * columns + column
            add_tiles(
                w.tiles, w.group_halves // 2, codes, codes_tile, codes_row,
                digits + place * TILE_BYTES, columns * TILE_BYTES, sums + place * LANES * 4, of_row,
                levels, levels_row(w), ahead, lines, scratch, totals + column * LANES * 4, of_row,
            )  # fmt: skip
            ahead += w.tiles * lines * 64


@compiled
def _write_rows(kind, totals, columns, tokens, scales, bias, out, out_row):
    """Put the digits together, and write ROWS outputs of all tokens."""
    line = columns * LANES * 4
    for column in range(columns):
        turn(totals + column * LANES * 4, line)
    for t in range(tokens):
        total = vsplat(F32(0.0))
        for digit in range(DIGITS - 1, -1, -1):
            column = t * DIGITS + digit
            place = totals + column % LANES * line + column // LANES * LANES * 4
            total = vfma(total, vsplat(F32(256.0)), vload(F32, place))
        total = total * vsplat(read(F32, scales + t * 4))
        if bias != 0:
            total = total + vload(kind, bias)
        vstore(kind, out + t * out_row, total)


def _multiply_bytes(kind):
    """Multiply the digits by the codes; an item is a run of whole rows.

    Words: the weight; digits, their sums and the scales as `_prepare` writes them; bias or 0; out and its row
    stride, tokens, rows of an item, bytes of an element of out and bias. If a unit's rows are not a multiple
    of ROWS, its last ROWS rows overlap the ones before.
    """
    p = address_of(kind)
    w = read_weight(p + 16)
    q = p + 16 + BYTES
    digits, sums, scales, bias = read_i64(q), read_i64(q + 8), read_i64(q + 16), read_i64(q + 24)
    out, out_row, tokens = read_i64(q + 32), read_i64(q + 40), read_i64(q + 48)
    step, size = read_i64(q + 56), read_i64(q + 64)
    items = (w.rows + step - 1) // step  # work items of a unit
    columns = _column_tiles(tokens)
    item = next_item(p)
    if item < 0:
        return
    bytes_spread = 0 if w.bits == 8 else w.tiles * TILE_BYTES
    bytes_in_all = (2 + columns) * TILE_BYTES + ROWS * levels_row(w) + bytes_spread
    buffer, scratch = aligned(bytes_in_all // 4)
    totals = scratch + 2 * TILE_BYTES
    levels = totals + columns * TILE_BYTES
    bytes_of_codes = levels + ROWS * levels_row(w)
    amx.configure(scratch)
    while item >= 0:
        unit, first = item // items, item % items * step
        end = min(w.rows, first + step)
        start = w.codes + unit * w.codes_unit + min(first, w.rows - ROWS) * w.codes_row
        for line in range(0, ROWS * w.tiles * w.bits * 8, 64):
            prefetch(start + line)
        for begin in range(first, end, ROWS):
            row = min(begin, w.rows - ROWS)
            _multiply_rows(w, unit, row, digits, sums, columns, scratch, levels, totals, bytes_of_codes)
            n = unit * w.rows + row
            added = bias + n * size if bias != 0 else 0
            _write_rows(kind, totals, columns, tokens, scales, added, out + n * size, out_row)
        item = next_item(p)
    amx.release()
    buffer[0] = 0  # keeps the buffer alive to here


# --------------------------------------------------------------------------- the call

PREPARE = Kernel(_prepare, "q" * 9)
MULTIPLY = Kernel(_multiply_bytes, LAYOUT + "q" * 9)


def can_multiply(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Return True if the kernels here can multiply x [T, K] by the weight."""
    return (
        amx.CAN_USE
        and 0 < x.shape[0] <= MOST_FEW
        and weight.unit_outputs >= ROWS
        and not weight.group % TILE
        and x.stride(1) == 1
    )


def few_bytes(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [T, K] by the weight and add bias [N]: [T, N]."""
    tokens, inputs, size = x.shape[0], weight.num_inputs, x.element_size()
    w, tiles = words_of(weight), inputs // TILE
    columns = -(-DIGITS * tokens // LANES)
    digits = torch.empty(tiles, columns, TILE_BYTES, dtype=torch.uint8)
    sums, scales = torch.empty(tiles, columns, LANES), torch.empty(tokens)
    out = torch.empty(tokens, weight.num_outputs, dtype=x.dtype)
    factors = 0 if weight.input_scale is None else weight.input_scale.data_ptr()
    PREPARE(
        x.dtype,
        tokens,
        *(x.data_ptr(), x.stride(0) * size, factors, digits.data_ptr(), sums.data_ptr(), scales.data_ptr()),
        *(tokens, inputs, size),
    )
    step = -(-w.out_units * w.rows // (ITEMS_OF_THREAD * torch.get_num_threads()))
    step = -(-min(step, w.rows) // ROWS) * ROWS
    MULTIPLY(
        x.dtype,
        w.out_units * -(-w.rows // step),
        *(*w, digits.data_ptr(), sums.data_ptr(), scales.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0) * size),
        *(tokens, step, size),
    )
    return out

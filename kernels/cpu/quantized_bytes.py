"""Products of up to MOST_FEW tokens with quantised weights, in whole numbers.

A token's inputs become whole numbers of 24 bits: x = scale * q with the largest |q| at LARGEST, so that q is
three digits in base 256, each in [-128, 127]. A digit of a token is a column of bytes. Codes are bytes as
well, and the processor adds the products of 64 of both in int32, without rounding, by AMX ("tiles") or by
vectors that multiply four bytes in each lane ("bytes": AVX-512 VNNI, AVX-VNNI):

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
    FOUR,
    FOUR_BYTES,
    ROWS,
    TILE_BYTES,
    add_tiles,
    dot_tiles,
    largest,
    spread,
    turn,
    turn_fours,
    widen_levels,
    write_digits,
)
from kernels.cpu.compiled import compiled
from kernels.cpu.quantized_call import WORDS, Weight, words_of
from kernels.cpu.simd import (
    LANES,
    hmax,
    hsum,
    prefetch,
    read,
    vfma,
    vload,
    vsplat,
    vstore,
    words,
    write_f32,
)
from kernels.cpu.team import Kernel, next_item
from kernels.packing import TILE
from kernels.quantized import QuantizedWeight

F32 = np.float32
MOST_FEW = 16  # tokens
DIGITS = 3
LARGEST = F32(127 * 2**16)  # three digits hold 127 * (1 + 2^8 + 2^16)
AT_ONCE = 4  # columns of digits whose sums of four rows stay in registers
LEAST_PREPARED = 64  # tiles of tokens: fewer are not worth a second thread
DIGITS_LAYOUT, BYTES_LAYOUT = "q" * 11, "q" * (WORDS + 10)
ITEMS_OF_THREAD = 2  # a thread reads long streams, and may take over from a busy one


@compiled
def _columns(tokens, width):
    """Return the registers that the digits of all tokens fill, `width` of them in each."""
    return (DIGITS * tokens + width - 1) // width


@compiled
def _read_x(kind, x, factors, size):
    """Return sixteen inputs, times their factors if there are any."""
    values = vload(kind, x)
    if factors != 0:
        values = values * vload(F32, factors)
    return values


@compiled
def _read_scales(kind, x, x_row, factors, tokens, inputs, size, scales):
    """Write the scale of each token; NaN if any of its inputs is infinite or none."""
    for t in range(tokens):
        top, spoilt = vsplat(F32(0.0)), vsplat(F32(0.0))
        for k in range(0, inputs, LANES):
            values = _read_x(kind, x + t * x_row + k * size, factors + k * 4 if factors else 0, size)
            top = largest(top, values)
            spoilt = vfma(values, vsplat(F32(0.0)), spoilt)
        write_f32(scales + t * 4, hmax(top) / LARGEST + hsum(spoilt))


@compiled
def _write_place(place, source, inverse, digits, sums, width, column):
    """Write a tile's digits of one place, and their sum, to a column."""
    register, lane = column // width, column % width
    if width == FOUR:
        total = hsum(
            write_digits(place, source, inverse, digits + register * FOUR_BYTES + lane * LANES, TILE)
        )
        for i in range(4):
            write_f32(sums + (register * LANES + lane * 4 + i) * 4, total)
    else:
        total = hsum(
            write_digits(place, source, inverse, digits + register * TILE_BYTES + lane * TILE, LANES)
        )
        write_f32(sums + column * 4, total)


def _prepare(kind):
    """Write the digits of all tokens; an item is a run of tiles.

    Words: x and its row stride, factors of the inputs (float32) or 0; digits and their sums, as `dot_tiles`
    (with a width of FOUR) or `add_tiles` (16) reads them, and the scales [tokens]; tokens, inputs, bytes of
    an element of x, tiles of an item, width. A thread has whole lines of the digits for itself.
    """
    x, x_row, factors, digits, sums, scales, tokens, inputs, size, step, width = words(kind, DIGITS_LAYOUT)
    columns = _columns(tokens, width)
    tile_bytes = columns * width * TILE
    item = next_item(kind)
    if item < 0:
        return
    buffer, own_scales = aligned(MOST_FEW + TILE)
    row = own_scales + MOST_FEW * 4
    _read_scales(kind, x, x_row, factors, tokens, inputs, size, own_scales)  # each thread for itself
    while item >= 0:
        if item == 0:
            for t in range(tokens):
                write_f32(scales + t * 4, read(F32, own_scales + t * 4))
        for tile in range(item * step, min(inputs // TILE, (item + 1) * step)):
            place, total = digits + tile * tile_bytes, sums + tile * columns * LANES * 4
            for t in range(tokens):
                for k in range(tile * TILE, (tile + 1) * TILE, LANES):
                    values = _read_x(kind, x + t * x_row + k * size, factors + k * 4 if factors else 0, size)
                    vstore(F32, row + (k - tile * TILE) * 4, values)
                scale = read(F32, own_scales + t * 4)
                inverse = vsplat(F32(1.0) / scale if scale > F32(0.0) else F32(0.0))
                _write_place(0, row, inverse, place, total, width, t * DIGITS)
                _write_place(1, row, inverse, place, total, width, t * DIGITS + 1)
                _write_place(2, row, inverse, place, total, width, t * DIGITS + 2)
            if width == LANES:
                for column in range(columns):
                    turn(place + column * TILE_BYTES, TILE)
            # Leftovers may make sums of denormal numbers, which are slow.
            for i in range(tokens * DIGITS * LANES // width, columns * LANES):
                write_f32(total + i * 4, F32(0.0))
        item = next_item(kind)
    buffer[0] = 0  # keeps the buffer alive to here


@compiled
def _read_levels(w, unit, row, levels):
    """Read the levels of rows [row, row + ROWS) of a unit: [groups, 2, ROWS], in whole vectors of groups."""
    scales = w.scales + unit * w.scales_unit + row * w.scales_row
    zeros = w.zeros + unit * w.zeros_unit + row * w.zeros_row
    line = 2 * ROWS * 4
    for group in range(0, w.groups, LANES):
        place = levels + group * line
        for r in range(ROWS):
            some, left = w.scales_row * r + group * 2, w.groups - group
            widen_levels(scales + some, zeros + w.zeros_row * r + group, left, place + r * line, ROWS * 4)
        turn(place, line)
        turn(place + ROWS * 4, line)


@compiled
def _dot_rows(w, codes, a_tile, a_row, digits, sums, columns, levels, totals, ahead, lines):
    """Add the products of ROWS rows of a unit to totals [ROWS / FOUR, columns, FOUR, 4], by vectors."""
    tiles, group, b_tile, s_tile = w.tiles, w.group_halves // 2, columns * FOUR_BYTES, columns * LANES * 4
    for first in range(0, columns, AT_ONCE):
        some = min(AT_ONCE, columns - first)
        b, s = digits + first * FOUR_BYTES, sums + first * LANES * 4
        for q in range(ROWS // FOUR):
            a, c = codes + q * FOUR * a_row, totals + q * s_tile + first * LANES * 4
            at = levels + q * FOUR * 4
            if a_tile == TILE // 2:
                if some == 1:
                    dot_tiles(1, 4, tiles, group, a, a_tile, a_row, b, b_tile, s, s_tile, at, ahead, lines, c)
                else:
                    dot_tiles(2, 4, tiles, group, a, a_tile, a_row, b, b_tile, s, s_tile, at, ahead, lines, c)
            elif some == 1:
                dot_tiles(1, 8, tiles, group, a, a_tile, a_row, b, b_tile, s, s_tile, at, ahead, lines, c)
            elif some == 2:
                dot_tiles(2, 8, tiles, group, a, a_tile, a_row, b, b_tile, s, s_tile, at, ahead, lines, c)
            elif some == 3:
                dot_tiles(3, 8, tiles, group, a, a_tile, a_row, b, b_tile, s, s_tile, at, ahead, lines, c)
            else:
                dot_tiles(4, 8, tiles, group, a, a_tile, a_row, b, b_tile, s, s_tile, at, ahead, lines, c)
            ahead += tiles * lines * 64


@compiled
def _multiply_rows(w, unit, row, digits, sums, columns, width, scratch, levels, totals, spread_codes):
    """Compute totals for rows [row, row + ROWS) of the outputs' unit, as `_dot_rows` or `add_tiles` has them.

    The codes of the ROWS rows behind are prefetched, some of them in each walk through the tiles, so that the
    memory is always at work.
    """
    of_row = columns * LANES * 4
    for i in range(ROWS * columns * width // LANES):
        vstore(F32, totals + i * LANES * 4, vsplat(F32(0.0)))
    walks = columns if width == LANES else ROWS // FOUR * ((columns + AT_ONCE - 1) // AT_ONCE)
    is_packed = w.bits == 4 and width == FOUR and columns <= 2  # then nothing is spread
    is_spread = w.bits != 8 and not is_packed
    walks += 1 if is_spread else 0
    lines = (ROWS * w.bits // 8 + walks - 1) // walks  # lines of a tile in each walk
    for piece in range(w.in_units):
        _read_levels(w, unit + piece, row, levels)
        codes = w.codes + (unit + piece) * w.codes_unit + row * w.codes_row
        ahead = codes + ROWS * w.codes_row
        codes_tile, codes_row = TILE // 2 if is_packed else TILE, w.codes_row
        if is_spread:
            spread(w, codes, ahead, lines, spread_codes)
            ahead += w.tiles * lines * 64
            codes, codes_tile, codes_row = spread_codes, TILE_BYTES, TILE
        digits_tile, first = columns * width * TILE, piece * w.tiles
        a, b = digits + first * digits_tile, sums + first * of_row
        if width == FOUR:
            _dot_rows(w, codes, codes_tile, codes_row, a, b, columns, levels, totals, ahead, lines)
            continue
        for column in range(columns):
            add_tiles(
                w.tiles, w.group_halves // 2, codes, codes_tile, codes_row,
                a + column * TILE_BYTES, digits_tile, b + column * LANES * 4, of_row,
                levels, ahead, lines, scratch, totals + column * LANES * 4, of_row,
            )  # fmt: skip
            ahead += w.tiles * lines * 64


@compiled
def _write_rows(kind, totals, columns, width, tokens, scales, bias, out, out_row):
    """Put the digits together, and write ROWS outputs of all tokens."""
    line = columns * LANES * 4
    for column in range(columns):
        if width == FOUR:
            turn_fours(totals + column * LANES * 4, line)
        else:
            turn(totals + column * LANES * 4, line)
    for t in range(tokens):
        total = vsplat(F32(0.0))
        for digit in range(DIGITS - 1, -1, -1):
            column = t * DIGITS + digit
            place = totals + column % width * line + column // width * LANES * 4
            total = vfma(total, vsplat(F32(256.0)), vload(F32, place))
        total = total * vsplat(read(F32, scales + t * 4))
        if bias != 0:
            total = total + vload(kind, bias)
        vstore(kind, out + t * out_row, total)


def _multiply_bytes(kind):
    """Multiply the digits by the codes; an item is a run of whole rows.

    Words: the weight; digits, their sums and the scales as `_prepare` writes them; bias or 0; out and its row
    stride, tokens, rows of an item, bytes of an element of out and bias, width. If a unit's rows are not a
    multiple of ROWS, its last ROWS rows overlap the ones before.
    """
    found = words(kind, BYTES_LAYOUT)
    w = Weight(*found[:WORDS])
    digits, sums, scales, bias, out, out_row, tokens, step, size, width = found[WORDS:]
    items = (w.rows + step - 1) // step  # work items of a unit
    columns = _columns(tokens, width)
    item = next_item(kind)
    if item < 0:
        return
    bytes_spread = 0 if w.bits == 8 else w.tiles * TILE_BYTES
    levels_bytes = (w.groups + LANES - 1) // LANES * LANES * 2 * ROWS * 4
    bytes_in_all = 2 * TILE_BYTES + columns * width * ROWS * 4 + levels_bytes + bytes_spread
    buffer, scratch = aligned(bytes_in_all // 4)
    totals = scratch + 2 * TILE_BYTES
    levels = totals + columns * width * ROWS * 4
    spread_codes = levels + levels_bytes
    if width == LANES:
        amx.configure(scratch)
    while item >= 0:
        unit, first = item // items, item % items * step
        end = min(w.rows, first + step)
        start = w.codes + unit * w.codes_unit + min(first, w.rows - ROWS) * w.codes_row
        for line in range(0, ROWS * w.tiles * w.bits * 8, 64):
            prefetch(start + line)
        for begin in range(first, end, ROWS):
            row = min(begin, w.rows - ROWS)
            _multiply_rows(w, unit, row, digits, sums, columns, width, scratch, levels, totals, spread_codes)
            n = unit * w.rows + row
            added = bias + n * size if bias != 0 else 0
            _write_rows(kind, totals, columns, width, tokens, scales, added, out + n * size, out_row)
        item = next_item(kind)
    if width == LANES:
        amx.release()
    buffer[0] = 0  # keeps the buffer alive to here


# --------------------------------------------------------------------------- the call

PREPARE = Kernel(_prepare, DIGITS_LAYOUT)
MULTIPLY = Kernel(_multiply_bytes, BYTES_LAYOUT)


def can_multiply(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Return True if the kernels here can multiply x [T, K] by the weight, on a processor that has them."""
    return (
        0 < x.shape[0] <= MOST_FEW
        and weight.unit_outputs >= ROWS
        and not weight.group % TILE
        and x.stride(1) == 1
    )


def few_bytes(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, *, by_tiles: bool
) -> torch.Tensor:
    """Multiply x [T, K] by the weight and add bias [N]: [T, N]; by_tiles: by AMX, with the same bits."""
    tokens, inputs, size = x.shape[0], weight.num_inputs, x.element_size()
    w, tiles = words_of(weight), inputs // TILE
    width = LANES if by_tiles else FOUR
    columns = -(-DIGITS * tokens // width)
    digits = torch.empty(tiles, columns * width * TILE, dtype=torch.uint8)
    sums, scales = torch.empty(tiles, columns, LANES), torch.empty(tokens)
    out = torch.empty(tokens, weight.num_outputs, dtype=x.dtype)
    factors = 0 if weight.input_scale is None else weight.input_scale.data_ptr()
    items = 1 if tokens * tiles < LEAST_PREPARED else torch.get_num_threads()
    run = -(-tiles // items)
    PREPARE(
        x.dtype,
        -(-tiles // run),
        *(x.data_ptr(), x.stride(0) * size, factors, digits.data_ptr(), sums.data_ptr(), scales.data_ptr()),
        *(tokens, inputs, size, run, width),
    )
    step = -(-w.out_units * w.rows // (ITEMS_OF_THREAD * torch.get_num_threads()))
    step = -(-min(step, w.rows) // ROWS) * ROWS
    MULTIPLY(
        x.dtype,
        w.out_units * -(-w.rows // step),
        *(*w, digits.data_ptr(), sums.data_ptr(), scales.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0) * size),
        *(tokens, step, size, width),
    )
    return out

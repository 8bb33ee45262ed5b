"""Packed codes to weights on a GPU, a tile of 64 inputs at a time (`kernels.packing`).

A tile comes in PARTS of WIDTH inputs at one place of the bytes of the widest plane: a part is one load and
one shift for each plane, and one product. It lies within half a tile, so one scale and zero to an output
suffice. Rows are outputs of a unit. Strides count elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import triton
import triton.language as tl

HALF_TILE = tl.constexpr(32)
TILE = tl.constexpr(64)


@triton.jit
def _pieces_of_part(
    tile, inside, part: tl.constexpr, W: tl.constexpr, LOWEST: tl.constexpr, WIDTH: tl.constexpr
):
    """Load pieces int32 [WIDTH, rows] of a part from the plane of W bits, shifted to their place."""
    lane = tl.arange(0, WIDTH)[:, None]
    plane = tile + 8 * LOWEST
    if W == 1:
        loaded = tl.load(plane + (part * WIDTH + lane) // 8, mask=inside, other=0).to(tl.int32)
        pieces = (loaded >> lane % 8) & 1
    elif WIDTH <= 8 * W:
        loaded = tl.load(plane + part * WIDTH % (8 * W) + lane, mask=inside, other=0).to(tl.int32)
        pieces = (loaded >> (part * WIDTH // (8 * W) * W)) & (2**W - 1)
    else:
        inputs = part * WIDTH + lane
        loaded = tl.load(plane + inputs % (8 * W), mask=inside, other=0).to(tl.int32)
        pieces = (loaded >> (inputs // (8 * W) * W)) & (2**W - 1)
    return pieces << LOWEST


@triton.jit
def _codes_of_part(tile, inside, part: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr):
    """Load codes int32 [WIDTH, rows] of a part of the tiles at `tile` [1, rows]."""
    codes = 0
    if BITS & 8:
        codes |= _pieces_of_part(tile, inside, part, 8, 0, WIDTH)
    if BITS & 4:
        codes |= _pieces_of_part(tile, inside, part, 4, BITS & 8, WIDTH)
    if BITS & 2:
        codes |= _pieces_of_part(tile, inside, part, 2, BITS & 12, WIDTH)
    if BITS & 1:
        codes |= _pieces_of_part(tile, inside, part, 1, BITS & 14, WIDTH)
    return codes


@triton.jit
def _weights_of_part(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    tile,
    group_halves,
    inside,
    part: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Decode float32 [WIDTH, rows] of a part of tile number `tile`; the pointers [1, rows] are the rows'."""
    codes = _codes_of_part(codes_ptr + tile * (8 * BITS), inside, part, BITS, WIDTH)
    group = (2 * tile + part * WIDTH // HALF_TILE) // group_halves
    scale = tl.load(scales_ptr + group, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros_ptr + group, mask=inside, other=0).to(tl.int32)
    return (codes - zero).to(tl.float32) * scale


@triton.jit(do_not_specialize=("tokens", "splits", "x_stride"))
def product_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    input_scale_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    splits,
    x_stride,
    codes_unit,
    codes_row,
    scales_unit,
    scales_row,
    zeros_unit,
    zeros_row,
    unit_rows,
    row_blocks,
    unit_tiles,
    in_units,
    group_halves,
    num_outputs,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_INPUT_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Multiply x by the weight into out [splits, T, N], contiguous.

    Grid (out_units * row_blocks, ceil(T / BLOCK_T), splits). Inputs are in in_units units of unit_tiles tiles
    each; a split takes an equal run of all tiles.
    """
    unit = (tl.program_id(0) // row_blocks).to(tl.int64)
    row = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    is_row = row < unit_rows
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    is_token = token < tokens
    codes_ptr += row.to(tl.int64) * codes_row
    scales_ptr += row.to(tl.int64) * scales_row
    zeros_ptr += row.to(tl.int64) * zeros_row
    x_ptr += token.to(tl.int64) * x_stride
    all_tiles = in_units * unit_tiles
    begin = all_tiles * tl.program_id(2) // splits
    end = all_tiles * (tl.program_id(2) + 1) // splits
    total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for index in range(begin, end):
        place = unit + index // unit_tiles
        for part in tl.static_range(PARTS):
            w = _weights_of_part(
                codes_ptr + place * codes_unit,
                scales_ptr + place * scales_unit,
                zeros_ptr + place * zeros_unit,
                index % unit_tiles,
                group_halves,
                is_row,
                part,
                BITS,
                WIDTH,
            )
            column = index * TILE + part * WIDTH + tl.arange(0, WIDTH)[None, :]
            x = tl.load(x_ptr + column, mask=is_token, other=0.0)
            if HAS_INPUT_SCALE:
                x = x.to(tl.float32) * tl.load(input_scale_ptr + column).to(tl.float32)
            total = tl.dot(x.to(OPERAND), w.to(OPERAND), total, input_precision="ieee")
    output = unit * unit_rows + row
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_row, other=0.0).to(tl.float32)
    place = (tl.program_id(2) * tokens + token).to(tl.int64) * num_outputs + output
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_token & is_row)


@triton.jit(do_not_specialize=("first", "count"))
def decode_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    first,
    count,
    codes_unit,
    codes_row,
    scales_unit,
    scales_row,
    zeros_unit,
    zeros_row,
    unit_rows,
    unit_tiles,
    group_halves,
    num_inputs,
    BITS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Decode outputs [first, first + count) into out [count, K], contiguous.

    Grid (ceil(count / BLOCK_N), tiles of all inputs).
    """
    offset = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = offset < count
    row = (first + offset) % unit_rows
    unit = (first + offset) // unit_rows + tl.program_id(1) // unit_tiles  # one of the two is 0
    codes_ptr += unit.to(tl.int64) * codes_unit + row.to(tl.int64) * codes_row
    scales_ptr += unit.to(tl.int64) * scales_unit + row.to(tl.int64) * scales_row
    zeros_ptr += unit.to(tl.int64) * zeros_unit + row.to(tl.int64) * zeros_row
    tile = tl.program_id(1) % unit_tiles
    place = out_ptr + offset.to(tl.int64) * num_inputs + tl.program_id(1) * TILE
    for part in tl.static_range(PARTS):
        w = _weights_of_part(codes_ptr, scales_ptr, zeros_ptr, tile, group_halves, inside, part, BITS, WIDTH)
        lane = tl.arange(0, WIDTH)[:, None]
        tl.store(place + part * WIDTH + lane, w.to(out_ptr.dtype.element_ty), mask=inside)

"""Products with quantised weights of which bytes lie on 16: weights times tokens, tile by tile.

Weights are the left operand of the tensor cores: decoded (`kernels.gpu.codes`) they stay in registers, and
tokens come from shared memory. In wide programs, for many tokens, weights go back to shared memory, since
the registers of a warpgroup's left operand take two bytes a load. Bytes, tokens and words of scales and zeros
are copied there STAGES ahead. Rows are outputs of a unit. Nothing that a launch passes is specialised but
pointers, so a program compiled once serves every shape.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gpu.codes import weights_of

TILE = tl.constexpr(64)


@triton.jit
def _words(ptr):
    """Return the pointer to words uint32, which are loaded ahead; narrower loads are not."""
    return ptr.to(tl.pointer_type(tl.uint32))


@triton.jit
def _scale_of(low, high, place: tl.constexpr):
    """Return float16 number `place` of the four in the two words uint32 of each row."""
    words = low if place < 2 else high
    return ((words >> (place % 2 * 16)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def _third_words(at, is_row, part: tl.constexpr):
    """Load words uint32 of the tiles at `at`: shifted by a code's place, bit 2 is its third bit."""
    words = tl.load(_words(at + (16 + part // 2 * 4)), mask=is_row, other=0)
    return words >> 14 if part % 2 else words << 2


@triton.jit
def _part_of(
    pieces,
    at,
    is_row,
    shifts,
    zero,
    scale,
    part: tl.constexpr,
    BITS: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_ASM: tl.constexpr,
    IS_SCALED: tl.constexpr,
):
    """Decode a part [rows, bytes] of the tiles at `at`."""
    high = pieces
    if BITS == 3:
        high = (_third_words(at, is_row, part) >> shifts).to(tl.uint8)
    return weights_of(pieces, high, zero, scale, part, BITS, OPERAND, HAS_ASM, IS_SCALED)


@triton.jit
def _whole_tile(
    pieces,
    at,
    is_row,
    shifts,
    zero,
    scale,
    BITS: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_ASM: tl.constexpr,
):
    """Decode [rows, 64] of the tiles at `at`, their parts side by side."""
    w = _part_of(pieces, at, is_row, shifts, zero, scale, 0, BITS, OPERAND, HAS_ASM, True)
    if BITS != 8:
        second = _part_of(pieces, at, is_row, shifts, zero, scale, 1, BITS, OPERAND, HAS_ASM, True)
        w = tl.join(w, second)  # [rows, bytes, 2]
        if BITS == 3:
            third = _part_of(pieces, at, is_row, shifts, zero, scale, 2, BITS, OPERAND, HAS_ASM, True)
            fourth = _part_of(pieces, at, is_row, shifts, zero, scale, 3, BITS, OPERAND, HAS_ASM, True)
            w = tl.join(w, tl.join(third, fourth)).permute(0, 3, 2, 1)
        else:
            w = w.permute(0, 2, 1)
        w = w.reshape(w.shape[0], TILE)
    return w


@triton.jit(
    do_not_specialize=(
        "tokens",
        "splits",
        "x_stride",
        "codes_unit",
        "codes_row",
        "scales_unit",
        "scales_row",
        "zeros_unit",
        "zeros_row",
        "scales_skew",
        "zeros_skew",
        "unit_rows",
        "row_blocks",
        "unit_tiles",
        "in_units",
        "group_tiles",
        "num_outputs",
    ),
    do_not_specialize_on_alignment=("scales_ptr", "zeros_ptr", "bias_ptr"),
)
def tiles_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    lanes_ptr,
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
    scales_skew,
    zeros_skew,
    unit_rows,
    row_blocks,
    unit_tiles,
    in_units,
    group_tiles,
    num_outputs,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_WORDS: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    IS_ONE_UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OPERAND: tl.constexpr,
    HAS_ASM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES_SUMS: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """Multiply x by the weight into out [splits, T, N], contiguous.

    Grid (out_units * row_blocks, ceil(T / BLOCK_T), splits). A step takes TILES tiles of a unit, a split an
    equal run of all steps. x_stride counts 8 elements, codes_unit and codes_row count 16 bytes. HAS_WORDS: a
    group has GROUP_TILES tiles, a power of two; else group_tiles. Scales and zeros then lie skew elements
    behind 4 bytes, and those of a step in one word, or two of scales. lanes_ptr: int32 0..15. SCALES_SUMS:
    scales multiply the sums of a tile, not its weights. IS_WIDE: weights are the right operand, a whole tile
    at once; both operands are in shared memory.
    """
    PARTS: tl.constexpr = 1 if BITS == 8 else (2 if BITS == 4 else 4)
    WIDTH: tl.constexpr = 64 // PARTS  # bytes of a tile's widest plane
    GROUPS: tl.constexpr = max(1, TILES // GROUP_TILES)  # of a step
    unit = tl.program_id(0) // row_blocks
    row = tl.program_id(0) % row_blocks * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    is_row = row < unit_rows
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    is_token = token < tokens
    lane = tl.arange(0, WIDTH)
    codes_ptr += row.to(tl.int64) * codes_row * 16
    if HAS_WORDS:
        scales_ptr -= scales_skew
        zeros_ptr -= zeros_skew
    x_ptr += token.to(tl.int64) * x_stride * 8 + tl.arange(0, TILE if IS_WIDE else WIDTH)[:, None]
    unit_steps = unit_tiles // TILES
    all_steps = in_units * unit_steps
    begin = all_steps * tl.program_id(2) // splits
    end = all_steps * (tl.program_id(2) + 1) // splits
    total = tl.zeros([BLOCK_T, BLOCK_N] if IS_WIDE else [BLOCK_N, BLOCK_T], tl.float32)
    shifts = 0
    if BITS == 3:
        shifts = tl.load(lanes_ptr + tl.arange(0, 16)[None, :])
    for index in tl.range(begin, end, num_stages=STAGES):
        if IS_ONE_UNIT:  # dividing takes a tenth of a step's instructions
            of_unit = unit.to(tl.int64)
            first = index * TILES
        else:
            of_unit = (unit + index // unit_steps).to(tl.int64)
            first = index % unit_steps * TILES
        codes_at = codes_ptr + of_unit * codes_unit * 16 + first * (8 * BITS)
        if HAS_WORDS:
            group = first // GROUP_TILES
            zeros_in = row * zeros_row + (of_unit * zeros_unit + group + zeros_skew)
            scales_in = row * scales_row + (of_unit * scales_unit + group + scales_skew)
            zeros_word = zeros_in if GROUPS == 4 else zeros_in // 4 * 4
            scales_word = scales_in if GROUPS > 1 else scales_in // 2 * 2
            four_zeros = tl.load(_words(zeros_ptr + zeros_word), mask=is_row, other=0)
            scales_low = tl.load(_words(scales_ptr + scales_word), mask=is_row, other=0)
            scales_high = scales_low
            # Which of a word comes from memory too: Triton moves no layout ahead of what it computes.
            if GROUPS < 4:
                four_zeros = four_zeros >> (tl.load(lanes_ptr + zeros_in % 4) * 8)
            if GROUPS == 1:
                scales_low = scales_low >> (tl.load(lanes_ptr + scales_in % 2) * 16)
            if GROUPS == 4:
                scales_high = tl.load(_words(scales_ptr + (scales_word + 2)), mask=is_row, other=0)
        for tile in tl.static_range(TILES):
            if HAS_WORDS:
                scale = _scale_of(scales_low, scales_high, tile // GROUP_TILES)
                zero = ((four_zeros >> (tile // GROUP_TILES * 8)) & 255).to(tl.int32)
            else:
                group = (first + tile) // group_tiles
                scales_at = scales_ptr + (row.to(tl.int64) * scales_row + of_unit * scales_unit)
                zeros_at = zeros_ptr + (row.to(tl.int64) * zeros_row + of_unit * zeros_unit)
                scale = tl.load(scales_at + group, mask=is_row, other=0.0)
                zero = tl.load(zeros_at + group, mask=is_row, other=0)
            at = codes_at + tile * (8 * BITS)
            pieces = tl.load(at + lane[None, :], mask=is_row, other=0)
            x_at = x_ptr + (index * TILES + tile) * TILE
            if IS_WIDE:
                w = _whole_tile(pieces, at, is_row, shifts, zero, scale, BITS, OPERAND, HAS_ASM)
                x = tl.load(x_at, mask=is_token, other=0.0).to(OPERAND)
                total = tl.dot(tl.trans(x), tl.trans(w), total, input_precision="ieee")
            if SCALES_SUMS:
                sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for part in tl.static_range(0 if IS_WIDE else PARTS):
                x = tl.load(x_at + part * WIDTH, mask=is_token, other=0.0)
                w = _part_of(
                    pieces, at, is_row, shifts, zero, scale, part, BITS, OPERAND, HAS_ASM, not SCALES_SUMS
                )
                if SCALES_SUMS:
                    sums = tl.dot(w, x.to(OPERAND), sums, input_precision="ieee")
                else:
                    total = tl.dot(w, x.to(OPERAND), total, input_precision="ieee")
            if SCALES_SUMS:
                total += sums * scale.to(tl.float32)
    output = unit * unit_rows + row
    if IS_WIDE:
        total = tl.trans(total)
    if HAS_BIAS:
        total += tl.load(bias_ptr + output, mask=is_row, other=0.0).to(tl.float32)
    out_ptr += (tl.program_id(2) * tokens).to(tl.int64) * num_outputs
    tl.store(
        out_ptr + (token * num_outputs + output), total.to(out_ptr.dtype.element_ty), mask=is_token & is_row
    )


@triton.jit(do_not_specialize=("splits", "size", "num_outputs"))
def join_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    splits,
    size,
    num_outputs,
    HAS_BIAS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the splits of partial float32 [splits, T, N] in their order; grid (ceil(size / BLOCK)), size T * N.

    MOST is at least the number of splits.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(MOST):
        at = partial_ptr + tl.full([], split, tl.int64) * size + place
        total += tl.load(at, mask=inside & (split < splits), other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + place % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=(
        "first",
        "count",
        "codes_unit",
        "codes_row",
        "scales_unit",
        "scales_row",
        "zeros_unit",
        "zeros_row",
        "unit_rows",
        "unit_tiles",
        "group_tiles",
        "num_inputs",
    ),
    do_not_specialize_on_alignment=("scales_ptr", "zeros_ptr"),
)
def decode_tiles_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    lanes_ptr,
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
    group_tiles,
    num_inputs,
    BITS: tl.constexpr,
    TILES: tl.constexpr,
    HAS_ASM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Decode outputs [first, first + count) into out [count, K], contiguous.

    Grid (tiles of all inputs / TILES, ceil(count / BLOCK_N)); strides as `tiles_kernel` takes them.
    """
    PARTS: tl.constexpr = 1 if BITS == 8 else (2 if BITS == 4 else 4)
    WIDTH: tl.constexpr = 64 // PARTS
    # One dimension where each thread has a row once: of [rows, 1] it loads one for each of its columns.
    offset = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row = offset < count
    inside = is_row[:, None]
    lane = tl.arange(0, WIDTH)[None, :]
    row = (first + offset) % unit_rows
    all_tiles = tl.program_id(0) * TILES
    unit = (first + offset) // unit_rows + all_tiles // unit_tiles  # one of the two is 0
    codes_ptr += unit.to(tl.int64) * codes_unit * 16 + row.to(tl.int64) * codes_row * 16
    scales_ptr += unit.to(tl.int64) * scales_unit + row.to(tl.int64) * scales_row
    zeros_ptr += unit.to(tl.int64) * zeros_unit + row.to(tl.int64) * zeros_row
    out_ptr += offset.to(tl.int64)[:, None] * num_inputs + all_tiles * TILE + lane
    shifts = 0
    if BITS == 3:
        shifts = tl.load(lanes_ptr + tl.arange(0, 16)[None, :])
    for tile in tl.static_range(TILES):
        index = all_tiles % unit_tiles + tile
        scale = tl.load(scales_ptr + index // group_tiles, mask=is_row, other=0.0)[:, None]
        zero = tl.load(zeros_ptr + index // group_tiles, mask=is_row, other=0)[:, None]
        at = codes_ptr + index * (8 * BITS)
        pieces = tl.load(at[:, None] + lane, mask=inside, other=0)
        for part in tl.static_range(PARTS):
            high = pieces
            if BITS == 3:
                high = (_third_words(at, is_row, part)[:, None] >> shifts).to(tl.uint8)
            w = weights_of(pieces, high, zero, scale, part, BITS, out_ptr.dtype.element_ty, HAS_ASM)
            tl.store(out_ptr + (tile * TILE + part * WIDTH), w, mask=inside)


@triton.jit(do_not_specialize=("x_stride",))
def scale_kernel(x_ptr, scale_ptr, out_ptr, x_stride, num_inputs, BLOCK: tl.constexpr):
    """Multiply x [T, K] by scale [K] into out [T, K], contiguous; grid (T, ceil(K / BLOCK))."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_inputs
    x = tl.load(x_ptr + token * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * num_inputs + place, (x * scale).to(out_ptr.dtype.element_ty), mask=inside)

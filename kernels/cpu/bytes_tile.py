"""The micro-kernels of `kernels.cpu.quantized_bytes`, from a small code generator."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu import amx
from kernels.cpu.amx import ROW_BYTES, TILE_ROWS, emit_product
from kernels.cpu.codes import lanes_below, masked
from kernels.cpu.processor import has_all
from kernels.cpu.quantized_call import Weight
from kernels.cpu.simd import (
    F16,
    F32,
    I1,
    I8,
    I32,
    I64,
    LANES,
    Int,
    Literal,
    Value,
    Vec,
    add_product,
    call,
    constant,
    emit_prefetch,
    fused_multiply_add,
    intrinsic_of,
    load,
    load_as,
    load_splat,
    nth,
    plus,
    registers,
    store,
    store_as,
    times,
    vector,
    wide,
)
from kernels.packing import CODE_BITS, TILE, planes

ROWS = TILE_ROWS  # outputs worked on together
TILE_BYTES = ROWS * ROW_BYTES
FOUR = 4  # rows, and digits, that a vector without AMX works on together
FOUR_BYTES = FOUR * TILE  # of a tile's digits
IS_WIDE = has_all("avx512f", "avx512bw", "avx512vnni")
MOST = 127.0 * (1 + 2**8 + 2**16)  # that three digits hold
CAN_DOT = IS_WIDE or has_all("avx2", "avxvnni")  # products of bytes in vectors, without AMX


# --------------------------------------------------------------------------- from inputs to digits


@intrinsic_of
def largest(builder: Any, most: Vec, x: Vec) -> Vec:
    """Return the larger of `most` and |x|, lane by lane; `most` where x is a NaN."""
    size = call(builder, "llvm.fabs.v16f32", wide(F32), x)
    return call(builder, "llvm.maxnum.v16f32", wide(F32), most, size)


@intrinsic_of
def write_digits(builder: Any, place: Literal, x: Int, factor: Vec, address: Int, step: Int) -> Vec:
    """Round a tile of x times factor to whole numbers; write the digits of one place in base 256.

    0 is the lowest place. x is the byte address of 64 float32, factor a vector. A digit is in
    [-128, 127]. Sixteen digits lie together; `step` bytes on lie the next ones. Returns the digits' sums,
    lane by lane.
    """
    shift = 8 * place
    sums = constant(I32, 0)
    for i in range(TILE // LANES):
        values = load(builder, types.float32, plus(builder, x, i * LANES * 4))
        whole = call(builder, "llvm.rint.v16f32", wide(F32), builder.fmul(values, factor))
        # What is out of range and what is none have no int32; their token's scale is a NaN.
        for sign, bound in (("<", MOST), (">", -MOST)):
            is_inside = builder.fcmp_ordered(sign, whole, constant(F32, bound))
            whole = builder.select(is_inside, whole, constant(F32, bound))
        whole = builder.fptosi(whole, wide(I32))
        half = 0x8080 & (1 << shift) - 1  # borrow of lower digits below 0
        moved = builder.ashr(builder.add(whole, constant(I32, half)), constant(I32, shift))
        digits = builder.trunc(moved, wide(I8))
        sums = builder.add(sums, builder.sext(digits, wide(I32)))
        store_as(builder, digits, nth(builder, address, step, i))
    return builder.sitofp(sums, wide(F32))


# --------------------------------------------------------------------------- from codes to bytes


@intrinsic_of
def spread(builder: Any, w: Value, codes: Int, ahead: Int, lines: Int, target: Int) -> None:
    """Write the codes of ROWS rows of a unit as bytes [tiles, ROWS, 64].

    For each tile `lines` lines are prefetched, from `ahead` on.
    """
    stride, tiles, found = (
        builder.extract_value(w, Weight._fields.index(name)) for name in ("codes_row", "tiles", "bits")
    )
    for bits in CODE_BITS:
        with (
            builder.if_then(builder.icmp_signed("==", found, ir.Constant(I64, bits))),
            cgutils.for_range(builder, tiles) as loop,
        ):
            _prefetch_lines(builder, ahead, lines, loop.index)
            tile = builder.add(codes, times(builder, loop.index, 8 * bits))
            place = builder.add(target, times(builder, loop.index, TILE_BYTES))
            for r in range(ROWS):
                unpacked = _unpacked(builder, nth(builder, tile, stride, r), bits)
                store_as(builder, unpacked, plus(builder, place, r * TILE), TILE)


def _unpacked(builder: Any, tile: Any, bits: int) -> Any:
    """Return the codes of the tile at a byte address, each in a byte."""
    total = None
    for width, lowest in planes(bits):
        pieces = _plane(builder, plus(builder, tile, 8 * lowest), width, lowest)
        total = pieces if total is None else builder.or_(total, pieces)
    return total


def _plane(builder: Any, address: Any, width: int, lowest: int) -> Any:
    """Return the pieces of a plane (`kernels.packing`), each in a byte, from bit `lowest` on."""
    if width == 1:
        mask = builder.bitcast(load_as(builder, I64, address), ir.VectorType(I1, TILE))
        ones, none = (vector(I8, [value] * TILE) for value in (2**lowest, 0))
        return builder.select(mask, ones, none)
    length, places = 8 * width, 8 // width
    raw = load_as(builder, ir.VectorType(I8, length), address)
    repeated = builder.shuffle_vector(raw, raw, vector(I32, [*range(length)] * places))
    # A byte's upper bits are the next byte's after a shift of words: the mask takes them off.
    words = builder.bitcast(repeated, wide(I32))
    shifts = [width * place for place in range(places) for _ in range(length // 4)]
    words = builder.lshr(words, vector(I32, shifts))
    words = builder.and_(words, constant(I32, (2**width - 1) * 0x01010101))
    if lowest:
        words = builder.shl(words, constant(I32, lowest))
    return builder.bitcast(words, ir.VectorType(I8, TILE))


@intrinsic_of
def widen_levels(builder: Any, scales: Int, zeros: Int, count: Int, target: Int, step: Int) -> None:
    """Write up to 16 scales and, behind `step` bytes, zeros as float32, each a whole vector."""
    inside = lanes_below(builder, count)
    scale = builder.fpext(masked(builder, F16, scales, inside), wide(F32))
    zero = builder.uitofp(masked(builder, I8, zeros, inside), wide(F32))
    store(builder, types.float32, target, scale)
    store(builder, types.float32, builder.add(target, step), zero)


# --------------------------------------------------------------------------- from products to sums


@intrinsic_of
def add_tiles(
    builder: Any,
    tiles: Int,
    tiles_of_group: Int,
    codes: Int,
    codes_tile: Int,
    codes_row: Int,
    digits: Int,
    digits_tile: Int,
    sums: Int,
    sums_tile: Int,
    levels: Int,
    ahead: Int,
    lines: Int,
    scratch: Int,
    totals: Int,
    totals_row: Int,
) -> None:
    """Compute totals[r] += sum over tiles of scale[r] * (codes[r] . digits - zero[r] * sums) for ROWS rows.

    Byte addresses and strides: codes uint8 [tiles, ROWS, 64]; digits int8 [tiles, 16, 16, 4]; sums float32
    [tiles, 16]; levels float32 [groups, 2, ROWS], scales and zeros; totals float32 [ROWS, 16], which stay in
    registers. For each tile `lines` lines are prefetched, from `ahead` on. The products of a
    tile are made while those of the tile before, in the other half of scratch, are added up: it takes a
    hundred cycles until they can be read.
    """
    if not amx.CAN_USE:
        return
    last = builder.sub(tiles, ir.Constant(I64, 1))
    rows = [nth(builder, totals, totals_row, r) for r in range(ROWS)]
    sums_of_rows = registers(builder, [load(builder, types.float32, row) for row in rows])

    def half_of_scratch(index: Any) -> Any:
        parity = builder.and_(index, ir.Constant(I64, 1))
        return builder.add(scratch, times(builder, parity, TILE_BYTES))

    def multiply(index: Any) -> None:
        weights = builder.add(codes, builder.mul(index, codes_tile))
        inputs = builder.add(digits, builder.mul(index, digits_tile))
        emit_product(builder, weights, codes_row, inputs, half_of_scratch(index))

    multiply(ir.Constant(I64, 0))
    with cgutils.for_range(builder, tiles) as loop:
        _prefetch_lines(builder, ahead, lines, loop.index)
        following = builder.add(loop.index, ir.Constant(I64, 1))
        is_inside = builder.icmp_signed("<", following, tiles)
        multiply(builder.select(is_inside, following, last))
        level = _level(builder, levels, loop.index, tiles_of_group)
        products = half_of_scratch(loop.index)
        of_digits = load(builder, types.float32, builder.add(sums, builder.mul(loop.index, sums_tile)))
        of_digits = builder.fsub(constant(F32, 0.0), of_digits)
        for r, register in enumerate(sums_of_rows):
            scale = load_splat(builder, types.float32, plus(builder, level, 4 * r))
            zero = load_splat(builder, types.float32, plus(builder, level, 4 * (ROWS + r)))
            product = load_as(builder, wide(I32), plus(builder, products, r * LANES * 4))
            term = fused_multiply_add(builder, zero, of_digits, builder.sitofp(product, wide(F32)))
            add_product(builder, register, scale, term)
    for register, place in zip(sums_of_rows, rows, strict=True):
        store(builder, types.float32, place, builder.load(register))


def _level(builder: Any, levels: Any, tile: Any, tiles_of_group: Any) -> Any:
    """Return the address of the levels [2, ROWS] of a tile's group."""
    # In 32 bits: a division of 64 takes three times as long.
    group = builder.udiv(builder.trunc(tile, I32), builder.trunc(tiles_of_group, I32))
    return builder.add(levels, times(builder, builder.zext(group, I64), 2 * ROWS * 4))


def _prefetch_lines(builder: Any, ahead: Any, lines: Any, tile: Any) -> None:
    """Prefetch the `lines` lines of a tile, from `ahead` on."""
    line = builder.mul(tile, lines)
    with cgutils.for_range(builder, lines) as of_line:
        at = builder.add(line, of_line.index)
        emit_prefetch(builder, builder.add(ahead, times(builder, at, 64)))


@intrinsic_of
def dot_tiles(
    builder: Any,
    num_columns: Literal,
    num_bits: Literal,
    tiles: Int,
    tiles_of_group: Int,
    codes: Int,
    codes_tile: Int,
    codes_row: Int,
    digits: Int,
    digits_tile: Int,
    sums: Int,
    sums_tile: Int,
    levels: Int,
    ahead: Int,
    lines: Int,
    totals: Int,
) -> None:
    """Compute what `add_tiles` does, in vectors: FOUR rows by FOUR * num_columns digits.

    num_columns and num_bits are literals: codes of 4 bits are taken as they are packed, by up to two columns;
    others are bytes. A vector multiplies four quads of one row by those of four digits, which lie as
    int8 [tiles, num_columns, 4, FOUR, 16]: for each 16 inputs, those of each digit. sums float32
    [tiles, num_columns, FOUR, 4], each digit's four times; totals float32 [num_columns, FOUR, 4], the four
    rows of each digit; levels [groups, 2, ROWS] from the first row on.
    """
    if not CAN_DOT:
        return
    totals_at = [plus(builder, totals, c * LANES * 4) for c in range(num_columns)]
    sums_of_columns = registers(builder, [load(builder, types.float32, at) for at in totals_at])
    products = {
        (r, c): cgutils.alloca_once(builder, wide(I32)) for r in range(FOUR) for c in range(num_columns)
    }

    def multiply(inputs: Any, rows: list[Any]) -> None:
        """Add the products of 16 inputs; `rows` are their codes."""
        some = [load_as(builder, wide(I32), plus(builder, inputs, 256 * c)) for c in range(num_columns)]
        for r, sixteen in enumerate(rows):
            for c in range(num_columns):
                total = builder.load(products[r, c])
                builder.store(_dot_bytes(builder, total, sixteen, some[c]), products[r, c])

    with cgutils.for_range(builder, tiles) as loop:
        _prefetch_lines(builder, ahead, lines, loop.index)
        tile = builder.add(codes, builder.mul(loop.index, codes_tile))
        inputs = builder.add(digits, builder.mul(loop.index, digits_tile))
        rows_at = [nth(builder, tile, codes_row, r) for r in range(FOUR)]
        for product in products.values():
            builder.store(constant(I32, 0), product)
        if num_columns <= 2:
            for i in range(4):
                rows = [_sixteen(builder, row, i, num_bits) for row in rows_at]
                multiply(plus(builder, inputs, 64 * i), rows)
        else:  # of a whole tile, LLVM makes an order for which the registers do not suffice
            with cgutils.for_range(builder, ir.Constant(I64, 4)) as some:
                at = times(builder, some.index, 16)
                rows = [_repeated(builder, builder.add(row, at), 4) for row in rows_at]
                multiply(builder.add(inputs, times(builder, some.index, 64)), rows)
        level = _level(builder, levels, loop.index, tiles_of_group)
        scale = builder.bitcast(_repeated(builder, level, 4), wide(F32))
        zero = builder.bitcast(_repeated(builder, plus(builder, level, 4 * ROWS), 4), wide(F32))
        sums_at = builder.add(sums, builder.mul(loop.index, sums_tile))
        for c, register in enumerate(sums_of_columns):
            of_digits = load(builder, types.float32, plus(builder, sums_at, c * LANES * 4))
            of_digits = builder.fsub(constant(F32, 0.0), of_digits)
            of_rows = _sums_of_fours(builder, [builder.load(products[r, c]) for r in range(FOUR)])
            term = builder.sitofp(of_rows, wide(F32))
            term = fused_multiply_add(builder, zero, of_digits, term)
            add_product(builder, register, scale, term)
    for register, at in zip(sums_of_columns, totals_at, strict=True):
        store(builder, types.float32, at, builder.load(register))


def _sixteen(builder: Any, tile: Any, i: int, bits: int) -> Any:
    """Return inputs 16 i to 16 i + 15 of a row's tile of bytes or of 4 bits, repeated over the vector."""
    if bits == 8:
        return _repeated(builder, plus(builder, tile, 16 * i), 4)
    pieces = _repeated(builder, plus(builder, tile, 16 * (i % 2)), 4)
    pieces = builder.lshr(pieces, constant(I32, 4 * (i // 2)))
    return builder.and_(pieces, constant(I32, 0x0F0F0F0F))


def _sums_of_fours(builder: Any, rows: list[Any]) -> Any:
    """Return in lane 4 i + r the sum of lanes 4 i to 4 i + 3 of row r, of four rows."""
    halves = [_added(builder, rows[r], rows[r + 1], 1) for r in (0, 2)]
    return _added(builder, halves[0], halves[1], 2)


def _added(builder: Any, one: Any, other: Any, size: int) -> Any:
    """Add what lies two lanes apart in each four; the sums of `one` and `other` by turns, `size` lanes."""
    even, odd = [], []
    for four in range(0, LANES, 4):
        if size == 1:
            even += [four, LANES + four, four + 1, LANES + four + 1]
            odd += [four + 2, LANES + four + 2, four + 3, LANES + four + 3]
        else:
            even += [four, four + 1, LANES + four, LANES + four + 1]
            odd += [four + 2, four + 3, LANES + four + 2, LANES + four + 3]
    return builder.add(*(builder.shuffle_vector(one, other, vector(I32, order)) for order in (even, odd)))


def _repeated(builder: Any, address: Any, words: int) -> Any:
    """Load 1 or 4 words of 32 bits, repeated over the vector."""
    some = load_as(builder, ir.VectorType(I32, words), address)
    return builder.shuffle_vector(some, some, vector(I32, [i % words for i in range(LANES)]))


def _dot_bytes(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Add to each of sixteen int32 the four products of its bytes."""
    operands = total, unsigned, signed
    if IS_WIDE:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", wide(I32), *operands)
    kind, halves = ir.VectorType(I32, 8), []
    for first in (0, 8):
        lanes = vector(I32, list(range(first, first + 8)))
        parts = (builder.shuffle_vector(one, one, lanes) for one in operands)
        halves.append(call(builder, "llvm.x86.avx512.vpdpbusd.256", kind, *parts))
    return builder.shuffle_vector(*halves, vector(I32, list(range(LANES))))


@intrinsic_of
def turn_fours(builder: Any, address: Int, stride: Int) -> None:
    """Transpose float32 [4, 4, 4] in place, in its first two dimensions; the first has a stride in bytes."""
    places = [nth(builder, address, stride, i) for i in range(4)]
    old = [load(builder, types.float32, place) for place in places]
    for i, place in enumerate(places):
        both = [*range(4 * i, 4 * i + 4), *range(LANES + 4 * i, LANES + 4 * i + 4)]
        halves = (builder.shuffle_vector(*old[j : j + 2], vector(I32, both)) for j in (0, 2))
        whole = builder.shuffle_vector(*halves, vector(I32, list(range(LANES))))
        store(builder, types.float32, place, whole)


@intrinsic_of
def turn(builder: Any, address: Int, stride: Int) -> None:
    """Transpose float32 [16, 16] in place; its rows are `stride` bytes apart."""
    places = [nth(builder, address, stride, r) for r in range(LANES)]
    rows = [load(builder, types.float32, place) for place in places]
    half = LANES // 2
    low, high = (
        vector(I32, [lane + of for lane in range(start, start + half) for of in (0, LANES)])
        for start in (0, half)
    )
    # Interleaving row i with row i + 8 rotates the eight bits of (row, lane) by one; four turn by four.
    for _ in range(4):
        pairs = [(rows[i], rows[i + half]) for i in range(half)]
        rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
    for place, row in zip(places, rows, strict=True):
        store(builder, types.float32, place, row)

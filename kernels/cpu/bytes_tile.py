"""The micro-kernels of `kernels.cpu.quantized_bytes`, from a small code generator."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.amx import ROW_BYTES, TILE_ROWS, emit_product
from kernels.cpu.codes import lanes_below, masked, plus, times
from kernels.cpu.few_tile import emit_prefetch
from kernels.cpu.quantized_call import Weight
from kernels.cpu.simd import (
    F16,
    F32,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    call,
    constant,
    fused_multiply_add,
    load,
    load_splat,
    store,
    vec,
    wide,
)
from kernels.packing import CODE_BITS, TILE, planes

ROWS = TILE_ROWS  # outputs worked on together
TILE_BYTES = ROWS * ROW_BYTES
TO_NEAREST = 4  # the rounding mode of the processor's state


def _vector(element: Any, values: list[int]) -> Any:
    return ir.Constant(ir.VectorType(element, len(values)), values)


def _load_as(builder: Any, kind: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=1)


# --------------------------------------------------------------------------- from inputs to digits


@intrinsic
def largest(typingctx: Any, most: Any, x: Any) -> Any:
    """Return the larger of `most` and |x|, lane by lane; `most` where x is a NaN."""

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        size = call(builder, "llvm.fabs.v16f32", wide(F32), args[1])
        return call(builder, "llvm.maxnum.v16f32", wide(F32), args[0], size)

    return vec(vec, vec), emit


@intrinsic
def write_digits(typingctx: Any, place: Any, x: Any, factor: Any, address: Any) -> Any:
    """Round a tile of x times factor to whole numbers; write the digits of one place in base 256.

    place is a literal, 0 the lowest. x is the byte address of 64 float32, factor a vector. A digit is in
    [-128, 127]. Four digits fill a word; words are 64 bytes apart. Returns the digits' sums, lane by lane.
    """
    if not isinstance(place, types.IntegerLiteral):
        return None
    shift = 8 * place.literal_value

    def emit(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        _, x, factor, address = args
        mask, mode = ir.Constant(I16, -1), ir.Constant(I32, TO_NEAREST)
        sums = constant(I32, 0)
        for vector in range(TILE // LANES):
            values = load(builder, types.float32, plus(builder, x, vector * LANES * 4))
            # Unlike `fptosi` this is defined for numbers too large.
            name, scaled = "llvm.x86.avx512.mask.cvtps2dq.512", builder.fmul(values, factor)
            whole = call(builder, name, wide(I32), scaled, constant(I32, 0), mask, mode)
            half = 0x8080 & (1 << shift) - 1  # borrow of lower digits below 0
            moved = builder.ashr(builder.add(whole, constant(I32, half)), constant(I32, shift))
            digits = builder.trunc(moved, wide(I8))
            sums = builder.add(sums, builder.sext(digits, wide(I32)))
            words = builder.bitcast(digits, ir.VectorType(I32, 4))
            for i in range(4):
                word = builder.extract_element(words, ir.Constant(I32, i))
                to = plus(builder, address, (vector * 4 + i) * TILE)
                builder.store(word, builder.inttoptr(to, I32.as_pointer()), align=4)
        return builder.sitofp(sums, wide(F32))

    return vec(place, types.int64, vec, types.int64), emit


# --------------------------------------------------------------------------- from codes to bytes


@intrinsic
def spread(typingctx: Any, w: Any, codes: Any, ahead: Any, lines: Any, target: Any) -> Any:
    """Write the codes of ROWS rows of a unit as bytes [tiles, ROWS, 64].

    For each tile `lines` lines are prefetched, from `ahead` on.
    """

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        w, codes, ahead, lines, target = args
        stride, tiles, found = (
            builder.extract_value(w, Weight._fields.index(name)) for name in ("codes_row", "tiles", "bits")
        )
        for bits in CODE_BITS:
            with (
                builder.if_then(builder.icmp_signed("==", found, ir.Constant(I64, bits))),
                cgutils.for_range(builder, tiles) as loop,
            ):
                line = builder.mul(loop.index, lines)
                with cgutils.for_range(builder, lines) as of_line:
                    at = builder.add(line, of_line.index)
                    emit_prefetch(builder, builder.add(ahead, times(builder, at, 64)))
                tile = builder.add(codes, times(builder, loop.index, 8 * bits))
                place = builder.add(target, times(builder, loop.index, TILE_BYTES))
                for r in range(ROWS):
                    unpacked = _unpacked(builder, builder.add(tile, times(builder, stride, r)), bits)
                    to = builder.inttoptr(plus(builder, place, r * TILE), unpacked.type.as_pointer())
                    builder.store(unpacked, to, align=TILE)
        return context.get_dummy_value()

    return types.void(w, *(types.int64,) * 4), emit


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
        mask = builder.bitcast(_load_as(builder, I64, address), ir.VectorType(I1, TILE))
        ones, none = (_vector(I8, [value] * TILE) for value in (2**lowest, 0))
        return builder.select(mask, ones, none)
    length, places = 8 * width, 8 // width
    raw = _load_as(builder, ir.VectorType(I8, length), address)
    repeated = builder.shuffle_vector(raw, raw, _vector(I32, [*range(length)] * places))
    # A byte's upper bits are the next byte's after a shift of words: the mask takes them off.
    words = builder.bitcast(repeated, wide(I32))
    shifts = [width * place for place in range(places) for _ in range(length // 4)]
    words = builder.lshr(words, _vector(I32, shifts))
    words = builder.and_(words, constant(I32, (2**width - 1) * 0x01010101))
    if lowest:
        words = builder.shl(words, constant(I32, lowest))
    return builder.bitcast(words, ir.VectorType(I8, TILE))


@intrinsic
def widen_levels(typingctx: Any, scales: Any, zeros: Any, count: Any, target: Any, width: Any) -> Any:
    """Write `count` scales and, `width` bytes on, zeros as float32, in whole vectors."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        scales, zeros, count, target, width = args
        step = ir.Constant(I64, LANES)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), count, step) as (at, _):
            inside = lanes_below(builder, builder.sub(count, at))
            scale = masked(builder, F16, builder.add(scales, times(builder, at, 2)), inside)
            zero = builder.uitofp(masked(builder, I8, builder.add(zeros, at), inside), wide(F32))
            place = builder.add(target, times(builder, at, 4))
            store(builder, types.float32, place, builder.fpext(scale, wide(F32)))
            store(builder, types.float32, builder.add(place, width), zero)
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 5), emit


# --------------------------------------------------------------------------- from products to sums


@intrinsic
def add_tiles(
    typingctx: Any,
    tiles: Any,
    tiles_of_group: Any,
    codes: Any,
    codes_tile: Any,
    codes_row: Any,
    digits: Any,
    digits_tile: Any,
    sums: Any,
    sums_tile: Any,
    levels: Any,
    levels_row: Any,
    ahead: Any,
    lines: Any,
    scratch: Any,
    totals: Any,
    totals_row: Any,
) -> Any:
    """Compute totals[r] += sum over tiles of scale[r] * (codes[r] . digits - zero[r] * sums) for ROWS rows.

    Byte addresses and strides: codes uint8 [tiles, ROWS, 64]; digits int8 [tiles, 16, 16, 4]; sums float32
    [tiles, 16]; scales and, half a row on, zeros as `widen_levels` writes them; totals float32 [ROWS, 16],
    which stay in registers. For each tile `lines` lines are prefetched, from `ahead` on. The products of a
    tile are made while those of the tile before, in the other half of scratch, are added up: it takes a
    hundred cycles until they can be read.
    """

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        tiles, tiles_of_group, codes, codes_tile, codes_row, digits, digits_tile = args[:7]
        sums, sums_tile, levels, levels_row, ahead, lines, scratch, totals, totals_row = args[7:]
        last = builder.sub(tiles, ir.Constant(I64, 1))
        half = builder.lshr(levels_row, ir.Constant(I64, 1))
        rows = [builder.add(totals, times(builder, totals_row, r)) for r in range(ROWS)]
        registers = [cgutils.alloca_once(builder, wide(F32)) for _ in range(ROWS)]
        for register, place in zip(registers, rows, strict=True):
            builder.store(load(builder, types.float32, place), register)

        def half_of_scratch(index: Any) -> Any:
            parity = builder.and_(index, ir.Constant(I64, 1))
            return builder.add(scratch, times(builder, parity, TILE_BYTES))

        def multiply(index: Any) -> None:
            weights = builder.add(codes, builder.mul(index, codes_tile))
            inputs = builder.add(digits, builder.mul(index, digits_tile))
            emit_product(builder, weights, codes_row, inputs, half_of_scratch(index))

        multiply(ir.Constant(I64, 0))
        with cgutils.for_range(builder, tiles) as loop:
            line = builder.mul(loop.index, lines)
            with cgutils.for_range(builder, lines) as of_line:
                at = builder.add(line, of_line.index)
                emit_prefetch(builder, builder.add(ahead, times(builder, at, 64)))
            following = builder.add(loop.index, ir.Constant(I64, 1))
            is_inside = builder.icmp_signed("<", following, tiles)
            multiply(builder.select(is_inside, following, last))
            # In 32 bits: a division of 64 takes three times as long.
            group = builder.udiv(builder.trunc(loop.index, I32), builder.trunc(tiles_of_group, I32))
            level = builder.add(levels, times(builder, builder.zext(group, I64), 4))
            products = half_of_scratch(loop.index)
            of_digits = load(builder, types.float32, builder.add(sums, builder.mul(loop.index, sums_tile)))
            of_digits = builder.fsub(constant(F32, 0.0), of_digits)
            for r, register in enumerate(registers):
                place = builder.add(level, times(builder, levels_row, r))
                scale = load_splat(builder, types.float32, place)
                zero = load_splat(builder, types.float32, builder.add(place, half))
                product = _load_as(builder, wide(I32), plus(builder, products, r * LANES * 4))
                term = fused_multiply_add(builder, zero, of_digits, builder.sitofp(product, wide(F32)))
                builder.store(fused_multiply_add(builder, scale, term, builder.load(register)), register)
        for register, place in zip(registers, rows, strict=True):
            store(builder, types.float32, place, builder.load(register))
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 16), emit


@intrinsic
def turn(typingctx: Any, address: Any, stride: Any) -> Any:
    """Transpose float32 [16, 16] in place; its rows are `stride` bytes apart."""

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        places = [builder.add(args[0], times(builder, args[1], r)) for r in range(LANES)]
        rows = [load(builder, types.float32, place) for place in places]
        half = LANES // 2
        low, high = (
            _vector(I32, [lane + of for lane in range(start, start + half) for of in (0, LANES)])
            for start in (0, half)
        )
        # Interleaving row i with row i + 8 rotates the eight bits of (row, lane) by one; four turn by four.
        for _ in range(4):
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in (low, high)]
        for place, row in zip(places, rows, strict=True):
            store(builder, types.float32, place, row)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit

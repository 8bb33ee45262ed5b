"""The micro-kernels of quantised products, written by a small code generator.

`dots` computes dot products with codes that never leave the registers; `decode` decodes rows of codes for
`kernels.cpu.tile`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.codes import Levels
from kernels.cpu.quantized_call import Weight
from kernels.cpu.simd import (
    F32,
    I32,
    I64,
    LANES,
    Int,
    Literal,
    Value,
    add_product,
    call,
    constant,
    emit_prefetch,
    intrinsic_of,
    load,
    load_as,
    nth,
    plus,
    registers,
    store,
    store_as,
    times,
)
from kernels.packing import CODE_BITS, TILE

QUARTERS = TILE // LANES  # vectors to a tile


class Coding(NamedTuple):
    """The properties of a weight that loops are compiled for."""

    bits: int
    is_halved: int


def _field(builder: Any, w: Any, name: str) -> Any:
    return builder.extract_value(w, Weight._fields.index(name))


def _for_the_coding(builder: Any, w: Any, emit: Callable[[Coding], None]) -> None:
    """Emit code for every coding; that of the weight runs."""
    for coding in itertools.starmap(Coding, itertools.product(CODE_BITS, (0, 1))):
        same = [
            builder.icmp_signed("==", _field(builder, w, name), ir.Constant(I64, value))
            for name, value in coding._asdict().items()
        ]
        with builder.if_then(builder.and_(*same)):
            emit(coding)


def _levels_row(builder: Any, w: Any) -> tuple[Any, Any]:
    """Return the bytes of a row of levels (see `quantized_call.levels_row`), and of its scales alone."""
    vectors = builder.lshr(plus(builder, _field(builder, w, "groups"), LANES - 1), ir.Constant(I64, 4))
    return times(builder, vectors, 2 * LANES * 4), times(builder, vectors, LANES * 4)


def _halves(builder: Any, coding: Coding, w: Any, tile: Any, levels: Any) -> list[Levels]:
    """Return the levels of both halves of a tile; `levels` is the byte address of its row's levels."""
    _, width = _levels_row(builder, w)
    halves = []
    for half in range(1 + coding.is_halved):
        index = plus(builder, times(builder, tile, 2), half)
        # In 32 bits: a division of 64 takes three times as long.
        divisor = builder.trunc(_field(builder, w, "group_halves"), I32)
        group = builder.zext(builder.udiv(builder.trunc(index, I32), divisor), I64)
        place = builder.add(levels, times(builder, group, 4))
        halves.append(Levels(builder, coding.bits, place, builder.add(place, width)))
    return halves if coding.is_halved else halves * 2


@intrinsic_of
def dots(
    builder: Any,
    num_rows: Literal,
    num_tokens: Literal,
    w: Value,
    codes: Int,
    levels: Int,
    x: Int,
    x_row: Int,
    out: Int,
    out_row: Int,
    is_added: Int,
) -> None:
    """Compute out[t, r] (+)= w[r] . x[t] over the inputs of a unit, for num_rows rows and num_tokens tokens.

    The sums stay in num_rows * num_tokens registers. Byte addresses and strides:
    codes and levels (as `make_levels` writes them) of the first row; x[t] and out[t] float32, contiguous.
    """
    sums = registers(builder, [constant(F32, 0.0)] * (num_rows * num_tokens))
    row_bytes, (levels_bytes, _) = _field(builder, w, "codes_row"), _levels_row(builder, w)

    def add_products(coding: Coding) -> None:
        with cgutils.for_range(builder, _field(builder, w, "tiles")) as loop:
            tile = builder.add(codes, times(builder, loop.index, 8 * coding.bits))
            tiles = [nth(builder, tile, row_bytes, r) for r in range(num_rows)]
            places = [nth(builder, levels, levels_bytes, r) for r in range(num_rows)]
            halves = [_halves(builder, coding, w, loop.index, place) for place in places]
            for place in tiles:  # rows are too short for the hardware to see where they go on
                emit_prefetch(builder, builder.add(place, times(builder, row_bytes, num_rows)))
            column = builder.add(x, times(builder, loop.index, TILE * 4))
            columns = [nth(builder, column, x_row, t) for t in range(num_tokens)]
            for quarter, r in itertools.product(range(QUARTERS), range(num_rows)):
                weights = halves[r][quarter // 2].weights(builder, tiles[r], quarter)
                for t in range(num_tokens):
                    values = load(builder, types.float32, plus(builder, columns[t], quarter * LANES * 4))
                    add_product(builder, sums[r * num_tokens + t], weights, values)

    _for_the_coding(builder, w, add_products)
    adds = builder.icmp_signed("!=", is_added, ir.Constant(I64, 0))
    for r, t in itertools.product(range(num_rows), range(num_tokens)):
        place = builder.add(plus(builder, out, 4 * r), times(builder, out_row, t))
        _write_sum(builder, builder.load(sums[r * num_tokens + t]), place, adds)


def _write_sum(builder: Any, lanes: Any, address: Any, adds: Any) -> None:
    start = builder.select(adds, load_as(builder, F32, address, 4), ir.Constant(F32, 0.0))
    total = call(builder, "llvm.vector.reduce.fadd.v16f32", F32, start, lanes, fastmath=("reassoc",))
    store_as(builder, total, address, 4)


@intrinsic_of
def decode(
    builder: Any, w: Value, codes: Int, levels: Int, first_tile: Int, num_tiles: Int, target: Int
) -> None:
    """Decode num_tiles tiles of one row into float32 at byte address target.

    `codes` and `levels` are the row's, from its first tile on.
    """

    def write(coding: Coding) -> None:
        with cgutils.for_range(builder, num_tiles) as loop:
            index = builder.add(first_tile, loop.index)
            halves = _halves(builder, coding, w, index, levels)
            tile = builder.add(codes, times(builder, index, 8 * coding.bits))
            place = builder.add(target, times(builder, loop.index, TILE * 4))
            for quarter in range(QUARTERS):
                weights = halves[quarter // 2].weights(builder, tile, quarter)
                store(builder, types.float32, plus(builder, place, quarter * LANES * 4), weights)

    _for_the_coding(builder, w, write)

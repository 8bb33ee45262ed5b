"""The micro-kernel of products: a tile of a matrix product in registers, from a small code generator."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.simd import (
    F32,
    I32,
    I64,
    LANES,
    Int,
    Kind,
    Literal,
    add_product,
    constant,
    intrinsic_of,
    load,
    load_splat,
    nth,
    plus,
    registers,
    store,
    vector,
)


@intrinsic_of
def tile(
    builder: Any,
    num_rows: Literal,
    num_vectors: Literal,
    is_added: Literal,
    a_kind: Kind,
    b_kind: Kind,
    depth: Int,
    a: Int,
    a_row: Int,
    a_step: Int,
    b: Int,
    b_step: Int,
    c: Int,
    c_row: Int,
) -> None:
    """Compute c[r, :] (+)= sum over k < depth of a[r, k] * b[k, :].

    There are num_rows rows of 16 * num_vectors columns. The tile stays in num_rows * num_vectors registers,
    so with the row of b and the broadcast of a they must fit in 32 (6 x 4, 8 x 3). Byte addresses and
    strides: a[r, k] at a + r * a_row + k * a_step; b[k, :] contiguous at b + k * b_step; c[r, :] contiguous
    float32 at c + r * c_row.
    """
    places = [
        plus(builder, nth(builder, c, c_row, r), v * LANES * 4)
        for r in range(num_rows)
        for v in range(num_vectors)
    ]
    start = [load(builder, types.float32, p) if is_added else constant(F32, 0.0) for p in places]
    sums = registers(builder, start)
    with cgutils.for_range(builder, depth) as loop:
        k = loop.index
        a_column, b_row = builder.add(a, builder.mul(k, a_step)), builder.add(b, builder.mul(k, b_step))
        line = LANES * b_kind.bitwidth // 8
        b_vectors = [load(builder, b_kind, plus(builder, b_row, v * line)) for v in range(num_vectors)]
        for r in range(num_rows):
            scalar = load_splat(builder, a_kind, nth(builder, a_column, a_row, r))
            for v in range(num_vectors):
                add_product(builder, sums[r * num_vectors + v], scalar, b_vectors[v])
    for register, place in zip(sums, places, strict=True):
        store(builder, types.float32, place, builder.load(register))


@intrinsic_of
def transpose(
    builder: Any,
    source: Int,
    source_row: Int,
    source_rows: Int,
    target: Int,
    target_row: Int,
    target_rows: Int,
) -> None:
    """Transpose 16 x 16 float32 from source to target, both by byte address and row stride.

    Rows of the source from source_rows on repeat its last; rows of the target from target_rows on are not
    written (at least one is).
    """

    def row(base: Any, step: Any, count: Any, index: int) -> Any:
        last = builder.sub(count, ir.Constant(I64, 1))
        is_past = builder.icmp_signed("<", last, ir.Constant(I64, index))
        return builder.add(base, builder.mul(step, builder.select(is_past, last, ir.Constant(I64, index))))

    vectors = [load(builder, types.float32, row(source, source_row, source_rows, i)) for i in range(LANES)]
    for width in (1, 2, 4, 8):  # swap the off-diagonal squares of this width
        low = [j + LANES - width if j & width else j for j in range(LANES)]
        high = [j + LANES if j & width else j + width for j in range(LANES)]
        for i in (i for i in range(LANES) if not i & width):
            pair = vectors[i], vectors[i + width]
            vectors[i], vectors[i + width] = (
                builder.shuffle_vector(*pair, vector(I32, mask)) for mask in (low, high)
            )
    # Last row first: those past the end land on the last one, which is then written over.
    for i in reversed(range(LANES)):
        store(builder, types.float32, row(target, target_row, target_rows, i), vectors[i])

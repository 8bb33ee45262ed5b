"""The micro-kernel of products: a tile of a matrix product in registers, from a small code generator."""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.simd import F32, I32, I64, LANES, constant, fused_multiply_add, load, load_splat, store, wide


@intrinsic
def tile(
    typingctx: Any,
    num_rows: Any,
    num_vectors: Any,
    is_added: Any,
    a_kind: Any,
    b_kind: Any,
    depth: Any,
    a: Any,
    a_row: Any,
    a_step: Any,
    b: Any,
    b_step: Any,
    c: Any,
    c_row: Any,
) -> Any:
    """Compute c[r, :] (+)= sum over k < depth of a[r, k] * b[k, :].

    There are num_rows rows of 16 * num_vectors columns.
    The first three are literals: the tile stays in num_rows * num_vectors registers, so with the row of b
    and the broadcast of a they must fit in 32 (6 x 4, 8 x 3). Byte addresses and strides: a[r, k] at
    a + r * a_row + k * a_step; b[k, :] contiguous at b + k * b_step; c[r, :] contiguous float32 at
    c + r * c_row.
    """
    if not isinstance(num_rows, types.IntegerLiteral):
        return None  # numba asks a second time with the literals forgotten
    rows, vectors, adds = num_rows.literal_value, num_vectors.literal_value, is_added.literal_value
    addresses = (types.int64,) * 8
    signature = types.void(num_rows, num_vectors, is_added, a_kind, b_kind, *addresses)

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        depth, a, a_row, a_step, b, b_step, c, c_row = args[5:]
        places = [
            builder.add(_at(builder, c, c_row, r), ir.Constant(I64, v * LANES * 4))
            for r in range(rows)
            for v in range(vectors)
        ]
        start = [load(builder, types.float32, p) if adds else constant(F32, 0.0) for p in places]
        sums = [cgutils.alloca_once(builder, wide(F32)) for _ in places]
        for register, value in zip(sums, start, strict=True):
            builder.store(value, register)
        with cgutils.for_range(builder, depth) as loop:
            k = loop.index
            a_column, b_row = builder.add(a, builder.mul(k, a_step)), builder.add(b, builder.mul(k, b_step))
            line = LANES * b_kind.dtype.bitwidth // 8
            b_vectors = [
                load(builder, b_kind.dtype, builder.add(b_row, ir.Constant(I64, v * line)))
                for v in range(vectors)
            ]
            for r in range(rows):
                scalar = load_splat(builder, a_kind.dtype, _at(builder, a_column, a_row, r))
                for v in range(vectors):
                    register = sums[r * vectors + v]
                    total = fused_multiply_add(builder, scalar, b_vectors[v], builder.load(register))
                    builder.store(total, register)
        for register, place in zip(sums, places, strict=True):
            store(builder, types.float32, place, builder.load(register))
        return context.get_dummy_value()

    return signature, emit


def _at(builder: Any, base: Any, step: Any, count: int) -> Any:
    return builder.add(base, builder.mul(step, ir.Constant(I64, count))) if count else base


@intrinsic
def transpose(
    typingctx: Any,
    source: Any,
    source_row: Any,
    source_rows: Any,
    target: Any,
    target_row: Any,
    target_rows: Any,
) -> Any:
    """Transpose 16 x 16 float32 from source to target, both by byte address and row stride.

    Rows of the source from source_rows on repeat its last; rows of the target from target_rows on are not
    written (at least one is).
    """

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        source, source_row, source_rows, target, target_row, target_rows = args

        def row(base: Any, step: Any, count: Any, index: int) -> Any:
            last = builder.sub(count, ir.Constant(I64, 1))
            is_past = builder.icmp_signed("<", last, ir.Constant(I64, index))
            return builder.add(
                base, builder.mul(step, builder.select(is_past, last, ir.Constant(I64, index)))
            )

        vectors = [
            load(builder, types.float32, row(source, source_row, source_rows, i)) for i in range(LANES)
        ]
        for width in (1, 2, 4, 8):  # swap the off-diagonal squares of this width
            low = [j + LANES - width if j & width else j for j in range(LANES)]
            high = [j + LANES if j & width else j + width for j in range(LANES)]
            for i in (i for i in range(LANES) if not i & width):
                pair = vectors[i], vectors[i + width]
                vectors[i], vectors[i + width] = (
                    builder.shuffle_vector(*pair, ir.Constant(wide(I32), mask)) for mask in (low, high)
                )
        # Last row first: those past the end land on the last one, which is then written over.
        for i in reversed(range(LANES)):
            store(builder, types.float32, row(target, target_row, target_rows, i), vectors[i])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 6), emit

"""The micro-kernels of products for a few tokens, from a small code generator.

Both read the weights where they lie, once, and in the order in which they lie: a processor fetches one
stream ahead of its use, but hardly several rows of a few KB at once. Where several rows are multiplied
together, which spares reads of x, the rows behind them are prefetched line after line.

The sum of one output for one token is made in the same order whatever the number of tokens.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.processor import has_all
from kernels.cpu.simd import (
    F32,
    I32,
    I64,
    LANES,
    Int,
    Kind,
    Literal,
    add_product,
    call,
    constant,
    emit_prefetch,
    fused_multiply_add,
    intrinsic_of,
    load,
    load_as,
    load_scalar,
    load_splat,
    nth,
    plus,
    registers,
    store,
    store_scalar,
    times,
    vector,
    wide,
)

CAN_PAIR = has_all("avx512f", "avx512bf16")  # products of pairs of bfloat16, added in float32


def _prefetch_lines(builder: Any, address: Any, count: int) -> None:
    """Prefetch `count` cache lines from an address on; one past the end of the weights does no harm."""
    for i in range(count):
        emit_prefetch(builder, plus(builder, address, 64 * i))


def sum_lanes(builder: Any, lanes: Any) -> Any:
    """Add the lanes pairwise, always in this order."""
    for width in (8, 4, 2, 1):
        low, high = ([start + i for i in range(width)] for start in (0, width))
        lanes = builder.fadd(
            *(builder.shuffle_vector(lanes, lanes, vector(I32, half)) for half in (low, high))
        )
    return builder.extract_element(lanes, ir.Constant(I32, 0))


@intrinsic_of
def dots(
    builder: Any,
    num_rows: Literal,
    num_tokens: Literal,
    num_lines: Literal,
    kind: Kind,
    x_kind: Kind,
    ahead: Int,
    depth: Int,
    w: Int,
    w_row: Int,
    x: Int,
    x_row: Int,
    bias: Int,
    bias_step: Int,
    out: Int,
    out_row: Int,
) -> None:
    """Compute out[t, r] = bias[r] + w[r] . x[t] over `depth` inputs, for num_rows rows and num_tokens tokens.

    The sums stay in num_rows * num_tokens registers, and for each line of a
    row num_lines lines are prefetched, from `ahead` on. Byte addresses and strides: w, bias and out of
    `kind`, x float32, or of x_kind bfloat16 like w: then pairs are multiplied (`CAN_PAIR`). A bias_step of 0
    reads one bias for all.
    """
    size, is_paired = kind.bitwidth // 8, x_kind.bitwidth == 16
    sums = registers(builder, [constant(F32, 0.0)] * (num_rows * num_tokens))
    w_rows = [nth(builder, w, w_row, r) for r in range(num_rows)]
    x_rows = [nth(builder, x, x_row, t) for t in range(num_tokens)]
    # Short floats fill half a line with a vector: take two of them in turn.
    vectors = 4 // size
    whole = builder.udiv(depth, ir.Constant(I64, vectors * LANES))

    def add_products(at: Any, v: int) -> None:
        """Multiply the vector at `at` + v vectors of 16 elements."""
        place = plus(builder, times(builder, at, size), v * LANES * size)
        x_place = plus(builder, times(builder, at, 4), v * LANES * 4)
        for r in range(num_rows):
            weights = load(builder, kind, builder.add(w_rows[r], place))
            for t in range(num_tokens):
                values = load(builder, types.float32, builder.add(x_rows[t], x_place))
                add_product(builder, sums[r * num_tokens + t], weights, values)

    def add_pairs(at: Any, count: int) -> None:
        """Multiply `count` elements from `at` on: a line of them, or half."""
        place = times(builder, at, size)
        for r in range(num_rows):
            weights = _pairs(builder, builder.add(w_rows[r], place), count)
            for t in range(num_tokens):
                register = sums[r * num_tokens + t]
                values = _pairs(builder, builder.add(x_rows[t], place), count)
                operands = builder.load(register), weights, values
                name = "llvm.x86.avx512bf16.dpbf16ps.512"
                builder.store(call(builder, name, wide(F32), *operands), register)

    with cgutils.for_range(builder, whole) as loop:
        at = times(builder, loop.index, vectors * LANES)
        _prefetch_lines(builder, builder.add(ahead, times(builder, loop.index, num_lines * 64)), num_lines)
        if is_paired:
            add_pairs(at, vectors * LANES)
        for v in range(0 if is_paired else vectors):
            add_products(at, v)
    done = times(builder, whole, vectors * LANES)
    with builder.if_then(builder.icmp_signed("<", done, depth)):
        if is_paired:
            add_pairs(done, LANES)
        else:
            add_products(done, 0)
    for r in range(num_rows):
        added = load_scalar(builder, kind, nth(builder, bias, bias_step, r))
        for t in range(num_tokens):
            total = builder.fadd(sum_lanes(builder, builder.load(sums[r * num_tokens + t])), added)
            place = builder.add(plus(builder, out, r * size), times(builder, out_row, t))
            store_scalar(builder, kind, place, total)


def _pairs(builder: Any, address: Any, count: int) -> Any:
    """Load `count` elements of 16 bits, two to a lane; zeros behind them."""
    some = ir.VectorType(I32, count // 2)
    loaded = load_as(builder, some, address, 2)
    return builder.shuffle_vector(
        loaded, ir.Constant(some, [0] * (count // 2)), vector(I32, list(range(LANES)))
    )


@intrinsic_of
def columns(
    builder: Any,
    num_rows: Literal,
    num_tokens: Literal,
    num_lines: Literal,
    is_added: Literal,
    kind: Kind,
    ahead: Int,
    outputs: Int,
    w: Int,
    w_row: Int,
    x: Int,
    x_row: Int,
    out: Int,
    out_row: Int,
) -> None:
    """Compute out[t, :] (+)= sum over r < num_rows of x[t, r] * w[r, :], for num_tokens tokens.

    For each line of a row num_lines lines are prefetched, from `ahead` on. Byte
    addresses and strides: w and x of `kind`; out float32 [tokens, outputs], whole vectors.
    """
    size = kind.bitwidth // 8
    w_rows = [nth(builder, w, w_row, r) for r in range(num_rows)]
    x_rows = [nth(builder, x, x_row, t) for t in range(num_tokens)]
    factors = [
        [load_splat(builder, kind, plus(builder, row, r * size)) for r in range(num_rows)] for row in x_rows
    ]
    targets = [nth(builder, out, out_row, t) for t in range(num_tokens)]
    vectors = 4 // size  # vectors of a line
    whole = builder.udiv(outputs, ir.Constant(I64, vectors * LANES))

    def add_products(at: Any, v: int) -> None:
        """Multiply the vector of outputs at `at` + v vectors of 16."""
        place = plus(builder, times(builder, at, size), v * LANES * size)
        weights = [load(builder, kind, builder.add(row, place)) for row in w_rows]
        for t in range(num_tokens):
            target = builder.add(targets[t], plus(builder, times(builder, at, 4), v * LANES * 4))
            total = load(builder, types.float32, target) if is_added else constant(F32, 0.0)
            for r in range(num_rows):
                total = fused_multiply_add(builder, factors[t][r], weights[r], total)
            store(builder, types.float32, target, total)

    with cgutils.for_range(builder, whole) as loop:
        _prefetch_lines(builder, builder.add(ahead, times(builder, loop.index, num_lines * 64)), num_lines)
        for v in range(vectors):
            add_products(times(builder, loop.index, vectors * LANES), v)
    done = times(builder, whole, vectors * LANES)
    with builder.if_then(builder.icmp_signed("<", done, outputs)):
        add_products(done, 0)

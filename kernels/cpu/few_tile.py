"""The micro-kernels of products for a few tokens, from a small code generator.

Both read the weights where they lie, once, and in the order in which they lie: a processor fetches one
stream ahead of its use, but hardly several rows of a few KB at once. Where several rows are multiplied
together, which spares reads of x, the rows behind them are prefetched line after line.

The sum of one output for one token is made in the same order whatever the number of tokens.
"""

# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu.processor import has_all
from kernels.cpu.simd import (
    F32,
    I32,
    I64,
    LANES,
    call,
    constant,
    emit_prefetch,
    fused_multiply_add,
    load,
    load_scalar,
    load_splat,
    plus,
    store,
    store_scalar,
    times,
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
        parts = [
            builder.shuffle_vector(lanes, lanes, ir.Constant(ir.VectorType(I32, width), indices))
            for indices in (low, high)
        ]
        lanes = builder.fadd(*parts)
    return builder.extract_element(lanes, ir.Constant(I32, 0))


@intrinsic
def dots(
    typingctx: Any,
    num_rows: Any,
    num_tokens: Any,
    num_lines: Any,
    kind: Any,
    x_kind: Any,
    ahead: Any,
    depth: Any,
    w: Any,
    w_row: Any,
    x: Any,
    x_row: Any,
    bias: Any,
    bias_step: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Compute out[t, r] = bias[r] + w[r] . x[t] over `depth` inputs, for num_rows rows and num_tokens tokens.

    The first three are literals: the sums stay in num_rows * num_tokens registers, and for each line of a
    row num_lines lines are prefetched, from `ahead` on. Byte addresses and strides: w, bias and out of
    `kind`, x float32, or of x_kind bfloat16 like w: then pairs are multiplied (`CAN_PAIR`). A bias_step of 0
    reads one bias for all.
    """
    if not isinstance(num_rows, types.IntegerLiteral):
        return None  # numba asks a second time with the literals forgotten
    rows, tokens, lines = num_rows.literal_value, num_tokens.literal_value, num_lines.literal_value
    size, x_size = kind.dtype.bitwidth // 8, x_kind.dtype.bitwidth // 8
    is_paired = x_size == 2

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        ahead, depth, w, w_row, x, x_row, bias, bias_step, out, out_row = args[5:]
        sums = [cgutils.alloca_once(builder, wide(F32)) for _ in range(rows * tokens)]
        for register in sums:
            builder.store(constant(F32, 0.0), register)
        w_rows = [builder.add(w, times(builder, w_row, r)) for r in range(rows)]
        x_rows = [builder.add(x, times(builder, x_row, t)) for t in range(tokens)]
        # Short floats fill half a line with a vector: take two of them in turn.
        vectors = 4 // size
        whole = builder.udiv(depth, ir.Constant(I64, vectors * LANES))

        def add_products(at: Any, v: int) -> None:
            """Multiply the vector at `at` + v vectors of 16 elements."""
            place = plus(builder, times(builder, at, size), v * LANES * size)
            x_place = plus(builder, times(builder, at, 4), v * LANES * 4)
            for r in range(rows):
                weights = load(builder, kind.dtype, builder.add(w_rows[r], place))
                for t in range(tokens):
                    register = sums[r * tokens + t]
                    values = load(builder, types.float32, builder.add(x_rows[t], x_place))
                    total = fused_multiply_add(builder, weights, values, builder.load(register))
                    builder.store(total, register)

        def add_pairs(at: Any, count: int) -> None:
            """Multiply `count` elements from `at` on: a line of them, or half."""
            place = times(builder, at, size)
            for r in range(rows):
                weights = _pairs(builder, builder.add(w_rows[r], place), count)
                for t in range(tokens):
                    register = sums[r * tokens + t]
                    values = _pairs(builder, builder.add(x_rows[t], place), count)
                    operands = builder.load(register), weights, values
                    name = "llvm.x86.avx512bf16.dpbf16ps.512"
                    builder.store(call(builder, name, wide(F32), *operands), register)

        with cgutils.for_range(builder, whole) as loop:
            at = times(builder, loop.index, vectors * LANES)
            _prefetch_lines(builder, builder.add(ahead, times(builder, loop.index, lines * 64)), lines)
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
        for r in range(rows):
            added = load_scalar(builder, kind.dtype, builder.add(bias, times(builder, bias_step, r)))
            for t in range(tokens):
                total = builder.fadd(sum_lanes(builder, builder.load(sums[r * tokens + t])), added)
                place = builder.add(plus(builder, out, r * size), times(builder, out_row, t))
                store_scalar(builder, kind.dtype, place, total)
        return context.get_dummy_value()

    return types.void(num_rows, num_tokens, num_lines, kind, x_kind, *(types.int64,) * 10), emit


def _pairs(builder: Any, address: Any, count: int) -> Any:
    """Load `count` elements of 16 bits, two to a lane; zeros behind them."""
    some = ir.VectorType(I32, count // 2)
    loaded = builder.load(builder.inttoptr(address, some.as_pointer()), align=2)
    order = ir.Constant(wide(I32), list(range(LANES)))
    return builder.shuffle_vector(loaded, ir.Constant(some, [0] * (count // 2)), order)


@intrinsic
def columns(
    typingctx: Any,
    num_rows: Any,
    num_tokens: Any,
    num_lines: Any,
    is_added: Any,
    kind: Any,
    ahead: Any,
    outputs: Any,
    w: Any,
    w_row: Any,
    x: Any,
    x_row: Any,
    out: Any,
    out_row: Any,
) -> Any:
    """Compute out[t, :] (+)= sum over r < num_rows of x[t, r] * w[r, :], for num_tokens tokens.

    The first four are literals; for each line of a row num_lines lines are prefetched, from `ahead` on. Byte
    addresses and strides: w and x of `kind`; out float32 [tokens, outputs], whole vectors.
    """
    if not isinstance(num_rows, types.IntegerLiteral):
        return None  # numba asks a second time with the literals forgotten
    rows, tokens, lines = num_rows.literal_value, num_tokens.literal_value, num_lines.literal_value
    adds, size = is_added.literal_value, kind.dtype.bitwidth // 8

    def emit(context: Any, builder: Any, _s: Any, args: Any) -> Any:
        ahead, outputs, w, w_row, x, x_row, out, out_row = args[5:]
        w_rows = [builder.add(w, times(builder, w_row, r)) for r in range(rows)]
        x_rows = [builder.add(x, times(builder, x_row, t)) for t in range(tokens)]
        factors = [
            [load_splat(builder, kind.dtype, plus(builder, row, r * size)) for r in range(rows)]
            for row in x_rows
        ]
        targets = [builder.add(out, times(builder, out_row, t)) for t in range(tokens)]
        vectors = 4 // size  # vectors of a line
        whole = builder.udiv(outputs, ir.Constant(I64, vectors * LANES))

        def add_products(at: Any, v: int) -> None:
            """Multiply the vector of outputs at `at` + v vectors of 16."""
            place = plus(builder, times(builder, at, size), v * LANES * size)
            weights = [load(builder, kind.dtype, builder.add(row, place)) for row in w_rows]
            for t in range(tokens):
                target = builder.add(targets[t], plus(builder, times(builder, at, 4), v * LANES * 4))
                total = load(builder, types.float32, target) if adds else constant(F32, 0.0)
                for r in range(rows):
                    total = fused_multiply_add(builder, factors[t][r], weights[r], total)
                store(builder, types.float32, target, total)

        with cgutils.for_range(builder, whole) as loop:
            _prefetch_lines(builder, builder.add(ahead, times(builder, loop.index, lines * 64)), lines)
            for v in range(vectors):
                add_products(times(builder, loop.index, vectors * LANES), v)
        done = times(builder, whole, vectors * LANES)
        with builder.if_then(builder.icmp_signed("<", done, outputs)):
            add_products(done, 0)
        return context.get_dummy_value()

    return types.void(num_rows, num_tokens, num_lines, is_added, kind, *(types.int64,) * 8), emit

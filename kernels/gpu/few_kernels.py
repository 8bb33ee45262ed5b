"""Products of a few tokens with dense weights, each of which is read once: two forms of a matrix.

A product of few tokens takes as long as reading its weights. Sums are in float32, in an order that depends on
the config alone, so a row gets the same bits whatever the others hold. Strides count elements.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gather(totals, part, t, TOKENS: tl.constexpr):
    """Add part [columns], which is of token t, to totals [TOKENS, columns]."""
    if TOKENS == 1:
        return totals + part[None, :]
    tokens = tl.arange(0, TOKENS)
    return totals + tl.where((tokens == t)[:, None], part[None, :], 0.0)


@triton.jit
def _finish(totals, bias_ptr, out_ptr, columns, outputs, num_tokens, HAS_BIAS: tl.constexpr):
    """Store totals [TOKENS, columns], plus a bias, to out [num_tokens, outputs], contiguous."""
    tokens = tl.arange(0, totals.shape[0])
    if HAS_BIAS:
        totals += tl.load(bias_ptr + columns, mask=columns < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (tokens < num_tokens)[:, None] & (columns < outputs)[None, :]
    place = out_ptr + tokens[:, None].to(tl.int64) * outputs + columns[None, :]
    tl.store(place, totals.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("num_tokens",))
def rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiply x [num_tokens, inputs] by weight [outputs, inputs]; grid (ceil(outputs / BLOCK_OUTPUTS),).

    num_tokens <= TOKENS, a power of two. IS_WHOLE: the inputs are whole blocks.
    """
    rows = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_row = (rows < outputs)[:, None]
    source = weight_ptr + rows[:, None].to(tl.int64) * weight_stride
    totals = tl.zeros([TOKENS, BLOCK_OUTPUTS], tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        columns = start + tl.arange(0, BLOCK_INPUTS)
        inside = columns < inputs
        seen = is_row if IS_WHOLE else is_row & inside[None, :]
        weight = tl.load(source + columns[None, :], mask=seen, other=0.0, eviction_policy="evict_first")
        for t in tl.static_range(TOKENS):
            x = tl.load(x_ptr + t * x_stride + columns, mask=inside & (t < num_tokens), other=0.0)
            part = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[None, :], 1)
            totals = _gather(totals, part, t, TOKENS)
    _finish(totals, bias_ptr, out_ptr, rows, outputs, num_tokens, HAS_BIAS)


@triton.jit(do_not_specialize=("num_tokens", "num_splits"))
def columns_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    num_splits,
    outputs,
    inputs,
    x_stride,
    weight_stride,
    TOKENS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply x [num_tokens, inputs] by weight [inputs, outputs]; grid (outputs / BLOCK_OUTPUTS, splits).

    Split s sums its share of the inputs to out[s] of out [num_splits, num_tokens, outputs], contiguous.
    IS_WHOLE: the inputs are whole blocks.
    """
    columns = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    is_column = (columns < outputs)[None, :]
    share = tl.cdiv(tl.cdiv(inputs, BLOCK_INPUTS), num_splits) * BLOCK_INPUTS
    first = tl.program_id(1) * share
    totals = tl.zeros([TOKENS, BLOCK_OUTPUTS], tl.float32)
    for start in tl.range(first, tl.minimum(inputs, first + share), BLOCK_INPUTS, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_INPUTS)
        inside = rows < inputs
        source = weight_ptr + rows[:, None].to(tl.int64) * weight_stride + columns[None, :]
        seen = is_column if IS_WHOLE else is_column & inside[:, None]
        weight = tl.load(source, mask=seen, other=0.0, eviction_policy="evict_first")
        for t in tl.static_range(TOKENS):
            x = tl.load(x_ptr + t * x_stride + rows, mask=inside & (t < num_tokens), other=0.0)
            part = tl.sum(weight.to(tl.float32) * x.to(tl.float32)[:, None], 0)
            totals = _gather(totals, part, t, TOKENS)
    out_ptr += tl.program_id(1).to(tl.int64) * num_tokens * outputs
    _finish(totals, out_ptr, out_ptr, columns, outputs, num_tokens, False)


@triton.jit(do_not_specialize=("num_splits", "num_tokens"))
def sum_kernel(parts_ptr, out_ptr, num_splits, num_tokens, outputs, BLOCK: tl.constexpr):
    """Sum parts float32 [num_splits, num_tokens, outputs] to out; grid (outputs / BLOCK, num_tokens)."""
    token = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(num_splits):
        place = (split * num_tokens + token) * outputs + columns
        total += tl.load(parts_ptr + place, mask=inside, other=0.0)
    tl.store(out_ptr + token * outputs + columns, total.to(out_ptr.dtype.element_ty), mask=inside)

"""Products with dense weights: which kernel runs, and the one for many tokens.

A few tokens run on `kernels.cpu.products_few`. With more, float32 products are tiles of sums that stay in
registers. Weights [N, K]: a lane is a token; x is transposed once per thread, and the weights are read in
place, each element broadcast. Weights [K, N]: a lane is an output; rows of the weights are read in place,
and elements of x are broadcast. Neither packs the weights.

On two cores of a Zen 5 both reach 400 to 500 GFLOP/s with 64 to 512 tokens, MKL 180 to 230. On one core of a
Sapphire Rapids 64 tokens with weights [N, K] reached 141, MKL 116. Which is taken is measured at the start.
float32 only: torch has special instructions for short floats.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import numpy as np
import torch

from kernels import batched, calls
from kernels.cpu.attention_call import aligned
from kernels.cpu.choice import MOST_FEW, TABLE, KernelName
from kernels.cpu.compiled import compiled
from kernels.cpu.products_few import can_multiply, few, few_t
from kernels.cpu.simd import KINDS, LANES, vsplat, vstore, words
from kernels.cpu.team import Kernel, next_item
from kernels.cpu.tile import tile, transpose
from kernels.product import Form

F32 = np.float32
FEW = ("few", "row", "pairs")  # kernels of `kernels.cpu.products_few`
ITEM_OUTPUTS = 48  # outputs of a work item: whole tiles of any height below, whole vectors
MOST_LANES = 64  # tokens at once with weights [N, K]: four vectors
PANEL = 4 * LANES  # outputs of one work item with weights [K, N]
MOST_TOKENS = 96  # of such an item
DEPTH = 128  # inputs at a time: with the panel they stay in the first-level cache
LAYOUT, LAYOUT_T = "q" * 10, "q" * 13  # of the words of the kernels


@compiled
def multiply_rows(rows, depth, w, w_row, x, lanes, out):
    """Add w[n] . x to out[n, :] for `rows` outputs; x [depth, lanes], out [rows, lanes].

    Lanes are whole vectors. A tile with fewer vectors has more rows, so that each tile fills the registers.
    """
    line = lanes * 4
    lane = 0
    while lane < lanes:
        vectors = min(4, (lanes - lane) // LANES)
        height = 24 // vectors
        whole = rows // height * height
        for n in range(0, whole, height):
            a, b, c = w + n * w_row, x + lane * 4, out + n * line + lane * 4
            if vectors == 4:
                tile(6, 4, 1, F32, F32, depth, a, w_row, 4, b, line, c, line)
            elif vectors == 3:
                tile(8, 3, 1, F32, F32, depth, a, w_row, 4, b, line, c, line)
            elif vectors == 2:
                tile(12, 2, 1, F32, F32, depth, a, w_row, 4, b, line, c, line)
            else:
                tile(24, 1, 1, F32, F32, depth, a, w_row, 4, b, line, c, line)
        for column in range(lane, lane + vectors * LANES, LANES):
            for n in range(whole, rows):
                a, b, c = w + n * w_row, x + column * 4, out + n * line + column * 4
                tile(1, 1, 1, F32, F32, depth, a, w_row, 4, b, line, c, line)
        lane += vectors * LANES


@compiled
def clear(floats, count):
    """Write zeros to `count` floats, whole vectors."""
    for i in range(0, count, LANES):
        vstore(F32, floats + i * 4, vsplat(F32(0.0)))


@compiled
def turn_in(x, x_row, tokens, inputs, turned, lanes):
    """Transpose x [tokens, inputs] into turned [inputs, lanes]; lanes past the tokens repeat the last one."""
    for t in range(0, tokens, LANES):
        for k in range(0, inputs, LANES):
            place = turned + (k * lanes + t) * 4
            transpose(x + t * x_row + k * 4, x_row, tokens - t, place, lanes * 4, LANES)


@compiled
def turn_back(sums, lanes, rows, tokens, out, out_row):
    """Transpose sums [rows, lanes] into out [tokens, rows]; rows are whole vectors."""
    for t in range(0, tokens, LANES):
        for n in range(0, rows, LANES):
            source = sums + (n * lanes + t) * 4
            transpose(source, lanes * 4, LANES, out + t * out_row + n * 4, out_row, tokens - t)


def _multiply(kind):
    """Multiply x by one or more matrices; the outputs of a matrix follow those of the one before it.

    Words: x and its row stride, w, its row stride and that of its matrices, out and its row stride, tokens,
    inputs, outputs of a matrix.
    """
    x, x_row, w, w_row, w_matrix, out, out_row, tokens, inputs, outputs = words(kind, LAYOUT)
    items = (outputs + ITEM_OUTPUTS - 1) // ITEM_OUTPUTS  # work items of a matrix
    lanes = (tokens + LANES - 1) // LANES * LANES
    item = next_item(kind)
    if item < 0:
        return
    buffer, turned = aligned((inputs + ITEM_OUTPUTS) * lanes)
    sums = turned + inputs * lanes * 4
    turn_in(x, x_row, tokens, inputs, turned, lanes)
    while item >= 0:
        matrix = item // items
        first = (item - matrix * items) * ITEM_OUTPUTS
        rows = min(ITEM_OUTPUTS, outputs - first)
        clear(sums, rows * lanes)
        multiply_rows(rows, inputs, w + matrix * w_matrix + first * w_row, w_row, turned, lanes, sums)
        turn_back(sums, lanes, rows, tokens, out + (matrix * outputs + first) * 4, out_row)
        item = next_item(kind)
    buffer[0] = 0  # keeps the buffer alive to here


@compiled
def _panel(vectors, tokens, depth, x, x_row, w, w_row, out, out_row):
    """Add x [tokens, depth] . w [depth, 16 * vectors] to out; heights of tiles are as even as can be."""
    t = 0
    while t < tokens:
        left = tokens - t
        height = (left + (left + 5) // 6 - 1) // ((left + 5) // 6)
        a, c = x + t * x_row, out + t * out_row
        if vectors == 4 and height == 6:
            tile(6, 4, 1, F32, F32, depth, a, x_row, 4, w, w_row, c, out_row)
        elif vectors == 4 and height == 5:
            tile(5, 4, 1, F32, F32, depth, a, x_row, 4, w, w_row, c, out_row)
        elif vectors == 4 and height == 4:
            tile(4, 4, 1, F32, F32, depth, a, x_row, 4, w, w_row, c, out_row)
        else:
            for r in range(height):
                for v in range(vectors):
                    b, d = w + v * LANES * 4, c + r * out_row + v * LANES * 4
                    tile(1, 1, 1, F32, F32, depth, a + r * x_row, x_row, 4, b, w_row, d, out_row)
        t += height


def _multiply_t(kind):
    """Multiply parts of x by one or more matrices [K, N], and add up the products.

    Words: x, its row stride and that of its parts; w, its row stride and that of its matrices; out and its
    row stride, tokens, tokens of an item, matrices, inputs of a matrix, outputs.
    """
    (
        x, x_row, x_part, w, w_row, w_matrix, out, out_row, tokens, block, matrices, inputs, outputs
    ) = words(kind, LAYOUT_T)  # fmt: skip
    panels = (outputs + PANEL - 1) // PANEL
    item = next_item(kind)
    while item >= 0:
        first, n = item // panels * block, item % panels * PANEL
        present, width = min(block, tokens - first), min(PANEL, outputs - n)
        c = out + first * out_row + n * 4
        for t in range(present):
            clear(c + t * out_row, width)
        for matrix in range(matrices):
            for k in range(0, inputs, DEPTH):
                a = x + first * x_row + matrix * x_part + k * 4
                b = w + matrix * w_matrix + k * w_row + n * 4
                _panel(width // LANES, present, min(DEPTH, inputs - k), a, x_row, b, w_row, c, out_row)
        item = next_item(kind)


MULTIPLY = Kernel(_multiply, LAYOUT)
MULTIPLY_T = Kernel(_multiply_t, LAYOUT_T)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    name = _pick("linear", x, weight)
    if name in FEW:
        return few(x, weight[None], bias, by_row=name == "row", by_pairs=name == "pairs")[:, 0]
    if name == "torch":
        return calls.linear.reference(x, weight, bias)
    out = _product(x, weight[None])[:, 0]
    return out if bias is None else out.add_(bias)


def steady_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not can_multiply(x[:MOST_FEW], weight):
        return calls.steady_linear.reference(x, weight, bias)
    if x.shape[0] <= MOST_FEW:
        return few(x, weight[None], bias)[:, 0]
    return torch.cat([few(part, weight[None], bias)[:, 0] for part in x.split(MOST_FEW)])


def stacked_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    name = _pick("linear", x, weights)
    if name in FEW:
        return few(x, weights, by_row=name == "row", by_pairs=name == "pairs")
    if name == "lanes":
        return _product(x, weights)
    # torch's batched product of short floats runs word by word: a decode in bfloat16 took 26 times as long.
    plain = batched.stacked_linear if x.dtype == torch.float32 else calls.stacked_linear.reference
    return plain(x, weights)


def linear_t(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return multiply(_pick("linear_t", x, weight), "linear_t", x, weight)


def stacked_linear_t(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    name = _pick("linear_t", x, weights)
    if name == "torch":
        return calls.stacked_linear_t.reference(x, weights)
    return few_t(x, weights) if name == "few" else _product_t(x, weights)


_DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in KINDS}


def _pick(form: Form, x: torch.Tensor, weight: torch.Tensor) -> KernelName:
    """Return the kernel for this call: that of the table, if it can run here."""
    outputs, inputs = weight.shape[-2:] if form == "linear" else weight.shape[:-3:-1]
    name = TABLE.pick(form, _DTYPES.get(x.dtype, ""), outputs, inputs, x.shape[0])
    return name if can_run(name, form, x, weight) else "torch"


def can_run(name: KernelName, form: Form, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the kernel takes x and the weight as they lie; the number of tokens is the table's."""
    if name in FEW:
        return can_multiply(x, weight)
    return name == "torch" or _has_lanes(form, x, weight)


def multiply(name: KernelName, form: Form, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply x by one weight with this kernel, which can run it."""
    if name == "torch":
        return (calls.linear if form == "linear" else calls.linear_t).reference(x, weight)
    if form == "linear_t":
        return few_t(x[:, None], weight[None]) if name == "few" else _product_t(x[:, None], weight[None])
    if name == "lanes":
        return _product(x, weight[None])[:, 0]
    return few(x, weight[None], by_row=name == "row", by_pairs=name == "pairs")[:, 0]


def _has_lanes(form: Form, x: torch.Tensor, weight: torch.Tensor) -> bool:
    outputs, inputs = weight.shape[-2:] if form == "linear" else weight.shape[:-3:-1]
    if outputs % LANES or (form == "linear" and inputs % LANES):
        return False
    is_dense: bool = x.dtype == weight.dtype == torch.float32 and x.stride(-1) == weight.stride(-1) == 1
    return is_dense


def _product(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, K] by each of weights [M, N, K], transposed: [T, M, N]."""
    tokens, inputs = x.shape
    count, outputs = weights.shape[:2]
    out = torch.empty(tokens, count, outputs)
    block = _even(tokens, MOST_LANES, LANES)
    for first in range(0, tokens, block):
        MULTIPLY(
            x.dtype,
            count * -(-outputs // ITEM_OUTPUTS),
            *(x.data_ptr() + first * x.stride(0) * 4, x.stride(0) * 4),
            *(weights.data_ptr(), weights.stride(1) * 4, weights.stride(0) * 4),
            *(out.data_ptr() + first * count * outputs * 4, count * outputs * 4),
            *(min(block, tokens - first), inputs, outputs),
        )
    return out


def _product_t(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, M, K] by weights [M, K, N], and add up the products of all M: [T, N]."""
    tokens, (matrices, inputs, outputs) = x.shape[0], weights.shape
    out = torch.empty(tokens, outputs)
    block = _even(tokens, MOST_TOKENS, 1)
    MULTIPLY_T(
        x.dtype,
        -(-tokens // block) * -(-outputs // PANEL),
        *(x.data_ptr(), x.stride(0) * 4, x.stride(1) * 4),
        *(weights.data_ptr(), weights.stride(1) * 4, weights.stride(0) * 4),
        *(out.data_ptr(), outputs * 4, tokens, block, matrices, inputs, outputs),
    )
    return out


def _even(tokens: int, most: int, unit: int) -> int:
    """Return the tokens of one of the fewest equal parts of at most `most`, rounded up to whole units."""
    parts = -(-tokens // most)
    return -(-tokens // (parts * unit)) * unit

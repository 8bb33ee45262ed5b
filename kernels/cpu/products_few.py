"""Products with dense weights for a few tokens, at the memory's speed.

With a few tokens the time goes into reading the weights, which lie in the pages as they are, [N, K] or
[K, N], float32 or short floats; short floats are widened in registers. Work items are runs of whole rows, so
that each thread reads one stream.

[N, K]: an output is a dot product. [K, N]: an item is a run of inputs, whose sums for all outputs are kept
apart and added in the order of the inputs by a second kernel, so that results do not depend on which thread
took which item.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import numpy as np
import torch

from kernels.cpu.attention_call import aligned
from kernels.cpu.choice import MOST_FEW
from kernels.cpu.compiled import compiled
from kernels.cpu.few_tile import columns, dots
from kernels.cpu.simd import KINDS, LANES, vload, vsplat, vstore, words
from kernels.cpu.team import Kernel, next_item

F32 = np.float32
ROWS = 4  # worked on together, with TOKENS tokens
LINES = 2  # prefetched for each line read by a group of tokens: two groups fetch ROWS rows
ITEMS_OF_THREAD = 2  # for weights [N, K]: threads read long streams, and relieve a busy one
LEAST_BYTES = 32768  # weights of such an item
RUN = 128  # inputs of an item with weights [K, N], at least
RUNS = 64  # items with weights [K, N], at most: each adds a row of sums for each token
REDUCED = 512  # outputs of an item of the second kernel
DOTS, SUMS, REDUCTION = "q" * 15, "q" * 12, "q" * 8  # layouts of words


@compiled
def _widen(kind, x, x_row, tokens, inputs, size, wide):
    """Write x [tokens, inputs] to float32 [tokens, inputs], whole vectors."""
    for t in range(tokens):
        for k in range(0, inputs, LANES):
            vstore(F32, wide + (t * inputs + k) * 4, vload(kind, x + t * x_row + k * size))


@compiled
def one_row(kind, x_kind, tokens, depth, w, w_row, x, x_row, bias, bias_step, out, out_row):
    """Compute one output for all tokens."""
    t = 0
    while t < tokens:
        a, c = x + t * x_row, out + t * out_row
        if tokens - t >= 4:
            dots(1, 4, 0, kind, x_kind, 0, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 4
        elif tokens - t == 3:
            dots(1, 3, 0, kind, x_kind, 0, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 3
        elif tokens - t == 2:
            dots(1, 2, 0, kind, x_kind, 0, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 2
        else:
            dots(1, 1, 0, kind, x_kind, 0, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 1


@compiled
def four_rows(kind, x_kind, tokens, depth, w, w_row, x, x_row, bias, bias_step, out, out_row):
    """Compute ROWS outputs for all tokens, and prefetch the ROWS rows behind while they are multiplied.

    The prefetches are spread over the groups of tokens, so that the memory is always at work.
    """
    ahead = w + ROWS * w_row
    t = 0
    while t < tokens:
        a, c = x + t * x_row, out + t * out_row
        if tokens - t >= 4:
            dots(ROWS, 4, LINES, kind, x_kind, ahead, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 4
        elif tokens - t >= 2:
            dots(ROWS, 2, LINES, kind, x_kind, ahead, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 2
        else:
            dots(ROWS, 1, LINES, kind, x_kind, ahead, depth, w, w_row, a, x_row, bias, bias_step, c, out_row)
            t += 1
        ahead += w_row * LINES


@compiled
def _dot_items(kind, x_kind, widens):
    """Multiply x by one or more matrices [N, K]; the outputs of a matrix follow those of the one before it.

    Words: x and its row stride; w, its row stride and that of its matrices; bias and its step; out and its
    row stride; tokens, inputs, outputs of a matrix, rows of an item, bytes of an element, 1 if by row.
    """
    (
        x, x_row, w, w_row, w_matrix, bias, bias_step, out, out_row, tokens, inputs, outputs, step, size,
        by_row
    ) = words(kind, DOTS)  # fmt: skip
    items = (outputs + step - 1) // step  # work items of a matrix
    item = next_item(kind)
    if item < 0:
        return
    is_widened = widens and size != 4
    buffer, widened = aligned(tokens * inputs if is_widened else LANES)
    if is_widened:
        _widen(kind, x, x_row, tokens, inputs, size, widened)
        x, x_row = widened, inputs * 4
    follows = tokens > 1 and by_row == 0 and w_row == inputs * size
    while item >= 0:
        matrix = item // items
        first = (item - matrix * items) * step
        end = min(outputs, first + step)
        n = first
        while n < end:
            a, b = w + matrix * w_matrix + n * w_row, bias + n * bias_step
            c = out + (matrix * outputs + n) * size
            if follows and end - n >= ROWS:
                four_rows(kind, x_kind, tokens, inputs, a, w_row, x, x_row, b, bias_step, c, out_row)
                n += ROWS
            else:
                one_row(kind, x_kind, tokens, inputs, a, w_row, x, x_row, b, bias_step, c, out_row)
                n += 1
        item = next_item(kind)
    buffer[0] = 0  # keeps the buffer alive to here


def _dot(kind):
    """Multiply by float32 inputs: short floats are widened."""
    _dot_items(kind, F32, True)


def _dot_pairs(kind):
    """Multiply pairs of bfloat16 as they are."""
    _dot_items(kind, kind, False)


@compiled
def _first_input(kind, tokens, outputs, w, w_row, x, x_row, sums):
    """Write the products of one row of inputs to the sums."""
    line = outputs * 4
    for t in range(tokens):
        columns(1, 1, 0, 0, kind, 0, outputs, w, w_row, x + t * x_row, x_row, sums + t * line, line)


@compiled
def _one_input(kind, tokens, outputs, w, w_row, x, x_row, sums):
    """Add the products of one row of inputs to the sums."""
    line = outputs * 4
    for t in range(tokens):
        columns(1, 1, 0, 1, kind, 0, outputs, w, w_row, x + t * x_row, x_row, sums + t * line, line)


@compiled
def _four_inputs(kind, tokens, outputs, w, w_row, x, x_row, sums):
    """Add the products of ROWS rows of inputs to the sums, and prefetch the ROWS rows behind."""
    line = outputs * 4
    ahead = w + ROWS * w_row
    t = 0
    while t < tokens:
        a, c = x + t * x_row, sums + t * line
        if tokens - t >= 4:
            columns(ROWS, 4, LINES, 1, kind, ahead, outputs, w, w_row, a, x_row, c, line)
            t += 4
        elif tokens - t >= 2:
            columns(ROWS, 2, LINES, 1, kind, ahead, outputs, w, w_row, a, x_row, c, line)
            t += 2
        else:
            columns(ROWS, 1, LINES, 1, kind, ahead, outputs, w, w_row, a, x_row, c, line)
            t += 1
        ahead += w_row * LINES


def _add_up(kind):
    """Multiply runs of inputs with one or more matrices [K, N]; the sums of each run are kept apart.

    Words: x, its row stride and that of its parts; w, its row stride and that of its matrices; sums, tokens,
    inputs of a matrix, outputs, inputs of a run, bytes of an element.
    """
    x, x_row, x_part, w, w_row, w_matrix, sums, tokens, inputs, outputs, run, size = words(kind, SUMS)
    runs = (inputs + run - 1) // run  # of a matrix
    follows = tokens > 1 and w_row == outputs * size
    item = next_item(kind)
    while item >= 0:
        matrix = item // runs
        k = (item - matrix * runs) * run
        end = min(inputs, k + run)
        part, rows = x + matrix * x_part, w + matrix * w_matrix
        place = sums + item * tokens * outputs * 4
        _first_input(kind, tokens, outputs, rows + k * w_row, w_row, part + k * size, x_row, place)
        k += 1
        while k < end:
            a, b = rows + k * w_row, part + k * size
            if follows and end - k >= ROWS:
                _four_inputs(kind, tokens, outputs, a, w_row, b, x_row, place)
                k += ROWS
            else:
                _one_input(kind, tokens, outputs, a, w_row, b, x_row, place)
                k += 1
        item = next_item(kind)


def _reduce(kind):
    """Add the sums of the runs, in their order.

    Words: sums, runs, out and its row stride, tokens, outputs, outputs of an item, bytes of an element.
    """
    sums, runs, out, out_row, tokens, outputs, step, size = words(kind, REDUCTION)
    items = (outputs + step - 1) // step  # work items of a token
    item = next_item(kind)
    while item >= 0:
        t = item // items
        first = (item - t * items) * step
        for n in range(first, min(outputs, first + step), LANES):
            total = vsplat(F32(0.0))
            for i in range(runs):
                total = total + vload(F32, sums + ((i * tokens + t) * outputs + n) * 4)
            vstore(kind, out + t * out_row + n * size, total)
        item = next_item(kind)


DOT = Kernel(_dot, DOTS)
DOT_PAIRS = Kernel(_dot_pairs, DOTS)
ADD_UP = Kernel(_add_up, SUMS)
REDUCE = Kernel(_reduce, REDUCTION)
NO_BIAS = np.zeros(1, F32)  # zero in every dtype


def can_multiply(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the kernels here can multiply x [T, ..., K] by weights [..., N, K] or [..., K, N]."""
    return (
        x.shape[0] <= MOST_FEW
        and not weight.shape[-1] % LANES
        and x.dtype is weight.dtype
        and x.dtype in KINDS
        and x.stride(-1) == 1
        and weight.stride(-1) == 1
    )


def few(
    x: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    by_row: bool = False,
    by_pairs: bool = False,
) -> torch.Tensor:
    """Multiply x [T, K] by each of weights [M, N, K], transposed, plus bias [N]: [T, M, N].

    by_row: work on one row at a time, which some processors are faster with where x is small; the result has
    the same bits. by_pairs: multiply pairs of bfloat16, on a processor that can (`few_tile.CAN_PAIR`).
    """
    tokens, inputs = x.shape
    count, outputs = weights.shape[:2]
    size = x.element_size()
    out = torch.empty(tokens, count, outputs, dtype=x.dtype)
    items = max(1, ITEMS_OF_THREAD * torch.get_num_threads() // count)  # work items of a matrix
    step = max(-(-outputs // items), LEAST_BYTES // (inputs * size), 1)
    step = -(-step // ROWS) * ROWS
    kernel = DOT_PAIRS if by_pairs else DOT
    kernel(
        x.dtype,
        count * -(-outputs // step),
        *(x.data_ptr(), x.stride(0) * size),
        *(weights.data_ptr(), weights.stride(1) * size, weights.stride(0) * size),
        *((NO_BIAS.ctypes.data, 0) if bias is None else (bias.data_ptr(), size)),
        *(out.data_ptr(), count * outputs * size, tokens, inputs, outputs, step, size, by_row),
    )
    return out


def few_t(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply x [T, M, K] by weights [M, K, N], and add up the products of all M: [T, N]."""
    tokens, (matrices, inputs, outputs), size = x.shape[0], weights.shape, x.element_size()
    run = max(RUN, -(-matrices * inputs // (RUNS * ROWS)) * ROWS)
    runs = matrices * -(-inputs // run)
    out, sums = torch.empty(tokens, outputs, dtype=x.dtype), torch.empty(runs, tokens, outputs)
    ADD_UP(
        x.dtype,
        runs,
        *(x.data_ptr(), x.stride(0) * size, x.stride(1) * size),
        *(weights.data_ptr(), weights.stride(1) * size, weights.stride(0) * size),
        *(sums.data_ptr(), tokens, inputs, outputs, run, size),
    )
    REDUCE(
        x.dtype,
        tokens * -(-outputs // REDUCED),
        *(sums.data_ptr(), runs, out.data_ptr(), outputs * size, tokens, outputs, REDUCED, size),
    )
    return out

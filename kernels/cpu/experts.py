"""Mixtures of experts on the CPU: the router's choice, products of the experts in use, the weighted sum.

With a few tokens the time goes into reading weights, and only those of experts in use are read, at the
memory's speed: a work item is a run of rows of one expert, multiplied by all tokens that use it. Which
experts these are is read by the kernels themselves, so that a step can be recorded (`kernels.cpu.program`).
Experts with many tokens are dense products of their own.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch

from kernels import by_expert, calls
from kernels.cpu.attention_call import aligned
from kernels.cpu.choice import MOST_FEW
from kernels.cpu.compiled import compiled
from kernels.cpu.products import clear, linear
from kernels.cpu.products_few import NO_BIAS, REDUCED, ROWS, four_rows, one_row
from kernels.cpu.quantized import ROWS as DECODED_ROWS
from kernels.cpu.quantized import dots_of_rows
from kernels.cpu.quantized_call import WORDS, Weight, levels_row, words_of
from kernels.cpu.simd import (
    KINDS,
    LANES,
    read,
    read_i32,
    read_i64,
    vfma,
    vload,
    vsplat,
    vsplat_load,
    vstore,
    words,
    write,
    write_f32,
    write_i32,
    write_i64,
)
from kernels.cpu.team import Kernel, next_item
from kernels.packing import TILE
from kernels.quantized import QuantizedWeight
from kernels.routing import Routing

F32 = np.float32
CHOICE, GROUPS, SUM = "q" * 14, "q" * 19, "q" * 11  # layouts of words
QUANTIZED = "q" * (WORDS + 16)
ITEMS_OF_THREAD = 8  # of all experts in use together: they have different numbers of tokens
LEAST_BYTES, LEAST_CODES = 32768, 16384  # dense and quantised weights of an item
LOWEST = F32(-3e38)

# --------------------------------------------------------------------------- the router's choice


@compiled
def _choose(kind, logits, experts, top_k, is_normalised, size, chosen, weights, left):
    """Write the top_k experts of a token and their weights; `left` float32 [experts] is scratch."""
    for e in range(experts):
        write_f32(left + e * 4, read(kind, logits + e * size))
    for j in range(top_k):
        best, largest = 0, LOWEST
        for e in range(experts):
            value = read(F32, left + e * 4)
            if value > largest:
                best, largest = e, value
        write_i32(chosen + j * 4, best)
        write_f32(weights + j * 4, largest)
        write_f32(left + best * 4, LOWEST)
    largest, total = read(F32, weights), 0.0
    if is_normalised != 0:
        for j in range(top_k):
            total += math.exp(read(F32, weights + j * 4) - largest)
    else:
        for e in range(experts):
            total += math.exp(read(kind, logits + e * size) - largest)
    for j in range(top_k):
        place = weights + j * 4
        write_f32(place, F32(math.exp(read(F32, place) - largest) / total))


@compiled
def _add_shared(gate, units, shared, top_k, chosen, weights):
    """Give the chosen experts their numbers among all units; append the slices of the shared one."""
    weight = F32(1.0 / (1.0 + math.exp(-gate)))
    for i in range(shared):
        unit = (i + 1) * units // shared - 1
        for j in range(top_k):
            e = read_i32(chosen + j * 4)
            if unit <= e:
                write_i32(chosen + j * 4, e + 1)
        write_i32(chosen + (top_k + i) * 4, unit)
        write_f32(weights + (top_k + i) * 4, weight)


def _route(kind):
    """Choose, and sort the pairs by expert: one item.

    Words: logits and their row stride, tokens, experts, slices of the shared one, top_k, 1 if weights are
    normalised, bytes of an element; weights, places, rows, bounds; the experts of the pairs, scratch; the
    use of each or 0.
    """
    (
        logits, row, tokens, experts, shared, top_k, is_normalised, size, weights, places, rows, bounds,
        chosen, use
    ) = words(kind, CHOICE)  # fmt: skip
    if next_item(kind) < 0:
        return
    units, pairs = experts + shared, top_k + shared
    buffer, left = aligned(units)
    for e in range(units + 1):
        write_i32(bounds + e * 4, 0)
    for t in range(tokens):
        at, of_token, its_weights = logits + t * row, chosen + t * pairs * 4, weights + t * pairs * 4
        _choose(kind, at, experts, top_k, is_normalised, size, of_token, its_weights, left)
        if shared > 0:
            gate = read(kind, at + experts * size)
            _add_shared(gate, units, shared, top_k, of_token, its_weights)
        for j in range(pairs):
            count = bounds + (read_i32(of_token + j * 4) + 1) * 4
            write_i32(count, read_i32(count) + 1)
    for e in range(units):
        if use != 0:
            write_i64(use + e * 8, read_i64(use + e * 8) + read_i32(bounds + (e + 1) * 4))
        write_i32(left + e * 4, read_i32(bounds + e * 4))  # the place of the expert's next pair
        write_i32(bounds + (e + 1) * 4, read_i32(bounds + e * 4) + read_i32(bounds + (e + 1) * 4))
    for pair in range(tokens * pairs):
        cursor = left + read_i32(chosen + pair * 4) * 4
        place = read_i32(cursor)
        write_i32(cursor, place + 1)
        write_i32(places + pair * 4, place)
        write_i32(rows + place * 4, pair // pairs)
    buffer[0] = 0  # keeps the buffer alive to here


ROUTE = Kernel(_route, CHOICE)


def route(
    logits: torch.Tensor,
    top_k: int,
    is_normalised: bool,
    num_shared: int = 0,
    use: torch.Tensor | None = None,
) -> Routing:
    if logits.dtype not in KINDS or logits.stride(1) != 1:
        return calls.route.reference(logits, top_k, is_normalised, num_shared, use)
    tokens, experts = logits.shape[0], logits.shape[1] - (num_shared > 0)
    size, pairs = logits.element_size(), top_k + num_shared
    weights = torch.empty(tokens, pairs, dtype=torch.float32)
    places = torch.empty(tokens, pairs, dtype=torch.int32)
    rows = torch.empty(tokens * pairs, dtype=torch.int32)
    bounds = torch.empty(experts + num_shared + 1, dtype=torch.int32)
    chosen = torch.empty(tokens, pairs, dtype=torch.int32)
    ROUTE(
        logits.dtype,
        1,
        *(logits.data_ptr(), logits.stride(0) * size, tokens, experts, num_shared),
        *(top_k, is_normalised, size),
        *(weights.data_ptr(), places.data_ptr(), rows.data_ptr(), bounds.data_ptr(), chosen.data_ptr()),
        0 if use is None else use.data_ptr(),
    )
    return Routing(weights, places, rows, bounds)


# --------------------------------------------------------------------------- products


@compiled
def next_group(bounds, experts, slot, expert):
    """Return the next expert with pairs behind `expert`, `slot` of them further; `experts` past the last."""
    while slot > 0 and expert < experts:
        expert += 1
        if expert < experts and read_i32(bounds + expert * 4) < read_i32(bounds + (expert + 1) * 4):
            slot -= 1
    return expert


@compiled
def next_part(kind, bounds, experts, items, most, slot, expert):
    """Take a work item of an expert that has up to `most` pairs; each expert has `items`.

    Return its number among the expert's, -1 if none is left, and the slot and the expert, which the next call
    begins with. The first one begins with -1 and -1.
    """
    item = next_item(kind)
    while item >= 0:
        expert, slot = next_group(bounds, experts, item // items - slot, expert), item // items
        if expert >= experts:
            return -1, slot, expert
        if pairs_of(bounds, expert) <= most:
            return item % items, slot, expert
        item = next_item(kind)
    return -1, slot, expert


@compiled
def pairs_of(bounds, expert):
    return read_i32(bounds + (expert + 1) * 4) - read_i32(bounds + expert * 4)


@compiled
def gather(kind, x, x_row, rows, first, count, columns, size, wide, inputs):
    """Write rows of x, rows[first ...] or those from `first` on, to float32 [count, inputs]; in vectors.

    The inputs behind the columns of x are zeros.
    """
    for i in range(count):
        row = read_i32(rows + (first + i) * 4) if rows != 0 else first + i
        line = wide + i * inputs * 4
        for k in range(0, columns, LANES):
            vstore(F32, line + k * 4, vload(kind, x + row * x_row + k * size))
        clear(line + columns * 4, inputs - columns)


def _group(kind):
    """Multiply the tokens of each expert that has up to `most` of them by its matrix.

    Words: x and its row stride, rows of the places or 0 if x is by place; w and its strides from row to row
    and from expert to expert; bounds, experts; out and its row stride; inputs, outputs, rows of an item,
    bytes of an element, most, tokens; bias and its strides from output to output, which is 0 for one zero,
    and from expert to expert. There are as many items as there can be experts in use.
    """
    (
        x, x_row, rows, w, w_row, w_expert, bounds, experts, out, out_row, inputs, outputs, step, size, most,
        tokens, bias, bias_step, bias_expert
    ) = words(kind, GROUPS)  # fmt: skip
    items = (outputs + step - 1) // step  # of an expert
    part, slot, expert = next_part(kind, bounds, experts, items, most, -1, -1)
    if part < 0:
        return
    buffer, wide = aligned(min(most, tokens) * inputs)
    gathered = -1
    while part >= 0:
        place, count = read_i32(bounds + expert * 4), pairs_of(bounds, expert)
        if gathered != expert:
            gather(kind, x, x_row, rows, place, count, inputs, size, wide, inputs)
            gathered = expert
        n, end = part * step, min(outputs, (part + 1) * step)
        follows = count > 1 and w_row == inputs * size
        while n < end:
            a, c = w + expert * w_expert + n * w_row, out + place * out_row + n * size
            b = bias + expert * bias_expert + n * bias_step
            if follows and end - n >= ROWS:
                four_rows(kind, F32, count, inputs, a, w_row, wide, inputs * 4, b, bias_step, c, out_row)
                n += ROWS
            else:
                one_row(kind, F32, count, inputs, a, w_row, wide, inputs * 4, b, bias_step, c, out_row)
                n += 1
        part, slot, expert = next_part(kind, bounds, experts, items, most, slot, expert)
    buffer[0] = 0  # keeps the buffer alive to here


GROUP = Kernel(_group, GROUPS)


def grouped_linear(
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    is_by_place: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if not _can_group(x, weights) or (bias is not None and bias.stride(1) != 1):
        return calls.grouped_linear.reference(x, weights, routing, is_by_place, bias)
    out = torch.empty(routing.rows.shape[0], weights.shape[1], dtype=x.dtype)
    _multiply_few(x, weights, routing, is_by_place, bias, out)
    if routing.num_tokens > MOST_FEW:
        for e, (begin, end) in enumerate(pairwise(routing.bounds.tolist())):
            if end - begin > MOST_FEW:
                part = x[begin:end] if is_by_place else x[routing.rows[begin:end]]
                out[begin:end] = linear(part, weights[e], None if bias is None else bias[e])
    return out


def _can_group(x: torch.Tensor, weights: torch.Tensor) -> bool:
    return (
        not weights.shape[2] % LANES
        and x.dtype is weights.dtype
        and x.dtype in KINDS
        and x.stride(1) == weights.stride(2) == 1
    )


def _multiply_few(
    x: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    is_by_place: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply the tokens of all experts that have a few."""
    experts, outputs, inputs = weights.shape
    size = x.element_size()
    slots = max(1, min(experts, routing.rows.shape[0]))
    parts = -(-ITEMS_OF_THREAD * torch.get_num_threads() // slots)
    step = max(-(-outputs // parts), LEAST_BYTES // (inputs * size), 1)
    step = -(-step // ROWS) * ROWS
    GROUP(
        x.dtype,
        slots * -(-outputs // step),
        *(x.data_ptr(), x.stride(0) * size, 0 if is_by_place else routing.rows.data_ptr()),
        *(weights.data_ptr(), weights.stride(1) * size, weights.stride(0) * size),
        *(routing.bounds.data_ptr(), experts, out.data_ptr(), outputs * size, inputs, outputs, step, size),
        *(MOST_FEW, routing.num_tokens),
        *((NO_BIAS.ctypes.data, 0, 0) if bias is None else (bias.data_ptr(), size, bias.stride(0) * size)),
    )


@compiled
def _finish(kind, sums, sums_row, bias, made, made_row, count, first, end, size):
    """Write outputs [first, end) of `count` rows of sums, plus a bias if there is one, rounded once.

    The rows may be the sums themselves.
    """
    for p in range(count):
        source, target, n = sums + p * sums_row, made + p * made_row, first
        while n + LANES <= end:
            total = vload(F32, source + n * 4)
            if bias != 0:
                total = total + vload(kind, bias + n * size)
            vstore(kind, target + n * size, total)
            n += LANES
        while n < end:
            last = read(F32, source + n * 4)
            if bias != 0:
                last += read(kind, bias + n * size)
            write(kind, target + n * size, last)
            n += 1


def _group_quantized(kind):
    """Multiply as _group, by decoding the codes of DECODED_ROWS outputs at a time.

    Words: the weight; x and its row stride, rows of the places or 0; bounds, experts; sums, float32, and
    their row stride; columns of x, rows of an item, bytes of an element of x, most, tokens; out and its row
    stride, bias or 0, and its stride from expert to expert. `out` is of the dtype of x; of float32, it may be
    the sums.
    """
    found = words(kind, QUANTIZED)
    w = Weight(*found[:WORDS])
    (
        x, x_row, rows, bounds, experts, sums, sums_row, columns, step, size, most, tokens, out, out_row,
        bias, bias_expert
    ) = found[WORDS:]  # fmt: skip
    items = (w.rows - DECODED_ROWS) // step + 1  # of an expert
    part, slot, expert = next_part(kind, bounds, experts, items, most, -1, -1)
    if part < 0:
        return
    inputs = w.tiles * TILE
    line = inputs * 4
    buffer, wide = aligned(min(most, tokens) * inputs + DECODED_ROWS * levels_row(w) // 4)
    levels = wide + min(most, tokens) * line
    gathered = -1
    while part >= 0:
        place, count = read_i32(bounds + expert * 4), pairs_of(bounds, expert)
        if gathered != expert:
            gather(kind, x, x_row, rows, place, count, columns, size, wide, inputs)
            gathered = expert
        end = w.rows if part == items - 1 else (part + 1) * step
        for begin in range(part * step, end, DECODED_ROWS):
            row = min(begin, w.rows - DECODED_ROWS)  # the last rows overlap those before
            c = sums + place * sums_row + row * 4
            dots_of_rows(w, expert, row, levels, wide, line, count, c, sums_row)
        if out != sums or bias != 0:
            b = bias + expert * bias_expert if bias != 0 else 0
            s, c = sums + place * sums_row, out + place * out_row
            _finish(kind, s, sums_row, b, c, out_row, count, part * step, end, size)
        part, slot, expert = next_part(kind, bounds, experts, items, most, slot, expert)
    buffer[0] = 0  # keeps the buffer alive to here


GROUP_QUANTIZED = Kernel(_group_quantized, QUANTIZED)


def grouped_quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    routing: Routing,
    is_by_place: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    columns = x.shape[1]
    can_add = bias is None or (bias.dtype is x.dtype and bias.stride(1) == 1)
    is_known = x.dtype in KINDS and not columns % LANES and x.stride(1) == 1
    if weight.unit_outputs < DECODED_ROWS or not is_known or not can_add:
        return calls.grouped_quantized_linear.reference(x, weight, routing, is_by_place, bias)
    experts, pairs, size, tokens = (
        weight.num_units,
        routing.rows.shape[0],
        x.element_size(),
        routing.num_tokens,
    )
    sums = torch.empty(pairs, weight.unit_outputs, dtype=torch.float32)
    out = sums if x.dtype is torch.float32 else torch.empty(pairs, weight.unit_outputs, dtype=x.dtype)
    w, slots = words_of(weight), max(1, min(experts, pairs))
    parts = -(-ITEMS_OF_THREAD * torch.get_num_threads() // slots)
    step = max(-(-w.rows // parts), LEAST_CODES // weight.unit_inputs, 1)
    step = -(-step // DECODED_ROWS) * DECODED_ROWS
    GROUP_QUANTIZED(
        x.dtype,
        slots * ((w.rows - DECODED_ROWS) // step + 1),
        *(*w, x.data_ptr(), x.stride(0) * size, 0 if is_by_place else routing.rows.data_ptr()),
        *(routing.bounds.data_ptr(), experts, sums.data_ptr(), weight.unit_outputs * 4),
        *(columns, step, size, MOST_FEW, tokens, out.data_ptr(), weight.unit_outputs * size),
        *((0, 0) if bias is None else (bias.data_ptr(), bias.stride(0) * size)),
    )
    if tokens > MOST_FEW:
        by_expert.fill_groups(out, x, weight, routing, is_by_place, bias, least=MOST_FEW + 1)
    return out


# --------------------------------------------------------------------------- the weighted sum


def _combine(kind):
    """Add up each token's pairs, in the order of its choice; an item is some outputs of a token.

    Words: y and its row stride, weights, places, top_k, bounds of the first and the last place; out and its
    row stride, outputs, bytes of an element.
    """
    y, y_row, weights, places, top_k, begin_at, end_at, out, out_row, outputs, size = words(kind, SUM)
    items = (outputs + REDUCED - 1) // REDUCED
    begin, end = read_i32(begin_at), read_i32(end_at)
    item = next_item(kind)
    while item >= 0:
        token, first = item // items, item % items * REDUCED
        for n in range(first, min(outputs, first + REDUCED), LANES):
            total = vsplat(F32(0.0))
            for pair in range(token * top_k, (token + 1) * top_k):
                place = read_i32(places + pair * 4)
                if begin <= place < end:
                    weight = vsplat_load(F32, weights + pair * 4)
                    total = vfma(weight, vload(kind, y + place * y_row + n * size), total)
            vstore(kind, out + token * out_row + n * size, total)
        item = next_item(kind)


COMBINE = Kernel(_combine, SUM)


def combine(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    if y.dtype not in KINDS or y.shape[1] % LANES or y.stride(1) != 1:
        return calls.combine.reference(y, routing)
    tokens, top_k = routing.places.shape
    size, outputs, bounds = y.element_size(), y.shape[1], routing.bounds
    out = torch.empty(tokens, outputs, dtype=y.dtype)
    COMBINE(
        y.dtype,
        tokens * -(-outputs // REDUCED),
        *(y.data_ptr(), y.stride(0) * size, routing.weights.data_ptr(), routing.places.data_ptr(), top_k),
        *(bounds.data_ptr(), bounds[-1:].data_ptr(), out.data_ptr(), outputs * size, outputs, size),
    )
    return out

"""Products with quantised weights on the CPU, in float32.

Short floats are converted first, since torch's products of them are no faster (bench/LOG.md).

With up to FEW tokens most time goes into reading and decoding weights: the codes of ROWS outputs at a time
are decoded in registers and multiplied by every token. With more tokens most time goes into multiplying: a
piece of ITEM_OUTPUTS outputs by PIECE_TILES tiles is decoded into a core's cache and multiplied there by
BLOCK_TOKENS tokens, as in `kernels.cpu.products`. Neither keeps an unpacked weight.

On a processor that multiplies bytes, up to 16 tokens may be multiplied in whole numbers
(`kernels.cpu.quantized_bytes`), where the table of choices says so.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: numba infers their types, one compilation per dtype.

from __future__ import annotations

import torch

from kernels import calls
from kernels.cpu import products
from kernels.cpu.attention_call import aligned
from kernels.cpu.choice import TABLE, KernelName
from kernels.cpu.codes import make_levels
from kernels.cpu.compiled import compiled
from kernels.cpu.products import ITEM_OUTPUTS, clear, multiply_rows, turn_back, turn_in
from kernels.cpu.quantized_bytes import can_multiply, few_bytes
from kernels.cpu.quantized_call import WORDS, Weight, levels_row, words_of
from kernels.cpu.quantized_tile import decode, dots
from kernels.cpu.simd import LANES, words
from kernels.cpu.team import Kernel, next_item
from kernels.packing import TILE
from kernels.product import Form, Product
from kernels.quantized import QuantizedWeight

FEW = 15  # tokens
ROWS = 4  # outputs worked on together: with 4 tokens their sums fill half the registers
ITEM_WEIGHTS = 65536  # behind one item of few tokens: some 6 us for each four of them
PIECE_TILES = 16  # 48 outputs by 1024 inputs in float32 and 64 tokens of these fit half a second-level cache
BLOCK_TOKENS = 64
FEW_LAYOUT, MANY_LAYOUT = "q" * (WORDS + 6), "q" * (WORDS + 5)


@compiled
def _read_levels(w, unit, row, count, levels):
    """Read the levels of `count` rows of a unit, from `row` on."""
    for r in range(row, row + count):
        scales = w.scales + unit * w.scales_unit + r * w.scales_row
        zeros = w.zeros + unit * w.zeros_unit + r * w.zeros_row
        make_levels(scales, zeros, w.groups, levels, levels_row(w) // 2)
        levels += levels_row(w)


# --------------------------------------------------------------------------- few tokens


@compiled
def dots_of_rows(w, unit, row, levels, x, x_row, tokens, out, out_row):
    """Compute out[t, 0..ROWS) for all tokens t and rows [row, row + ROWS) of the outputs' unit."""
    for piece in range(w.in_units):
        _read_levels(w, unit + piece, row, ROWS, levels)
        codes = w.codes + (unit + piece) * w.codes_unit + row * w.codes_row
        column = x + piece * w.tiles * TILE * 4
        t = 0
        while t < tokens:
            a, c = column + t * x_row, out + t * out_row
            if tokens - t >= 4:
                dots(ROWS, 4, w, codes, levels, a, x_row, c, out_row, piece)
                t += 4
            elif tokens - t >= 2:
                dots(ROWS, 2, w, codes, levels, a, x_row, c, out_row, piece)
                t += 2
            else:
                dots(ROWS, 1, w, codes, levels, a, x_row, c, out_row, piece)
                t += 1


def _multiply_few(kind):
    """Multiply a few tokens, dotting ROWS outputs at a time.

    Words: the weight; x and its row stride, out and its row stride, tokens, rows of an item. If a unit's rows
    are not a multiple of ROWS, its last ROWS rows overlap the ones before. One item has all of them, since
    only one thread may add to a sum.
    """
    found = words(kind, FEW_LAYOUT)
    w = Weight(*found[:WORDS])
    x, x_row, out, out_row, tokens, step = found[WORDS:]
    items = (w.rows - ROWS) // step + 1  # work items of a unit
    buffer, levels = aligned(ROWS * levels_row(w) // 4)
    item = next_item(kind)
    while item >= 0:
        unit, part = item // items, item % items
        end = w.rows if part == items - 1 else (part + 1) * step
        for begin in range(part * step, end, ROWS):
            row = min(begin, w.rows - ROWS)
            place = out + (unit * w.rows + row) * 4
            dots_of_rows(w, unit, row, levels, x, x_row, tokens, place, out_row)
        item = next_item(kind)
    buffer[0] = 0  # keeps the buffer alive to here


# --------------------------------------------------------------------------- more tokens


@compiled
def _piece_row(w):
    """Return the bytes of a row of a piece, with a spare cache line so that rows do not collide."""
    return min(PIECE_TILES, w.tiles) * TILE * 4 + LANES * 4


@compiled
def _multiply_rows(w, unit, row, count, x, lanes, sums, levels, weights):
    """Compute sums [count, lanes] for rows [row, row + count) of the outputs' unit; x [K, lanes]."""
    clear(sums, count * lanes)
    line = _piece_row(w)
    for piece in range(unit, unit + w.in_units):
        _read_levels(w, piece, row, count, levels)
        codes = w.codes + piece * w.codes_unit + row * w.codes_row
        for tile in range(0, w.tiles, PIECE_TILES):
            tiles = min(PIECE_TILES, w.tiles - tile)
            for r in range(count):
                decode(
                    w, codes + r * w.codes_row, levels + r * levels_row(w), tile, tiles, weights + r * line
                )
            multiply_rows(count, tiles * TILE, weights, line, x, lanes, sums)
            x += tiles * TILE * lanes * 4


def _multiply_many(kind):
    """Multiply blocks of tokens; an item is a block and ITEM_OUTPUTS outputs.

    Words: those of _multiply_few without the rows of an item.
    """
    found = words(kind, MANY_LAYOUT)
    w = Weight(*found[:WORDS])
    x, x_row, out, out_row, tokens = found[WORDS:]
    item = next_item(kind)
    if item < 0:
        return
    inputs = w.in_units * w.tiles * TILE
    widest = min(BLOCK_TOKENS, (tokens + LANES - 1) // LANES * LANES)
    of_a_row = (_piece_row(w) + levels_row(w)) // 4
    buffer, turned = aligned((inputs + ITEM_OUTPUTS) * widest + ITEM_OUTPUTS * of_a_row)
    sums = turned + inputs * widest * 4
    levels = sums + ITEM_OUTPUTS * widest * 4
    weights = levels + ITEM_OUTPUTS * levels_row(w)
    of_a_unit = (w.rows + ITEM_OUTPUTS - 1) // ITEM_OUTPUTS
    block, present, lanes = -1, 0, 0
    while item >= 0:
        if item // (w.out_units * of_a_unit) != block:
            block = item // (w.out_units * of_a_unit)
            present = min(BLOCK_TOKENS, tokens - block * BLOCK_TOKENS)
            lanes = (present + LANES - 1) // LANES * LANES
            turn_in(x + block * BLOCK_TOKENS * x_row, x_row, present, inputs, turned, lanes)
        chunk = item % (w.out_units * of_a_unit)
        unit, row = chunk // of_a_unit, chunk % of_a_unit * ITEM_OUTPUTS
        count = min(ITEM_OUTPUTS, w.rows - row)
        _multiply_rows(w, unit, row, count, turned, lanes, sums, levels, weights)
        place = out + block * BLOCK_TOKENS * out_row + (unit * w.rows + row) * 4
        turn_back(sums, lanes, count, present, place, out_row)
        item = next_item(kind)
    buffer[0] = 0  # keeps the buffer alive to here


# --------------------------------------------------------------------------- the call

FEW_TOKENS = Kernel(_multiply_few, FEW_LAYOUT)
MANY_TOKENS = Kernel(_multiply_many, MANY_LAYOUT)


def quantized_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    weight.check_operands(x, bias)
    if weight.unit_outputs < ROWS or not x.shape[0]:
        return calls.quantized_linear.reference(x, weight, bias)
    name = TABLE.pick(*product_of(weight), x.shape[0]) if can_multiply(x, weight) else "decode"
    return _multiply(name, x, weight, bias)


def product_of(weight: QuantizedWeight) -> Product:
    """Return the product that the weight is for."""
    found: Product | None = weight.derived.get("product")
    if found is None:
        found = weight.derived["product"] = Product.quantized(
            weight.bits, weight.group, weight.num_outputs, weight.num_inputs
        )
    return found


def _multiply(
    name: KernelName, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if name != "decode":
        return few_bytes(x, weight, bias, by_tiles=name == "amx")
    x32 = x.float() if weight.input_scale is None else x.float() * weight.input_scale
    x32 = x32 if x32.stride(1) == 1 else x32.contiguous()
    tokens, w = x.shape[0], words_of(weight)
    out = torch.empty(tokens, weight.num_outputs)
    words = (*w, x32.data_ptr(), x32.stride(0) * 4, out.data_ptr(), out.stride(0) * 4, tokens)
    if tokens <= FEW or weight.unit_outputs % LANES:
        step = max(ROWS, ITEM_WEIGHTS // (weight.num_inputs * -(-tokens // 4)) // ROWS * ROWS)
        FEW_TOKENS(torch.float32, w.out_units * ((w.rows - ROWS) // step + 1), *words, step)
    else:
        blocks = -(-tokens // BLOCK_TOKENS)
        MANY_TOKENS(torch.float32, blocks * w.out_units * -(-w.rows // ITEM_OUTPUTS), *words)
    out = out if bias is None else out.add_(bias)
    return out.to(x.dtype)


# --------------------------------------------------------------------------- kernels by name


def can_run(name: KernelName, form: Form, x: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> bool:
    """Return True if the kernel takes x and the weight as they lie; the number of tokens is the table's."""
    if isinstance(weight, torch.Tensor):
        return products.can_run(name, form, x, weight)
    return name == "decode" or can_multiply(x, weight)


def multiply(
    name: KernelName, form: Form, x: torch.Tensor, weight: torch.Tensor | QuantizedWeight
) -> torch.Tensor:
    """Multiply x by one weight with this kernel, which can run it."""
    if isinstance(weight, torch.Tensor):
        return products.multiply(name, form, x, weight)
    return _multiply(name, x, weight)

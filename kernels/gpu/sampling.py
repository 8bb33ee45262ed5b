"""The choice of tokens for GPUs: one pass over the scores, and one over what each part of a row found."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Functions of the compiler carry no annotations: Triton infers their types from the call.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import calls

PART = 4096  # scores of a program
MOST_PARTS = 128


@triton.jit
def _mix(x, SHIFT: tl.constexpr, MULTIPLIER: tl.constexpr):
    return (x ^ (x >> SHIFT)) * tl.full([], MULTIPLIER, tl.uint32)


@triton.jit
def _log(x):
    """Return the logarithm of float32 x > 0, to 2 ulp also near 1, where the GPU's own is not.

    x = 2^n m with m in [sqrt(1/2), sqrt(2)); log m = 2 artanh(s) with s = (m - 1) / (m + 1).
    """
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = tl.div_rn(m - 1.0, m + 1.0)
    z = s * s
    series = 0.33333334 + z * (0.2 + z * (0.14285715 + z * (0.11111111 + z * 0.09090909)))
    small = 2.0 * s + 2.0 * s * z * series
    n = exponent.to(tl.float32)
    return n * 0.693145752 + (n * 1.42860677e-6 + small)  # ln 2 in two parts; the first is exact times n


@triton.jit
def _gumbel(ids, first, second):
    """Return `kernels.noise.gumbel` of token ids int32 and the halves uint32 of a key."""
    x = ids.to(tl.uint32, bitcast=True) * tl.full([], 0x9E3779B9, tl.uint32) + first
    x = _mix(_mix(x, 16, 0x7FEB352D), 15, 0x846CA68B) ^ second
    x = _mix(_mix(x, 16, 0x7FEB352D), 15, 0x846CA68B)
    number = ((x >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -_log(-_log(number))


@triton.jit(
    do_not_specialize=("row_stride", "vocab", "num_parts"),
    do_not_specialize_on_alignment=("scores_ptr", "draws_ptr"),  # of some rows of a step
)
def _part_kernel(
    scores_ptr,
    draws_ptr,
    floors_ptr,
    values_ptr,
    places_ptr,
    row_stride,
    vocab,
    num_parts,
    HAS_DRAWS: tl.constexpr,
    HAS_FLOORS: tl.constexpr,
    PART: tl.constexpr,
):
    """Find the largest score of a part of a row, with noise where the row draws; grid (R, num_parts).

    scores float32 [R, vocab] by their row stride; draws int32 [R, 3]; floors float32 [R]; values and places
    [R, num_parts].
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab
    x = tl.load(scores_ptr + row * row_stride + ids, mask=inside, other=float("-inf"))
    if HAS_DRAWS:
        temperature = tl.load(draws_ptr + row * 3).to(tl.float32, bitcast=True)
        if temperature > 0.0:
            first = tl.load(draws_ptr + row * 3 + 1).to(tl.uint32, bitcast=True)
            second = tl.load(draws_ptr + row * 3 + 2).to(tl.uint32, bitcast=True)
            x = tl.div_rn(x, tl.full([PART], 1.0, tl.float32) * temperature)
            if HAS_FLOORS:
                inside = inside & (x >= tl.load(floors_ptr + row))
            x = tl.where(inside, x + _gumbel(ids, first, second), float("-inf"))
    best = tl.max(x, 0)
    place = tl.min(tl.where(x == best, ids, 2147483647), 0)
    tl.store(values_ptr + row * num_parts + part, best)
    tl.store(places_ptr + row * num_parts + part, place)


@triton.jit(do_not_specialize=("vocab", "num_parts"), do_not_specialize_on_alignment=("out_ptr",))
def _join_kernel(values_ptr, places_ptr, out_ptr, vocab, num_parts, MOST_PARTS: tl.constexpr):
    """Find the first largest of a row's parts; grid (R,). A row without a number gives the last token."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, MOST_PARTS)
    is_part = parts < num_parts
    x = tl.load(values_ptr + row * num_parts + parts, mask=is_part, other=float("-inf"))
    places = tl.load(places_ptr + row * num_parts + parts, mask=is_part, other=2147483647)
    place = tl.min(tl.where(x == tl.max(x, 0), places, 2147483647), 0)
    tl.store(out_ptr + row, tl.minimum(place, vocab - 1).to(tl.int64))


@triton.jit
def _order(x):
    """Return int32 that are ordered as the float32 are; the same function leads back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _least_place(scores_ptr, vocab, low, high, peak, limit, BY_NUMBER: tl.constexpr, PART: tl.constexpr):
    """Return the least place t (`_order`) of [low, high] so that less than `limit` lies above it.

    BY_NUMBER: scores are counted; else their exponentials, over that of the peak, are summed. `high` is one.
    """
    while low < high:
        middle = (low + high) >> 1
        above = tl.full([], 0.0, tl.float32)
        for start in range(0, vocab, PART):
            ids = start + tl.arange(0, PART)
            x = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
            is_above = (_order(x).to(tl.int64) > middle) & (ids < vocab)
            part = tl.full([PART], 1.0, tl.float32) if BY_NUMBER else tl.exp(x - peak)
            above += tl.sum(tl.where(is_above, part, 0.0), 0)
        low, high = tl.where(above < limit, low, middle + 1), tl.where(above < limit, middle, high)
    return low


@triton.jit(do_not_specialize=("row_stride", "vocab"))
def _least_kernel(
    scores_ptr, top_k_ptr, top_p_ptr, min_p_ptr, known_ptr, out_ptr, row_stride, vocab, PART: tl.constexpr
):
    """Find the least score that filters leave of a row, by bisection; grid (R,). Rare: it reads a row often.

    scores float32 [R, vocab] by their row stride; top_k int64, top_p, min_p, out float32, known int8 [R].
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(known_ptr + row) != 0:
        tl.store(out_ptr + row, float("-inf"))
    else:
        scores_ptr += row * row_stride
        peak = tl.full([], float("-inf"), tl.float32)
        for start in range(0, vocab, PART):
            ids = start + tl.arange(0, PART)
            x = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
            peak = tl.maximum(peak, tl.max(x, 0))
        high = _order(peak).to(tl.int64)
        least = tl.full([], -2147483648, tl.int64)
        top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            least = _least_place(scores_ptr, vocab, least, high, peak, top_k.to(tl.float32), True, PART)
        if top_p < 1.0:
            whole = tl.full([], 0.0, tl.float32)
            for start in range(0, vocab, PART):
                ids = start + tl.arange(0, PART)
                x = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
                is_in = (_order(x).to(tl.int64) >= least) & (ids < vocab)
                whole += tl.sum(tl.where(is_in, tl.exp(x - peak), 0.0), 0)
            least = _least_place(scores_ptr, vocab, least, high, peak, top_p * whole, False, PART)
        place = least.to(tl.int32)
        floor = (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        floor = tl.where(place == -2147483648, float("-inf"), floor)
        by_peak = tl.where(min_p > 0.0, peak + _log(tl.maximum(min_p, 1e-30)), float("-inf"))
        tl.store(out_ptr + row, tl.minimum(tl.maximum(floor, by_peak), peak))


def least_remaining(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, is_known: Tensor) -> Tensor:
    out = torch.empty(scores.shape[0], dtype=torch.float32, device=scores.device)
    if scores.shape[0]:
        _least_kernel[(scores.shape[0],)](
            *(scores, top_k, top_p, min_p, is_known.to(torch.int8), out, scores.stride(0), scores.shape[1]),
            PART=PART,
            num_warps=8,
        )
    return out


def choose(
    scores: Tensor, draws: Tensor | None = None, out: Tensor | None = None, floors: Tensor | None = None
) -> Tensor:
    rows, vocab = scores.shape
    num_parts = triton.cdiv(vocab, PART)
    if num_parts > MOST_PARTS:
        return calls.choose.reference(scores, draws, out, floors)
    out = torch.empty(rows, dtype=torch.int64, device=scores.device) if out is None else out
    if not rows:
        return out
    values = torch.empty(rows, num_parts, dtype=torch.float32, device=scores.device)
    places = torch.empty(rows, num_parts, dtype=torch.int32, device=scores.device)
    _part_kernel[(rows, num_parts)](
        *(scores, draws, floors, values, places, scores.stride(0), vocab, num_parts),
        HAS_DRAWS=draws is not None,
        HAS_FLOORS=floors is not None,
        PART=PART,
        num_warps=8,
    )
    _join_kernel[(rows,)](values, places, out, vocab, num_parts, MOST_PARTS=MOST_PARTS, num_warps=4)
    return out

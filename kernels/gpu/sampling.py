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
    values_ptr,
    places_ptr,
    row_stride,
    vocab,
    num_parts,
    HAS_DRAWS: tl.constexpr,
    PART: tl.constexpr,
):
    """Find the largest score of a part of a row, with noise where the row draws; grid (R, num_parts).

    scores float32 [R, vocab] by their row stride; draws int32 [R, 3]; values and places [R, num_parts].
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
            x = tl.div_rn(x, tl.full([PART], 1.0, tl.float32) * temperature) + _gumbel(ids, first, second)
            x = tl.where(inside, x, float("-inf"))
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


def choose(scores: Tensor, draws: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    rows, vocab = scores.shape
    num_parts = triton.cdiv(vocab, PART)
    if num_parts > MOST_PARTS:
        return calls.choose.reference(scores, draws, out)
    out = torch.empty(rows, dtype=torch.int64, device=scores.device) if out is None else out
    if not rows:
        return out
    values = torch.empty(rows, num_parts, dtype=torch.float32, device=scores.device)
    places = torch.empty(rows, num_parts, dtype=torch.int32, device=scores.device)
    _part_kernel[(rows, num_parts)](
        *(scores, draws, values, places, scores.stride(0), vocab, num_parts),
        HAS_DRAWS=draws is not None,
        PART=PART,
        num_warps=8,
    )
    _join_kernel[(rows,)](values, places, out, vocab, num_parts, MOST_PARTS=MOST_PARTS, num_warps=4)
    return out

"""Products with 2:4 sparse weights kept without their zeros, on one core of a CPU with AVX-512.

    python -m bench.kernels sparse [--seconds 0.3]

Is it worth a kernel of its own, or are such weights served with their zeros? Each row is one product:

========  ================================================================================================
dense     float32 with its zeros: `kernels.linear`, which the model runs; 4 bytes a weight
plain     the same in the loop below, but for the zeros: what the loop itself costs
sparse    the values that count and a bit for each weight, put in their places by one instruction (vexpandps)
          and then multiplied: 2.125 bytes a weight
int8      `kernels.quantized_linear` in groups of 64 of the dense weights: 1.05 bytes a weight
int4      the same in 4 bits: 0.55 bytes a weight
========  ================================================================================================

Sides take turns; the best time of each counts. Weights rotate so that none stays in a core's caches. Writes
bench/results/sparse.json and ends in the same on one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch
from llvmlite import ir
from numpy import float32

from bench.common.engines import best_of
from bench.common.results import conclude, parser, say
from bench.kernels.quantized import ROTATED_BYTES, random_weight
from kernels.cpu.compiled import compiled
from kernels.cpu.processor import has_all
from kernels.cpu.simd import (
    F32,
    I1,
    I16,
    LANES,
    Int,
    Vec,
    call,
    constant,
    hsum,
    intrinsic_of,
    load_as,
    vfma,
    vload,
    vsplat,
    wide,
    write_f32,
)

SHAPES = ((768, 2048), (2048, 768), (2048, 8192))  # inputs, outputs
TOKENS = (1, 4)
FLOAT, MASK = 4, 2  # bytes of a value, and of the bits of sixteen weights
SMALL = 1e-3  # difference of sums that were made in another order


@intrinsic_of
def expand(builder: Any, values: Int, mask: Int) -> Vec:
    """Load eight values into the lanes whose bits are set in the 16 at `mask`, and 0 into the others."""
    bits = builder.bitcast(load_as(builder, I16, mask, MASK), ir.VectorType(I1, LANES))
    pointer = builder.inttoptr(values, F32.as_pointer())
    name = "llvm.masked.expandload.v16f32"
    return call(builder, name, wide(F32), pointer, bits, constant(F32, 0.0))


@compiled
def put(out, a, b, c, d):  # type: ignore[no-untyped-def]
    """Write the sums of the lanes of four outputs."""
    write_f32(out, hsum(a))
    write_f32(out + FLOAT, hsum(b))
    write_f32(out + 2 * FLOAT, hsum(c))
    write_f32(out + 3 * FLOAT, hsum(d))


@compiled
def sparse_loop(values, masks, x, out, outputs, inputs, tokens):  # type: ignore[no-untyped-def]
    """Write out[t, n] = weight[n] . x[t], four rows at a time. Addresses: of float32, but for the masks."""
    row, mask_row = inputs // 2 * FLOAT, inputs // 8
    for n in range(0, outputs, 4):
        for t in range(tokens):
            a = b = c = d = vsplat(float32(0))
            for k in range(0, inputs, LANES):
                at = vload(float32, x + (t * inputs + k) * FLOAT)
                place, bits = values + n * row + k // 2 * FLOAT, masks + n * mask_row + k // 8
                a = vfma(expand(place, bits), at, a)
                b = vfma(expand(place + row, bits + mask_row), at, b)
                c = vfma(expand(place + 2 * row, bits + 2 * mask_row), at, c)
                d = vfma(expand(place + 3 * row, bits + 3 * mask_row), at, d)
            put(out + (t * outputs + n) * FLOAT, a, b, c, d)


@compiled
def plain_loop(weight, x, out, outputs, inputs, tokens):  # type: ignore[no-untyped-def]
    """Write the same for a weight with its zeros."""
    row = inputs * FLOAT
    for n in range(0, outputs, 4):
        for t in range(tokens):
            a = b = c = d = vsplat(float32(0))
            for k in range(0, inputs, LANES):
                at = vload(float32, x + (t * inputs + k) * FLOAT)
                place = weight + n * row + k * FLOAT
                a = vfma(vload(float32, place), at, a)
                b = vfma(vload(float32, place + row), at, b)
                c = vfma(vload(float32, place + 2 * row), at, c)
                d = vfma(vload(float32, place + 3 * row), at, d)
            put(out + (t * outputs + n) * FLOAT, a, b, c, d)


class SparseWeight:
    """A random 2:4 sparse weight [N, K] with its zeros and without: values [N, K / 2], masks [N, K / 8]."""

    def __init__(self, outputs: int, inputs: int) -> None:
        fours = torch.randn(outputs, inputs // 4, 4)
        kept = torch.zeros_like(fours, dtype=torch.bool)
        kept = kept.scatter(-1, fours.abs().topk(2, dim=-1).indices, True).flatten(1)
        self.dense = torch.where(kept, fours.flatten(1), 0.0)
        self.values = self.dense[kept].view(outputs, inputs // 2).contiguous()
        powers = 2 ** torch.arange(8, dtype=torch.uint8)
        self.masks = (kept.view(outputs, inputs // 8, 8) * powers).sum(-1, dtype=torch.uint8)

    def sparse(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [T, K] times this to out [T, N]."""
        tensors, (outputs, inputs) = (self.values, self.masks, x, out), self.dense.shape
        sparse_loop(*(one.data_ptr() for one in tensors), outputs, inputs, len(x))

    def plain(self, x: torch.Tensor, out: torch.Tensor) -> None:
        outputs, inputs = self.dense.shape
        plain_loop(*(one.data_ptr() for one in (self.dense, x, out)), outputs, inputs, len(x))


def row_of(inputs: int, outputs: int, tokens: int, seconds: float) -> dict[str, Any]:
    """Return the microseconds of each side. Raises AssertionError if the loops compute something else."""
    copies = max(2, int(ROTATED_BYTES / (inputs * outputs * FLOAT)))
    weights = [SparseWeight(outputs, inputs) for _ in range(copies)]
    x, out = torch.randn(tokens, inputs), torch.zeros(tokens, outputs)
    for call_of in (weights[0].sparse, weights[0].plain):
        call_of(x, out.zero_())
        assert (out - x @ weights[0].dense.T).abs().max() < SMALL * inputs**0.5

    # Walks through the same weights lie apart, so that no side finds them where another has left them.
    def turn(number: int) -> Callable[[], SparseWeight]:
        first = number * copies // 3
        return itertools.cycle(weights[first:] + weights[:first]).__next__

    dense, plain, sparse = turn(0), turn(1), turn(2)
    coded = {
        bits: itertools.cycle([random_weight(inputs, outputs, bits) for _ in range(copies * 32 // bits)])
        for bits in (8, 4)
    }
    sides: dict[str, Callable[[], object]] = {
        "dense": lambda: kernels.linear(x, dense().dense),
        "plain": lambda: plain().plain(x, out),
        "sparse": lambda: sparse().sparse(x, out),
        **{f"int{bits}": partial(_quantized, x, turns) for bits, turns in coded.items()},
    }
    times = best_of(seconds, *sides.values())
    us = {name: seconds * 1e6 for name, seconds in zip(sides, times, strict=True)}
    return {"name": f"{tokens} x {inputs} x {outputs}", "us": us}


def _quantized(x: torch.Tensor, weights: Any) -> object:
    return kernels.quantized_linear(x, next(weights))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=0.3, help="for each side of each row")
    args = options.parse_args()
    if not has_all("avx512f"):
        say("this processor has no AVX-512, and so no vexpandps")
        return 1
    kernels.configure(1)
    card: dict[str, Any] = {"bench": "sparse", "threads": 1, "rows": []}
    for (inputs, outputs), tokens in itertools.product(SHAPES, TOKENS):
        row = row_of(inputs, outputs, tokens, args.seconds)
        dense = row["us"]["dense"]
        say(
            f"{row['name']:<18} "
            + "   ".join(f"{name} {us:8.1f} us ({us / dense:4.2f})" for name, us in row["us"].items())
        )
        card["rows"].append(row)
    return conclude(card, is_kept=True)

"""Products with quantised weights beside their alternatives on the CPU, for `bench.kernels`.

========  ================================================================================================
full      torch's product with the float32 weight: what a swap starts from
unpack    the codes unpacked by torch each time, then torch's product
torch8    torch's own packed product of 8 bits: one scale to an output and no groups, in a layout like ours
torch4    torch's own packed product of 4 bits: in groups, but its layout would be a second copy
========  ================================================================================================

torch's own are measured in bfloat16, which they are written for (float32 takes a plain loop), and up to
MOST_PACKED tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.common.engines import best_of
from kernels import QuantizedWeight
from kernels.packing import CODE_BITS

SHAPES = ((512, 2816), (1408, 512), (4096, 1024))  # inputs, outputs
TOKENS = (1, 2, 4, 8, 16, 64, 256)
GROUP = 64
ROTATED_BYTES = 64e6
MOST_PACKED = 16

Run = Callable[[], object]


def quantized_products(seconds: float, bandwidth: float) -> Iterator[dict[str, Any]]:
    for (inputs, outputs), tokens in itertools.product(SHAPES, TOKENS):
        runs = _runs(inputs, outputs, torch.randn(tokens, inputs))
        times = dict(zip(runs, best_of(seconds, *runs.values()), strict=True))
        for bits in CODE_BITS:
            size = inputs * outputs * (bits / 8 + 3 / GROUP)
            yield {
                "name": f"product {tokens} x {inputs} x {outputs} of {bits} bits",
                "us": times[f"int{bits}"] * 1e6,
                "torch_us": times["full"] * 1e6,
                "unpack_us": times[f"unpack{bits}"] * 1e6,
                "torch_packed_us": times.get(f"torch{bits}", float("nan")) * 1e6,
                "share_of_bandwidth": size / times[f"int{bits}"] / bandwidth,
            }


def _runs(inputs: int, outputs: int, x: torch.Tensor) -> dict[str, Run]:
    """Return the calls by name; weights rotate, so that none stays in a core's caches."""
    full = itertools.cycle([torch.randn(outputs, inputs) for _ in range(_copies(4.0 * inputs * outputs))])
    runs: dict[str, Run] = {"full": lambda: kernels.linear(x, next(full))}
    for bits in CODE_BITS:
        copies = _copies(inputs * outputs * bits / 8)
        weights = [random_weight(inputs, outputs, bits) for _ in range(copies)]
        runs[f"int{bits}"] = partial(_next, kernels.quantized_linear, x, itertools.cycle(weights))
        # Slow enough that no cache matters.
        runs[f"unpack{bits}"] = partial(kernels.quantized_linear.reference, x, weights[0])
    return runs | _torch_packed(inputs, outputs, x.bfloat16()) if x.shape[0] <= MOST_PACKED else runs


def _copies(size: float) -> int:
    return max(2, int(ROTATED_BYTES / size))


def _next(product: Callable[..., object], x: torch.Tensor, weights: Iterator[Any]) -> object:
    return product(x, next(weights))


def random_weight(inputs: int, outputs: int, bits: int) -> QuantizedWeight:
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scales = torch.rand(1, outputs, inputs // GROUP).half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8)
    return QuantizedWeight(kernels.pack(codes, bits)[None], scales, zeros, bits, GROUP)


def _torch_packed(inputs: int, outputs: int, x: torch.Tensor) -> dict[str, Run]:
    ops = torch.ops.aten
    wide = itertools.cycle(
        [
            (torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8), torch.rand(outputs).bfloat16())
            for _ in range(_copies(inputs * outputs))
        ]
    )
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    narrow = itertools.cycle(
        [ops._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(_copies(inputs * outputs / 2))]
    )
    levels = torch.rand(inputs // GROUP, outputs, 2).bfloat16()
    return {
        "torch8": lambda: ops._weight_int8pack_mm(x, *next(wide)),
        "torch4": lambda: ops._weight_int4pack_mm_for_cpu(x, next(narrow), GROUP, levels),
    }

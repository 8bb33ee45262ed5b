"""Products with quantised weights beside cuBLAS's bfloat16 ones on a GPU, for `bench.gpu`."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.gpu.common import event_seconds
from kernels import QuantizedWeight
from kernels.packing import CODE_BITS, packed_size

SHAPES = ((4096, 28672), (14336, 4096), (4096, 6144), (4096, 4096))  # inputs, outputs of an 8B model
TOKENS = (1, 16, 64, 256, 2048)
GROUP = 64
CALLS = 20


def quantized_rows(bandwidth: float) -> list[dict[str, float]]:
    """Return the microseconds of each product.

    `ratio` is how many times the bfloat16 product's time it takes, `floor_us` the time to read the codes at
    `bandwidth` bytes per second. Only the second-level cache keeps weights from call to call.
    """
    rows = []
    for inputs, outputs in SHAPES:
        full = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        weights = {bits: _weight(inputs, outputs, bits) for bits in CODE_BITS}
        for tokens, bits in itertools.product(TOKENS, CODE_BITS):
            x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
            dense = 1e6 * event_seconds(partial(kernels.linear, x, full), CALLS)
            ours = 1e6 * event_seconds(partial(kernels.quantized_linear, x, weights[bits]), CALLS)
            size = outputs * (packed_size(inputs, bits) + 3 * inputs / GROUP)
            row = {"inputs": inputs, "outputs": outputs, "tokens": tokens, "bits": bits, "us": ours}
            row |= {"dense_us": dense, "ratio": ours / dense, "floor_us": size / bandwidth * 1e6}
            rows.append(row)
    return rows


def line(row: dict[str, Any]) -> str:
    return (
        f"product {row['tokens']:5d} x {row['inputs']:5d} x {row['outputs']:5d} of {row['bits']} bits: "
        f"{row['us']:8.1f} us, bfloat16 {row['dense_us']:8.1f} us, ratio {row['ratio']:.2f}, "
        f"reading alone {row['floor_us']:6.1f} us"
    )


def _weight(inputs: int, outputs: int, bits: int) -> QuantizedWeight:
    shape = (1, outputs, packed_size(inputs, bits))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    scales = torch.rand(1, outputs, inputs // GROUP, device="cuda").half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device="cuda")
    return QuantizedWeight(codes, scales, zeros, bits, GROUP)

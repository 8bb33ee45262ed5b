"""Products with quantised weights beside cuBLAS's bfloat16 ones on a GPU.

    python -m bench.gpu products [--device cpu]

Every call takes the next of several copies of a weight, so that none is in the second-level cache, as in
serving. `--device cpu` takes small weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import kernels  # before torch: it settles how torch's threads wait

# isort: split
import torch

from bench.gpu.card import bandwidth
from bench.gpu.common import Found, device_clock, event_seconds, run_alone
from kernels import QuantizedWeight
from kernels.packing import CODE_BITS, packed_size

GROUP = 64
CALLS = 20
COLD_BYTES = 128 << 20  # more than second-level caches hold


@dataclass(frozen=True, slots=True)
class Sizes:
    """Inputs and outputs of the weights, and tokens that are multiplied by them."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    dtype: torch.dtype


# Of an 8B model: qkv, o, gate_up, down.
GPU = Sizes(
    ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)), (1, 16, 64, 128, 256, 2048), torch.bfloat16
)
CPU = Sizes(((128, 192),), (1, 3), torch.float32)


def measure(device: torch.device, found: Found) -> None:
    sizes = GPU if device.type == "cuda" else CPU
    reads = bandwidth(device)
    for inputs, outputs in sizes.shapes:
        copies = max(2, -(-COLD_BYTES // (inputs * outputs // 2))) if device.type == "cuda" else 2
        full = [torch.randn(outputs, inputs, dtype=sizes.dtype, device=device) for _ in range(copies)]
        weights = {
            bits: [_weight(inputs, outputs, bits, device) for _ in range(copies)] for bits in CODE_BITS
        }
        for tokens in sizes.tokens:
            x = torch.randn(tokens, inputs, dtype=sizes.dtype, device=device)
            dense = _seconds(device, kernels.linear, x, full)
            for bits in CODE_BITS:
                ours = _seconds(device, kernels.quantized_linear, x, weights[bits])
                size = outputs * (packed_size(inputs, bits) + 3 * inputs / GROUP)
                row = {"inputs": inputs, "outputs": outputs, "tokens": tokens, "bits": bits, "us": 1e6 * ours}
                row |= {"dense_us": 1e6 * dense, "ratio": ours / dense, "floor_us": size / reads * 1e6}
                found.add("rows", row)


def _seconds(device: torch.device, product: Any, x: torch.Tensor, weights: Sequence[Any]) -> float:
    """Return the seconds of a product; each call takes the next weight."""
    turns = itertools.cycle(weights)

    def call() -> None:
        product(x, next(turns))

    if device.type == "cuda":
        return event_seconds(call, CALLS)
    clock = device_clock(device)
    call()
    began = clock()
    for _ in range(CALLS):
        call()
    return (clock() - began) / CALLS


def lines(found: dict[str, Any]) -> Iterator[str]:
    for row in found.get("rows", []):
        yield line(row)


def line(row: dict[str, Any]) -> str:
    return (
        f"product {row['tokens']:5d} x {row['inputs']:5d} x {row['outputs']:5d} of {row['bits']} bits: "
        f"{row['us']:8.1f} us, bfloat16 {row['dense_us']:8.1f} us, ratio {row['ratio']:.2f}, "
        f"reading alone {row['floor_us']:6.1f} us"
    )


def _weight(inputs: int, outputs: int, bits: int, device: torch.device) -> QuantizedWeight:
    shape = (1, outputs, packed_size(inputs, bits))
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
    scales = torch.rand(1, outputs, inputs // GROUP, device=device).half()
    zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device=device)
    return QuantizedWeight(codes, scales, zeros, bits, GROUP)


def main() -> int:
    return run_alone(__doc__, "products", measure, lines)

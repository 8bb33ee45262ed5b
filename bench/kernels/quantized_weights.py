"""Quantised weights for tests and benchmarks, in units that lie apart from each other."""

from __future__ import annotations

import torch

import kernels
from kernels.quantized import QuantizedWeight, Split


def quantized(
    *,
    units: int,
    unit_outputs: int,
    unit_inputs: int,
    bits: int,
    group: int,
    split: Split = "outputs",
    is_scaled: bool = False,
    seed: int = 0,
    gap: int = 8,
    level_gap: int = 8,
) -> tuple[QuantizedWeight, torch.Tensor]:
    """Return a random weight with gaps of 0xFF between units and rows, and its matrix [N, K].

    gap, level_gap: elements between rows of codes, and of scales and zeros.
    """
    random = torch.Generator().manual_seed(seed)
    shape = (units * unit_outputs, unit_inputs) if split == "outputs" else (unit_outputs, units * unit_inputs)
    w = torch.randn(shape, generator=random)
    codes, scales, zeros = kernels.quantize_rtn(w, bits, group)
    parts = (_in_units(part, units, split) for part in (kernels.pack(codes, bits), scales, zeros))
    packed, scales, zeros = (
        _apart(part, between) for part, between in zip(parts, (gap, level_gap, level_gap), strict=True)
    )
    input_scale = torch.rand(shape[1], generator=random) + 0.5 if is_scaled else None
    return QuantizedWeight(packed, scales, zeros, bits, group, split, input_scale), w


def _in_units(matrix: torch.Tensor, units: int, split: Split) -> torch.Tensor:
    if split == "outputs":
        return matrix.unflatten(0, (units, -1))
    return matrix.unflatten(1, (units, -1)).transpose(0, 1)


def _apart(part: torch.Tensor, gap: int) -> torch.Tensor:
    """Return [U, Nu, n] as a view into a larger buffer, so that reading past it shows."""
    units, outputs, width = part.shape
    buffer = torch.full((units, outputs + 1, width + gap), 255, dtype=torch.uint8).to(part.dtype)
    if part.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    view = buffer[:, :outputs, :width]
    view.copy_(part)
    return view

"""What a layer multiplies by: a dense matrix or a quantised one, behind one call.

A product takes x [T, K] to [T, N]. Which kind it is, only who made it knows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from kernels import QuantizedWeight, linear, linear_t, quantized_linear, stacked_linear


class Product(Protocol):
    """x [T, num_inputs] times a matrix, plus a bias if it has one: [T, num_outputs], which may be dimensions
    of their own."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class DenseProduct:
    """Times weight [N, K] transposed, plus bias [N]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def num_outputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class StackedProduct:
    """Times each of weights [M, N, K] transposed, whatever lies between them: [T, M, N]."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights = weights

    @property
    def num_inputs(self) -> int:
        return int(self.weights.shape[2])

    @property
    def num_outputs(self) -> int:
        return int(self.weights.shape[0] * self.weights.shape[1])

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return stacked_linear(x, self.weights)


class TransposedProduct:
    """Times weight [K, N]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def num_inputs(self) -> int:
        return int(self.weight.shape[0])

    @property
    def num_outputs(self) -> int:
        return int(self.weight.shape[1])

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear_t(x, self.weight)


class QuantizedProduct:
    """Times a quantised weight, plus bias [N]. Where the weight's inputs were padded to whole tiles, x is."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def num_inputs(self) -> int:
        return self.weight.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.weight.num_outputs

    @property
    def device(self) -> torch.device:
        return self.weight.codes.device

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.weight.num_inputs - x.shape[1]
        return quantized_linear(F.pad(x, (0, missing)) if missing else x, self.weight, self.bias)


def outputs_of(weight: QuantizedWeight, rows: slice) -> QuantizedWeight:
    """These outputs of every unit."""
    codes, scales, zeros = weight.codes[:, rows], weight.scales[:, rows], weight.zeros[:, rows]
    return replace(weight, codes=codes, scales=scales, zeros=zeros)


def inputs_of(weight: QuantizedWeight, columns: slice) -> QuantizedWeight:
    """These inputs of every unit; they must be whole tiles and groups."""
    of_codes = slice(columns.start * weight.bits // 8, columns.stop * weight.bits // 8)
    of_groups = slice(columns.start // weight.group, columns.stop // weight.group)
    return replace(
        weight,
        codes=weight.codes[..., of_codes],
        scales=weight.scales[..., of_groups],
        zeros=weight.zeros[..., of_groups],
        input_scale=None if weight.input_scale is None else weight.input_scale[columns],
    )

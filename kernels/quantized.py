"""Quantised matrices: their layout, rounding to nearest, and reading one in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from kernels.packing import TILE, check_bits, packed_size, unpack

Split = Literal["outputs", "inputs"]
GROUP_STEP = 32  # a group is a whole number of half tiles
SPLITS = get_args(Split)
_FLOAT16_STEP, _FLOAT16_NORMAL = 2.0**-24, 2.0**-14  # below the second, float16 counts in the first


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Packed codes of a matrix with N outputs and K inputs, in U equal units.

    w[n, k] = scale * (code - zero), with one scale and one zero for each `group` inputs of one output.

    ===========  ===============================  =========================================================
    field        shape and dtype                  meaning
    ===========  ===============================  =========================================================
    codes        uint8 [U, Nu, Ku * bits / 8]     packed (`kernels.packing`); last dimension contiguous
    scales       float16 [U, Nu, Ku / group]      last dimension contiguous
    zeros        uint8 [U, Nu, Ku / group]        last dimension contiguous
    bits         one of packing.CODE_BITS
    group        a multiple of 32 that divides Ku
    split        "outputs" or "inputs"            the dimension that units divide
    input_scale  float [K] or None                factors of the inputs (AWQ, Lin et al. 2024)
    ===========  ===============================  =========================================================

    A unit is the finest tensor-parallel shard. Split by outputs, unit u has outputs [u * Nu, (u + 1) * Nu)
    and all inputs: N = U * Nu, K = Ku. Split by inputs, it has inputs [u * Ku, (u + 1) * Ku) and all outputs:
    N = Nu, K = U * Ku. The outer strides are free, so units may lie anywhere in a larger buffer, and any run
    of units is itself a QuantizedWeight. Zeroed memory is a matrix of zeros.

    Raises ValueError for shapes, dtypes or strides that do not fit.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group: int
    split: Split = "outputs"
    input_scale: torch.Tensor | None = None
    # Values that a backend derives from the weight once, by its own key; addresses do not change.
    derived: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bits(self.bits)
        if self.split not in SPLITS:
            raise ValueError(f"split is {self.split!r}; it must be {' or '.join(map(repr, SPLITS))}")
        for name, dtype in (("codes", torch.uint8), ("scales", torch.float16), ("zeros", torch.uint8)):
            part: torch.Tensor = getattr(self, name)
            if part.dtype != dtype or part.dim() != 3 or (part.shape[2] > 1 and part.stride(2) != 1):
                raise ValueError(
                    f"{name} are {part.dtype} {list(part.shape)} with strides {part.stride()}; they must be "
                    f"{dtype} [units, outputs, ...] with a contiguous last dimension"
                )
        tile_bytes = packed_size(TILE, self.bits)
        if self.codes.shape[2] % tile_bytes:
            raise ValueError(
                f"{self.codes.shape[2]} bytes of codes to an output are no whole tiles: {self.bits}-bit "
                f"codes of {TILE} inputs have {tile_bytes} bytes"
            )
        check_group(self.group, self.unit_inputs)
        expected = (self.num_units, self.unit_outputs, self.unit_inputs // self.group)
        for name, part in (("scales", self.scales), ("zeros", self.zeros)):
            if part.shape != expected:
                raise ValueError(
                    f"{name} are {list(part.shape)}; codes in groups of {self.group} need {list(expected)}"
                )
        scale = self.input_scale
        if scale is not None and scale.shape != (self.num_inputs,):
            raise ValueError(f"input_scale is {list(scale.shape)}; the weight has {self.num_inputs} inputs")

    @property
    def num_units(self) -> int:
        return int(self.codes.shape[0])

    @property
    def unit_outputs(self) -> int:
        """Nu, the outputs of a unit."""
        return int(self.codes.shape[1])

    @property
    def unit_inputs(self) -> int:
        """Ku, the inputs of a unit."""
        return int(self.codes.shape[2] * 8 // self.bits)

    @property
    def num_outputs(self) -> int:
        """N, the outputs of the matrix."""
        return self.unit_outputs * (self.num_units if self.split == "outputs" else 1)

    @property
    def num_inputs(self) -> int:
        """K, the inputs of the matrix."""
        return self.unit_inputs * (self.num_units if self.split == "inputs" else 1)

    def matrices(self) -> list[QuantizedWeight]:
        """Return each unit as a weight of its own. Raises ValueError if it is only a part of a matrix."""
        if self.split != "outputs" or self.input_scale is not None:
            raise ValueError(
                f"units split by {self.split}{' with an input_scale' if self.input_scale is not None else ''}"
                " are no matrices of their own"
            )
        if "matrices" not in self.derived:
            self.derived["matrices"] = [
                replace(self, codes=codes, scales=scales, zeros=zeros, derived={})
                for codes, scales, zeros in zip(
                    self.codes.split(1), self.scales.split(1), self.zeros.split(1), strict=True
                )
            ]
        found: list[QuantizedWeight] = self.derived["matrices"]
        return found

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [T, K] with zeros for the inputs that it has not."""
        missing = self.num_inputs - x.shape[1]
        return torch.nn.functional.pad(x, (0, missing)) if missing else x

    def check_operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raise ValueError unless x [T, K] can be multiplied by the matrix, and bias [N] added."""
        if x.dim() != 2 or x.shape[1] != self.num_inputs:
            raise ValueError(f"x is {list(x.shape)}; the weight takes [tokens, {self.num_inputs}]")
        if bias is not None and bias.shape != (self.num_outputs,):
            raise ValueError(f"bias is {list(bias.shape)}; the weight has {self.num_outputs} outputs")


def check_group(group: int, inputs: int) -> None:
    """Raise ValueError unless groups of this size are whole half tiles and fill a unit's inputs."""
    if group <= 0 or group % GROUP_STEP or inputs % group:
        raise ValueError(
            f"groups of {group} do not fit {inputs} inputs of a unit; a group is a multiple of {GROUP_STEP} "
            f"that divides them"
        )


def quantize_rtn(w: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round w float [N, K] to the nearest code between the least and the largest of each group.

    Returns codes uint8 [N, K], scales float16 [N, ceil(K / group)], zeros uint8 [N, ceil(K / group)]; the
    last group may be short. A group's range always includes 0, so zeros stay zero, and a group of zeros has
    codes, scale and zero 0. Raises ValueError for invalid bits or groups, and for weights that are not finite
    or whose scale exceeds float16.
    """
    check_bits(bits)
    inputs = w.shape[1]
    padding = -inputs % group if group > 0 else 0
    check_group(group, inputs + padding)
    values = torch.nn.functional.pad(w.float(), (0, padding)).unflatten(1, (-1, group))
    top = 2**bits - 1
    least, largest = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
    # Codes are chosen for the scale as float16 stores it. For the exact scale, the largest codes would be off
    # by half a unit in float16's last place, which is 0.12 codes of 255. Small scales are rounded up: float16
    # stores them in steps of 6e-8, and one that is too small would cut off the largest weights.
    exact = (largest - least) / top
    in_steps = (exact / _FLOAT16_STEP).ceil() * _FLOAT16_STEP
    scales = torch.where(exact < _FLOAT16_NORMAL, in_steps, exact).half()
    if not bool(scales.isfinite().all()):
        worst = float((largest - least).max())
        raise ValueError(
            f"weights spread over {worst:g} in a group cannot be quantised to {bits} bits: a float16 "
            f"scale holds {65504 * top} at most; they must be finite"
        )
    steps = scales.float()[..., None]
    inverse = torch.where(steps > 0, 1 / steps, 0)
    zeros = (-least[..., None] * inverse).round().clamp(0, top)
    codes = ((values * inverse).round() + zeros).clamp(0, top)
    codes = codes.flatten(1)[:, :inputs].to(torch.uint8).contiguous()
    return codes, scales, zeros[..., 0].to(torch.uint8)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """Return w float32 [N, K] of the codes, without input_scale."""
    codes = unpack(weight.codes, weight.bits).unflatten(-1, (-1, weight.group)).float()
    values = (codes - weight.zeros[..., None].float()) * weight.scales[..., None].float()
    values = values.flatten(-2)  # [U, Nu, Ku]
    if weight.split == "outputs":
        return values.flatten(0, 1)
    return values.transpose(0, 1).flatten(1)

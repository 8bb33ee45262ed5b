"""Products with quantised experts as one product for each expert, on any device."""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels import calls
from kernels.quantized import QuantizedWeight
from kernels.routing import Routing


def grouped_quantized_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    routing: Routing,
    is_by_place: bool = False,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply expert by expert; which ones are in use is read from the device."""
    out = x.new_zeros(routing.rows.shape[0], weight.unit_outputs)
    fill_groups(out, x, weight, routing, is_by_place, bias, least=1)
    return out


def fill_groups(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: QuantizedWeight,
    routing: Routing,
    is_by_place: bool,
    bias: torch.Tensor | None,
    *,
    least: int,
) -> None:
    """Multiply the pairs of each expert that has `least` or more."""
    units = zip(weight.matrices(), pairwise(_bounds(routing)), strict=True)
    for e, (unit, (begin, end)) in enumerate(units):
        if end - begin >= least:
            part = x[begin:end] if is_by_place else x[routing.rows[begin:end]]
            added = None if bias is None else bias[e]
            out[begin:end] = calls.quantized_linear(unit.padded(part), unit, added)


def _bounds(routing: Routing) -> list[int]:
    """Return the bounds; on device "meta", where there are none, the first expert has all pairs."""
    if routing.bounds.is_meta:
        return [0] + [routing.rows.shape[0]] * (routing.bounds.shape[0] - 1)
    bounds: list[int] = routing.bounds.tolist()
    return bounds

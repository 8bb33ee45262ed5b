"""Whether a variant in its pages computes what its host image does: products of a fixed small input.

The expected outputs come from the plain reference; the check runs what will serve. So it finds kernels that
are wrong, and pages that hold something else; single bits of a weight it cannot see (`worker.morph.sums` do).
"""

from __future__ import annotations

from functools import lru_cache

import torch

import kernels
from worker.model.halves import Half
from worker.model.products import Product, QuantizedProduct, outputs_of

_TOKENS = 4
_REFERENCE_ELEMENTS = 1 << 18

# Largest error of one output, and of all together, in units of the outputs' root mean square. Sums differ in
# their order, and outputs are rounded to the dtype: a bfloat16 of 4 deviations is off by up to 0.008 of one.
# A page of 64 KiB that was not copied is 0.05 of a 7B model's FFN in one product.
_LIMITS = {
    torch.float32: (1e-3, 1e-4),
    torch.float16: (2e-2, 2e-3),
    torch.bfloat16: (8e-2, 8e-3),
}


class WrongVariant(RuntimeError):
    """A variant does not compute what its original does: its pages hold something else."""


def probe(half: Half, dtype: torch.dtype) -> list[torch.Tensor]:
    """What each of its products makes of the fixed input: float32 [4, N] each."""
    return [product(_input(product.num_inputs, dtype, product.device)).float() for product in half.products]


def expected_outputs(half: Half, dtype: torch.dtype) -> torch.Tensor:
    """The same by the plain reference: float32 [num_outputs], flat."""
    inputs = (_input(product.num_inputs, dtype, product.device) for product in half.products)
    made = [_reference(product, x) for product, x in zip(half.products, inputs, strict=True)]
    return torch.cat([each.float().flatten() for each in made])


def _reference(product: Product, x: torch.Tensor) -> torch.Tensor:
    """Some outputs of every unit at a time: the whole matrix in float32 would leave the caches."""
    with kernels.use_face("reference"):
        if not isinstance(product, QuantizedProduct):
            return product(x)
        weight, made = product.weight, []
        rows = max(1, _REFERENCE_ELEMENTS // (weight.num_units * weight.unit_inputs))
        for first in range(0, weight.unit_outputs, rows):
            part = outputs_of(weight, slice(first, first + rows))
            made.append(kernels.quantized_linear(x, part).unflatten(1, (-1, part.unit_outputs)))
        out = torch.cat(made, 2).flatten(1)
        return out if product.bias is None else out + product.bias


def num_outputs(half: Half) -> int:
    """Floats in all of `probe`."""
    return sum(_TOKENS * product.num_outputs for product in half.products)


def check_outputs(what: str, half: Half, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """expected: float32 [num_outputs], flat. Raises WrongVariant, naming `what` and the error."""
    first = 0
    for i, got in enumerate(probe(half, dtype)):
        # Squares of a damaged float32 would overflow it, and against an infinite unit nothing is wrong.
        wanted = expected[first : first + got.numel()].view(got.shape).to(got.device, torch.float64)
        first += got.numel()
        unit = wanted.square().mean().sqrt().clamp(min=1e-30)
        wrong = (got - wanted) / unit
        worst, overall = float(wrong.abs().max()), float(wrong.square().mean().sqrt())
        most, most_overall = _LIMITS[dtype]
        if not (worst <= most and overall <= most_overall):  # NaN is wrong, too
            raise WrongVariant(
                f"{what}: product {i + 1} of {len(half.products)} is off by {worst:.2g} at worst and"
                f" {overall:.2g} overall (of {most:g} and {most_overall:g} that rounding may be)"
            )


@lru_cache(maxsize=16)
def _input(num_inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    random = torch.Generator().manual_seed(num_inputs)
    return torch.randn(_TOKENS, num_inputs, generator=random).to(device, dtype)

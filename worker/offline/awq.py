"""Activation-aware scales for round-to-nearest (AWQ, Lin et al. 2024, MLSys).

K inputs, N outputs of a matrix, g inputs of a group. With the second moments C [K, K], the sum of x x^T over
the calibration tokens, the squared error of a product with W + E is tr(E C E^T), exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from worker.model.quantized_sets import QuantizedMatrix, round_to_nearest

_SCALE_STEPS = 20  # exponents 0, 1/20, ... 19/20 (the paper's grid)
_CLIP_STEPS = 10  # ranges of 100 %, 95 %, ... 55 % of a group's
_LEAST_MAGNITUDE = 1e-4  # least value, for unused inputs; the mean is about 1


class Moments:
    """The first and second moments of a product's inputs, as sums over all tokens seen."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._second = self._magnitude = torch.zeros(())

    def add(self, x: torch.Tensor) -> None:
        """Add the tokens of x [..., K]."""
        rows = x.flatten(0, -2).float()
        self.num_tokens += rows.shape[0]
        self._second = (rows.T @ rows).add_(self._second)
        self._magnitude = rows.abs().sum(0).add_(self._magnitude)

    @property
    def second(self) -> torch.Tensor:
        """The mean of x x^T, float32 [K, K]."""
        return self._second / self.num_tokens

    @property
    def magnitude(self) -> torch.Tensor:
        """The mean of |x|, float32 [K]."""
        return self._magnitude / self.num_tokens


def activation_aware(
    weights: Mapping[str, torch.Tensor], moments: Moments, bits: int, group: int
) -> dict[str, QuantizedMatrix]:
    """Quantise the matrices [N, K] that read one input, with one scale per input for all of them.

    Inputs of large magnitude get finer steps: column k is multiplied by s[k] = magnitude[k] ^ alpha before
    rounding and its input divided by it. alpha is the one of least error over the calibration tokens; 0 is
    among them, so the error is never above round-to-nearest's. Then each group's range is cut where that
    lowers the error.
    """
    second = moments.second

    def error(scale: torch.Tensor) -> float:
        made = ((weight, round_to_nearest(weight, bits, group, 1 / scale)) for weight in weights.values())
        return sum(float(_error(weight, matrix.dense(), second)) for weight, matrix in made)

    input_scale = 1 / min(_scales(moments.magnitude), key=error)
    return {name: _clipped(weight, second, bits, group, input_scale) for name, weight in weights.items()}


def _scales(magnitude: torch.Tensor) -> list[torch.Tensor]:
    made = (magnitude.clamp(min=_LEAST_MAGNITUDE) ** (step / _SCALE_STEPS) for step in range(_SCALE_STEPS))
    return [scale / (scale.max() * scale.min()).sqrt() for scale in made]


def _clipped(
    weight: torch.Tensor, second: torch.Tensor, bits: int, group: int, input_scale: torch.Tensor
) -> QuantizedMatrix:
    """Try smaller ranges for each group of each output by itself, as if the other groups were exact.

    Keep the result if it lowers the error of the whole product.
    """
    plain = round_to_nearest(weight, bits, group, input_scale)
    scaled = weight.float() / input_scale
    groups = F.pad(scaled, (0, -scaled.shape[1] % group)).unflatten(1, (-1, group))  # [N, K / g, g]
    blocks = _diagonal_blocks(second, group)
    best, chosen = None, scaled
    for step in range(_CLIP_STEPS):
        share = 1 - 0.05 * step
        limits = groups.aminmax(dim=-1, keepdim=True)
        candidate = groups.clamp(limits.min * share, limits.max * share).flatten(1)[:, : scaled.shape[1]]
        matrix = round_to_nearest(candidate * input_scale, bits, group, input_scale)
        wrong = F.pad(matrix.dense() - weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
        errors = torch.einsum("ngi,gij,ngj->ng", wrong, blocks, wrong)
        better = torch.ones_like(errors, dtype=torch.bool) if best is None else errors < best
        best = errors if best is None else torch.where(better, errors, best)
        columns = better.repeat_interleave(group, 1)[:, : scaled.shape[1]]
        chosen = torch.where(columns, candidate, chosen)
    cut = round_to_nearest(chosen * input_scale, bits, group, input_scale)
    is_better = _error(weight, cut.dense(), second) < _error(weight, plain.dense(), second)
    return cut if is_better else plain


def _diagonal_blocks(second: torch.Tensor, group: int) -> torch.Tensor:
    """Return the diagonal blocks [K / g, g, g] of [K, K]."""
    padding = -second.shape[0] % group
    whole = F.pad(second, (0, padding, 0, padding))
    return torch.stack([whole[i : i + group, i : i + group] for i in range(0, whole.shape[0], group)])


def _error(weight: torch.Tensor, approximated: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of the product over the calibration tokens, summed over outputs."""
    wrong = approximated - weight
    return ((wrong @ second) * wrong).sum()

"""Products with several matrices of one shape in one call of the vendor's library."""

from __future__ import annotations

import torch


def stacked_linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply by strides alone: x is not repeated, and gaps between the matrices are not read."""
    return torch.bmm(x.expand(len(weights), -1, -1), weights.transpose(1, 2)).transpose(0, 1)

"""Rotary position embeddings: from a config's parameters to a table of cosines and sines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# How frequencies are stretched past the context of pre-training. `dynamic` (NTK) changes them only for
# contexts longer than max_position_embeddings, which are not served: a rotated key stays in the cache.
SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Angle of dimension i at position p: p * inv_freq[i]; both waves are multiplied by `factor`."""

    scaling: str
    inv_freq: tuple[float, ...]  # D / 2 float32 values
    factor: float  # YaRN's attention factor, else 1

    def table(self, max_positions: int, device: torch.device) -> torch.Tensor:
        """float32 [max_positions, D]: cosines in the first half, sines in the second."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=device)
        positions = torch.arange(max_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inv_freq)
        return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(self.factor)


def read_rope(hf: Any, head_dim: int) -> Rope:
    """From transformers' config, whose own functions compute the frequencies of every scaling.

    Raises ValueError for a scaling that is not supported.
    """
    parameters = _parameters(hf)
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in SCALINGS:
        raise ValueError(f"rope scaling {scaling!r} is not supported; these are: {', '.join(SCALINGS)}")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not supported")
    if scaling == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[scaling](hf, torch.device("cpu"))
    return Rope(scaling, tuple(inv_freq.tolist()), float(factor))


def _parameters(hf: Any) -> dict[str, Any]:
    """One dict in transformers 5, two attributes before."""
    found: dict[str, Any] | None = getattr(hf, "rope_parameters", None)
    return found or {
        "rope_theta": getattr(hf, "rope_theta", 10000.0),
        **(getattr(hf, "rope_scaling", None) or {}),
    }

"""The experts that each token of a step uses. Built once per layer and step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


def shared_units(num_experts: int, num_shared: int) -> list[int]:
    """Return the places of the slices of a shared expert among all units, spread over them evenly.

    The experts have the other places, in their order.
    """
    units = num_experts + num_shared
    return [(i + 1) * units // num_shared - 1 for i in range(num_shared)]


@dataclass(frozen=True, slots=True)
class Routing:
    """The pairs of a token and one of its k experts, sorted by expert; tensors are on the model's device.

    =========  ================  ====================================================================
    field      shape             meaning
    =========  ================  ====================================================================
    weights    float32 [T, k]    weight of each of a token's experts, the largest first; behind them the
                                 slices of a shared expert
    places     int32 [T, k]      place of each of these pairs in the sorted order
    rows       int32 [T * k]     token of the pair at each place
    bounds     int32 [E + 1]     the pairs of expert e are at places [bounds[e], bounds[e + 1])
    =========  ================  ====================================================================
    """

    weights: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Routing:
        """Sort the experts int64 [T, k] of all tokens. On a GPU nothing waits for the device."""
        ordered, pairs = experts.flatten().sort(stable=True)
        counts = torch.arange(num_experts + 1, device=experts.device)
        bounds = torch.searchsorted(ordered, counts, out_int32=True)
        places = torch.empty_like(pairs)
        places[pairs] = torch.arange(len(pairs), device=pairs.device)
        rows = (pairs // experts.shape[1]).int()
        return cls(weights, places.int().view_as(experts), rows, bounds)

    @property
    def num_tokens(self) -> int:
        """T, also the most pairs of one expert."""
        return int(self.places.shape[0])

    def part(self, experts: slice) -> Routing:
        """Return the routing for some of the experts; the places stay."""
        return replace(self, bounds=self.bounds[experts.start : experts.stop + 1])

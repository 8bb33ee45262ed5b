"""The mixture of experts of a layer, for one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bus.precisions import Precision
from kernels import combine, route
from worker.model.config import Mixture
from worker.model.linear import GroupedDense, GroupedLinear, Linear, SteadyLinear

Mix = Callable[..., torch.Tensor]  # what the matrices of the input made, each [T, size] -> [T, size]


class Experts:
    """A router and a run of the experts. At size > 1 the group sums the ranks' outputs.

    Every rank routes all tokens, and gets the same result: the ranks have the same bits of x, and one kernel
    computes the router everywhere. Another could choose other experts at a near tie.
    """

    def __init__(
        self,
        mixture: Mixture,
        router: SteadyLinear,
        own: slice,
        gate_up: GroupedLinear,
        down: GroupedLinear,
        mix: Mix,
        *,
        matrices: int,
        precision: Precision = "full",
    ) -> None:
        """Build from the router and the maps of the experts `own`, which read the input and what `mix` makes.

        The outputs of gate_up are those of as many matrices.
        """
        self.precision: Precision = precision
        self.router, self.gate_up, self.down = router, gate_up, down
        self.use: torch.Tensor | None = None  # int64 [all experts], where the pairs of each are counted
        self._mixture, self._own, self._mix, self._matrices = mixture, own, mix, matrices

    @property
    def linears(self) -> list[Linear]:
        return [self.router, *self.gate_up.linears, *self.down.linears]

    @property
    def asks_host(self) -> bool:
        """True if the host must see which experts a step uses: products with quantised ones go one by one."""
        return not (isinstance(self.gate_up, GroupedDense) and isinstance(self.down, GroupedDense))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Run [T, H] to [T, H]."""
        mixture = self._mixture
        logits = self.router(x)
        routing = route(logits, mixture.top_k, mixture.is_normalised, mixture.num_shared, self.use)
        routing = routing.part(self._own)
        made = self.gate_up(x, routing)
        made = made.unflatten(1, (self._matrices, made.shape[1] // self._matrices))
        return combine(self.down(self._mix(*made.unbind(1)), routing, True), routing)

"""A group of which one rank is here and nobody else: what it says goes nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Silent:
    """A `Communicator` whose calls do nothing, so that steps take what rank 0's own work takes."""

    size: int
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        """x stays what this rank has made."""

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
    ) -> None:
        """`received` stays as it is."""

    def close(self) -> None:
        """Nobody is left alone."""

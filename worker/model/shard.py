"""The part of a layer that one rank of a tensor-parallel group computes, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`.

    Shapes derive from it wherever they are needed. Nothing remembers it globally, since the degree changes
    while the model serves.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of a group of {self.size}")

    def part(self, n: int, what: str) -> slice:
        """Return this rank's range of n things. Raises ValueError if they do not divide evenly."""
        if n % self.size:
            raise ValueError(f"{n} {what} cannot be split over {self.size} ranks")
        each = n // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def has(self, other: Shard) -> bool:
        """Return True if `other` is a part of this shard, or this shard itself.

        Low shard s becomes high shards s * n to s * n + n - 1.
        """
        times, rest = divmod(other.size, self.size)
        return rest == 0 and other.rank // times == self.rank


ALONE = Shard()  # the whole


class ReduceGroup(Protocol):
    """The ranks that run the shards of a layer together; this one is `rank` of `size`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x by the sum over all ranks, the same bits on each."""


class RankGroup(ReduceGroup, Protocol):
    """The ranks of a fixed degree, each with its part of the vocabulary."""

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, come: Sequence[int], out: Sequence[int]
    ) -> None:
        """Send rows of `sent` to the ranks in their order, `out` to each, and receive `come` from each."""

"""Which degree each layer of a group runs at, and who is who in it. Pure.

A group of `size` members runs layers at two degrees at most: `low`, in n = size / low subgroups side by side,
and `size`, all together. A boundary between the two travels from the last layer to the first (Gyges §4.3),
so a step changes its parallelism once::

    layer     0 ............ boundary ............ L
    grows       low           |        size              TP1 to TP2: the members come together
    else        size          |        low               TP2 to TP1: they part

Shards nest: low shard s of subgroup j is high shard s * n + j, so whoever goes to a higher degree keeps part
of what it has. Members are listed in the order of their high shards; the first leads. KV block c of subgroup
j at the low degree is block c * n + j at the high one, in the same place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from worker.model.shard import Shard


@dataclass(frozen=True, slots=True)
class Run:
    """Layers [first, end), all together (`is_high`) or by subgroups."""

    first: int
    end: int
    is_high: bool


@dataclass(frozen=True, slots=True)
class Formation:
    """`low` == size: one degree for all layers, and no boundary."""

    members: tuple[str, ...]
    low: int
    boundary: int = 0
    grows: bool = True

    def __post_init__(self) -> None:
        if len(set(self.members)) != len(self.members) or self.size % self.low:
            raise ValueError(f"no formation of {list(self.members)} over subgroups of {self.low}")

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def num_subgroups(self) -> int:
        return self.size // self.low

    @property
    def is_uniform(self) -> bool:
        return self.low == self.size

    def subgroup(self, rank: int) -> int:
        return rank % self.num_subgroups

    def ranks_of(self, subgroup: int) -> list[int]:
        """In the order of their low shards."""
        return list(range(subgroup, self.size, self.num_subgroups))

    def by_subgroup(self, blocks: Sequence[Iterable[int]]) -> list[list[int]]:
        """What is told by rank, of each subgroup; ascending."""
        return [
            sorted(block for rank in self.ranks_of(j) for block in blocks[rank])
            for j in range(self.num_subgroups)
        ]

    def peers(self, rank: int) -> list[int]:
        """Ranks with the same low shard, by subgroup: those that exchange KV heads."""
        first = rank - self.subgroup(rank)
        return list(range(first, first + self.num_subgroups))

    def planners(self) -> list[int]:
        """All ranks as their work lies in a merged batch: subgroup by subgroup."""
        return [rank for subgroup in range(self.num_subgroups) for rank in self.ranks_of(subgroup)]

    def low_shard(self, rank: int) -> Shard:
        return Shard(rank // self.num_subgroups, self.low)

    def high_shard(self, rank: int) -> Shard:
        return Shard(rank, self.size)

    def runs(self, num_layers: int) -> list[Run]:
        """Not empty ones, in the order of the layers."""
        if self.is_uniform:
            return [Run(0, num_layers, is_high=True)]
        both = Run(0, self.boundary, not self.grows), Run(self.boundary, num_layers, self.grows)
        return [run for run in both if run.first < run.end]

    def moved(self, boundary: int) -> Formation:
        return replace(self, boundary=boundary)

    def beginning(self, low: int, num_layers: int, *, grows: bool) -> Formation:
        """The same members at the start of a transformation."""
        return Formation(self.members, low, num_layers, grows)

    def grown(self) -> Formation:
        """After the last layer: one degree."""
        return Formation(self.members, self.size)

    def part(self, rank: int) -> Formation:
        """After the last layer: this rank's subgroup, on its own."""
        names = [self.members[each] for each in self.ranks_of(self.subgroup(rank))]
        return Formation(tuple(names), self.low)

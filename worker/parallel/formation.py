"""The degree of each layer of a group, and the rank and shard of each member. Pure.

A group of `size` members runs layers at two degrees at most: `low`, in n = size / low subgroups side by
side, and `size`, all together. A boundary between the two travels from the last layer to the first (Gyges
§4.3), so a step changes its parallelism once::

    layer     0 ............ boundary ............ L
    grows       low           |        size              TP1 to TP2: subgroups merge
    else        size          |        low               TP2 to TP1: the group splits

Shards nest: low shard s of subgroup j is high shard s * n + j, so a member that goes to a higher degree
keeps part of what it has. Members are listed in the order of their high shards; the first leads. KV block c
of subgroup j at the low degree is block c * n + j at the high one, in the same place unless there are fewer
KV heads than ranks (`worker.distributed.kv_exchange`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from worker.model.shard import Shard


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers [first, end) that run at one degree: all members together (`is_high`) or by subgroups."""

    first: int
    end: int
    is_high: bool


@dataclass(frozen=True, slots=True)
class Formation:
    """The members of a group and the degrees of its layers. With `low` == size there is no boundary."""

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
        """Return the ranks of a subgroup in the order of their low shards."""
        return list(range(subgroup, self.size, self.num_subgroups))

    def by_subgroup(self, blocks: Sequence[Iterable[int]]) -> list[list[int]]:
        """Merge lists by rank into ascending lists by subgroup."""
        return [
            sorted(block for rank in self.ranks_of(j) for block in blocks[rank])
            for j in range(self.num_subgroups)
        ]

    def peers(self, rank: int) -> list[int]:
        """Return the ranks with the same low shard, by subgroup: they exchange KV heads."""
        first = rank - self.subgroup(rank)
        return list(range(first, first + self.num_subgroups))

    def planners(self) -> list[int]:
        """Return all ranks in the order in which their inputs lie in a merged batch."""
        return [rank for subgroup in range(self.num_subgroups) for rank in self.ranks_of(subgroup)]

    def low_shard(self, rank: int) -> Shard:
        return Shard(rank // self.num_subgroups, self.low)

    def high_shard(self, rank: int) -> Shard:
        return Shard(rank, self.size)

    def runs(self, num_layers: int) -> list[LayerRun]:
        """Return the runs of layers that are not empty, in the order of the layers."""
        if self.is_uniform:
            return [LayerRun(0, num_layers, is_high=True)]
        both = LayerRun(0, self.boundary, not self.grows), LayerRun(self.boundary, num_layers, self.grows)
        return [run for run in both if run.first < run.end]

    def part(self, rank: int) -> Formation:
        """Return the formation of this rank's subgroup after a split."""
        names = [self.members[each] for each in self.ranks_of(self.subgroup(rank))]
        return Formation(tuple(names), self.low)

"""The rows of an FFN, divided among the shards of the largest tensor-parallel degree: pure arithmetic.

A unit is such a shard. One rank's rows at any degree are a run of whole units, so that they differ from
another rank's by one step at most (Gyges, section 4.2: padding behind each part, not behind the last one).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kernels.packing import TILE

# Kernels take whole vectors of rows: others run in plain torch.
_VECTOR_ROWS = 16


@dataclass(frozen=True, slots=True)
class RowUnits:
    """`num_rows` rows in `count` units of whole steps; the last step may be short."""

    num_rows: int
    count: int = 1
    step: int = 1

    def rows(self, unit: int) -> range:
        """Return the rows of a unit; those of neighbours follow each other."""
        steps = -(-self.num_rows // self.step)
        begin, end = (steps * (unit + i) // self.count * self.step for i in (0, 1))
        return range(min(begin, self.num_rows), min(end, self.num_rows))

    def __iter__(self) -> Iterator[range]:
        return map(self.rows, range(self.count))

    @property
    def size(self) -> int:
        """The rows of the largest unit: the room that each has."""
        return max(map(len, self))

    @property
    def is_even(self) -> bool:
        return self.size * self.count == self.num_rows

    def joined(self, stored: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, ...], the rows out of [count, size or more, ...]: a view if they lie together."""
        if stored.shape[0] == 1:
            return stored[0, : self.num_rows]
        if self.is_even and self.size == stored.shape[1]:
            return stored.flatten(0, 1)
        return torch.cat([unit[: len(rows)] for unit, rows in zip(stored, self, strict=True)])

    def spread(self, whole: torch.Tensor, stored: torch.Tensor) -> None:
        """Write the rows of [num_rows, ...] to [count, size or more, ...]; what is behind them stays."""
        for unit, rows in zip(stored, self, strict=True):
            unit[: len(rows)].copy_(whole[rows.start : rows.stop])


def full_units(num_rows: int, count: int) -> RowUnits:
    """Return the units of rows in full precision: whole vectors of them if the rows are."""
    return RowUnits(num_rows, count, 1 if num_rows % _VECTOR_ROWS else _VECTOR_ROWS)


def quantized_units(num_rows: int, count: int, group: int) -> RowUnits:
    """Return the units of rows that are inputs in groups of `group`.

    Units begin with a group and with a tile of codes. Where whole groups would make the largest unit larger
    than whole tiles do, groups are divided (`unit_group`).
    """
    steps = (math.lcm(group, TILE), TILE)
    return min((RowUnits(num_rows, count, step) for step in steps), key=lambda units: units.size)


def unit_group(units: RowUnits, group: int) -> int:
    """Return the largest group within `group` that divides the steps and the room of the units, in tiles."""
    return math.gcd(group, units.step, -(-units.size // TILE) * TILE)

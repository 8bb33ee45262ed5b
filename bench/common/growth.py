"""Growth of processes: their own memory and their descriptors over time, and the slope of both."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from bench.common.service import Process

MIB: Final = 1 << 20
MOST_POINTS: Final = 400  # of which all pairs are compared
FEWEST_POINTS: Final = 6


def theil_sen(at: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the slopes of all pairs of points, 0.0 for fewer than two points.

    Theil (1950), Sen (1968), "Estimates of the regression coefficient based on Kendall's tau". Up to 29 % of
    the points may lie anywhere, as the peaks of an allocator do, without moving it far.
    """
    step = max(1, -(-len(at) // MOST_POINTS))
    x, y = np.asarray(at, float)[::step], np.asarray(values, float)[::step]
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first]))) if len(first) else 0.0


@dataclass
class Life:
    """Samples of one process from its start to its end; seconds are of the monotonic clock."""

    name: str
    pid: int
    at_s: list[float] = field(default_factory=list)
    own_mib: list[float] = field(default_factory=list)
    descriptors: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.at_s[-1] - self.at_s[0]

    @property
    def mib_per_minute(self) -> float:
        return self._slope(self.own_mib)

    @property
    def descriptors_per_minute(self) -> float:
        return self._slope(self.descriptors)

    def _slope(self, values: list[float]) -> float:
        """Return the growth a minute over the last two thirds: the first fills pools and caches."""
        late = len(values) // 3
        return 60 * theil_sen(self.at_s[late:], values[late:])


class Growth:
    """The owner of the samples. What processes share (pages, images) is bounded, and left out."""

    def __init__(self, processes: Iterable[Process]) -> None:
        """Take samples of these processes; one that was started again has another life."""
        self._processes = processes
        self.lives: list[Life] = []

    def sample(self) -> None:
        """Look at every process that lives."""
        for process in list(self._processes):
            with suppress(OSError):  # it ends meanwhile
                if process.is_alive:
                    self._add(process.name, process.pid)

    def _add(self, name: str, pid: int) -> None:
        own_mib, descriptors = _own_mib(pid), sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        life = next((one for one in self.lives if (one.name, one.pid) == (name, pid)), None)
        if life is None:
            life = Life(name, pid)
            self.lives.append(life)
        life.at_s.append(time.monotonic())
        life.own_mib.append(own_mib)
        life.descriptors.append(descriptors)

    def growth(self) -> dict[str, tuple[float, float]]:
        """Return MiB a minute and MiB at the end, by process, of its last life."""
        return {one.name: (one.mib_per_minute, one.own_mib[-1]) for one in self.lives}

    def told(self) -> str:
        """Return the growth in a line, "" before there are enough samples."""
        if all(len(one.at_s) < FEWEST_POINTS for one in self.lives):
            return ""
        return ", ".join(
            f"{name} {at:.0f} MiB {slope:+.2f}/min" for name, (slope, at) in self.growth().items()
        )


def _own_mib(pid: int) -> float:
    """Return RssAnon. Raises OSError for a process that has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / MIB
    raise ProcessLookupError(f"process {pid} has no memory")

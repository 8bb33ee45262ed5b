"""Layers of a group from one precision to another: every member its shard, all after the same step."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence

from bus.messages import Number
from bus.precisions import Precision, is_below
from worker.distributed.messages import DropHalf, InstallHalf, PrepareHalf
from worker.morph.outcome import NotApplied
from worker.morph.plan import Half
from worker.morph.run import Clock, Patience, halves_text
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.resize import GroupCache


class GroupSwapRun:
    """One Swap of a group, at its leader, half by half. Halves that are done stay, whatever becomes of the
    others."""

    is_beyond_return = False

    def __init__(
        self,
        party: TensorParallelExecutor,
        halves: Sequence[Half],
        precision: Precision,
        *,
        wait_s: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._party, self._cache = party, GroupCache(party)
        self._halves, self._precision = list(halves), precision
        self._patience = Patience(wait_s, clock)
        self._blocks_before = self._cache.blocks
        self._num_applied = 0

    @property
    def progress(self) -> str:
        return halves_text(self._num_applied, len(self._halves))

    @property
    def deadline(self) -> float | None:
        return self._patience.deadline

    def numbers(self) -> dict[str, Number]:
        return {
            "halves": len(self._halves),
            "halves_applied": self._num_applied,
            "wait_seconds": round(self._patience.total_s, 6),
            "blocks_before": self._blocks_before,
            "blocks_after": self._cache.blocks,
        }

    def steps(self) -> Generator[bool, None, None]:
        """Pages that the swap sets free become KV blocks when the last half is done."""
        for half in self._halves:
            yield from self._until_free_of_floors()
            yield from self._have_pages(half)
            yield from self._swap(half)
            self._num_applied += 1
        yield from self._cache.grow(self._cache.growable())

    def _swap(self, half: Half) -> Generator[bool, None, None]:
        party, target = self._party, self._party.place.target
        assert party.coordinator
        is_done = False
        party.coordinator.add(PrepareHalf(layer=half.layer, part=half.part, precision=self._precision))
        first = party.coordinator.step + 1  # its Readies tell of what this step has begun
        try:
            while party.coordinator.step < first or not all(each.has_prepared for each in self._cache.told()):
                party.raise_fallen()
                yield False
            yield from self._until_free_of_floors()
            party.coordinator.add(InstallHalf())
            is_done = True
        finally:
            if not is_done:
                party.coordinator.add(DropHalf())
        while target.precision(half) != self._precision:
            party.raise_fallen()
            yield False

    def _until_free_of_floors(self) -> Generator[bool, None, None]:
        """Requests that must not run in this precision were there first."""
        while any(each.floor and is_below(self._precision, each.floor) for each in self._cache.told()):
            self._party.raise_fallen()
            if not self._patience.wait():
                raise NotApplied("deferred", f"held by requests that take no layer in {self._precision}")
            yield False
        self._patience.get_on()

    def _have_pages(self, half: Half) -> Generator[bool, None, None]:
        """The new variant needs pages beside the old one, and perhaps more than it afterwards."""
        place = self._party.place
        new = place.target.pages(half, self._precision)
        old = place.target.pages(half, place.target.precision(half))
        free = min(each.spare_pages for each in self._cache.told()) + place.resizer.reserve_pages
        missing = max(new - free, new - old - (free - place.resizer.reserve_pages))
        if missing > 0:
            yield from self._cache.shrink(-(-missing // place.num_layers))

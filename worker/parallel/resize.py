"""The KV cache of a group, grown and shrunk on all its members between the same two steps."""

from __future__ import annotations

import time
from collections.abc import Generator

from bus.messages import Number
from worker.distributed.messages import Grow, Ready, Shrink
from worker.memory import OutOfBlocks
from worker.morph.outcome import NotApplied
from worker.morph.run import Clock, Patience
from worker.parallel.count import counting
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.share import moves_below

Told = Generator[bool, None, None]


class GroupCache:
    """What its leader knows of it, and does with it."""

    def __init__(self, party: TensorParallelExecutor) -> None:
        self.party = party

    @property
    def blocks(self) -> int:
        return self.party.member.share.capacity

    def told(self) -> list[Ready]:
        """Of every rank, the latest."""
        coordinator = self.party.coordinator
        assert coordinator
        return [coordinator.ready_of(rank) for rank in range(coordinator.size)]

    def blocks_after(self, pages: int) -> int:
        """With so many pages more (or fewer) in each layer of each member."""
        place, size = self.party.place, self.party.formation.size
        return min(place.blocks_in(each.pages + pages, size) for each in self.told())

    def growable(self) -> int:
        """Pages of each layer that every member could add, and the reserve stays."""
        place = self.party.place
        room = place.resizer.useful_pages_per_layer
        return max(
            0,
            min(min(each.spare_pages // place.num_layers, room - each.pages) for each in self.told()),
        )

    def grow(self, pages: int) -> Told:
        """Raises PeerLost."""
        if pages > 0:
            assert self.party.coordinator
            blocks = self.blocks_after(pages)
            self.party.coordinator.add(Grow(pages=pages, blocks=blocks))
            while self.blocks != blocks:
                self.party.raise_fallen()
                yield False

    def shrink(self, pages: int) -> Told:
        """Raises NotApplied where what is in use does not fit, and PeerLost."""
        blocks = self.blocks_after(-pages)
        with counting(self.party) as count:
            used = yield from count()
            try:
                moves = moves_below((block for each in used for block in each), blocks)
            except OutOfBlocks as error:
                in_use = sum(map(len, used))
                raise NotApplied(
                    "deferred",
                    f"{in_use} KV blocks are in use in the group, {blocks} would be left",
                    blocks_used=in_use,
                    blocks_asked=blocks,
                ) from error
            assert self.party.coordinator
            self.party.coordinator.add(Shrink(pages=pages, blocks=blocks, moves=moves))
        while self.blocks != blocks:
            self.party.raise_fallen()
            yield False


class GroupResizeRun:
    """One Resize of a group, at its leader."""

    progress, is_beyond_return = "", False

    def __init__(
        self, party: TensorParallelExecutor, num_blocks: int, *, wait_s: float, clock: Clock = time.monotonic
    ) -> None:
        """Raises NotApplied for sizes that can never be."""
        self._cache, self._num_blocks = GroupCache(party), num_blocks
        self._patience = Patience(wait_s, clock)
        self._blocks_before = self._cache.blocks
        limits = party.place.instance.limits
        least = min(-(-limits.max_model_len // limits.block_tokens), self._blocks_before)
        if num_blocks < least:
            raise NotApplied(
                "failed",
                f"this group needs at least {least} KV blocks, since the longest sequence must fit",
                blocks_asked=num_blocks,
                min_blocks=least,
            )

    @property
    def deadline(self) -> float | None:
        return self._patience.deadline

    def numbers(self) -> dict[str, Number]:
        return {
            "blocks_asked": self._num_blocks,
            "blocks_before": self._blocks_before,
            "blocks_after": self._cache.blocks,
        }

    def steps(self) -> Told:
        cache = self._cache
        missing = self._pages_missing()
        if missing < 0:
            yield from cache.shrink(-missing)
        while missing > (growable := cache.growable()):
            if not self._patience.wait():
                raise NotApplied(
                    "deferred",
                    f"{self._num_blocks} KV blocks need {missing} pages more in each layer of each member;"
                    f" {growable} can be had",
                    pages_needed=missing,
                    pages_free=growable,
                )
            yield False
        self._patience.get_on()
        yield from cache.grow(missing)

    def _pages_missing(self) -> int:
        """In each layer of each member; negative: so many too many."""
        pages, blocks_after = 0, self._cache.blocks_after
        step = 1 if blocks_after(0) < self._num_blocks else -1
        least = min(each.pages for each in self._cache.told())
        place = self._cache.party.place
        most = place.cache.pool.num_pages // place.num_layers  # what no device has cannot be had either
        while step > 0 and pages < most and blocks_after(pages) < self._num_blocks:
            pages += 1
        while step < 0 and pages > -least and blocks_after(pages - 1) >= self._num_blocks:
            pages -= 1
        return pages

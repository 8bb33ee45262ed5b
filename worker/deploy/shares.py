"""KV pages to who misses them, between steps."""

from __future__ import annotations

import time
from collections.abc import Container

from worker.deploy.sharing import Move, next_move
from worker.deploy.site import PAGES_AT_ONCE, Site, holder_of
from worker.morph.run import Clock

# A model that lacked blocks this recently keeps its fair share: pages would otherwise move with every gap
# between requests.
KEEN_S = 1.0


class Shares:
    """In the engine's thread."""

    def __init__(self, site: Site, clock: Clock = time.monotonic) -> None:
        self._site, self._clock = site, clock
        self._wanted_at: dict[str, float] = {}
        self.num_moves = 0

    def move_some(self, but: Container[str]) -> bool:
        """A unit of work, if somebody misses blocks and others can give. but: instances whose KV is being
        resized by order."""
        residents = self._site.residents
        if len(residents) < 2:
            return False
        now = self._clock()
        for name, one in residents.items():
            if one.target.instance.scheduler.num_blocks_wanted:
                self._wanted_at[name] = now
        if now not in self._wanted_at.values():
            return False
        holders = [
            holder_of(one, is_keen=now - self._wanted_at.get(name, -KEEN_S) < KEEN_S)
            for name, one in residents.items()
            if name not in but
        ]
        move = next_move(holders, self._site.num_spare_pages)
        if move is None:
            return False
        self._do(move)
        return True

    def forget(self, instance: str) -> None:
        self._wanted_at.pop(instance, None)

    def _do(self, move: Move) -> None:
        """A few pages of each layer. What the lender gives may not be a page for each layer of the
        borrower: then it is free until the next move."""
        residents = self._site.residents
        if move.lender:
            lender = residents[move.lender].target.resizer
            lender.lend(min(move.pages // lender.num_layers, PAGES_AT_ONCE))
        borrower = residents[move.borrower].target.resizer
        pages = min(move.pages // borrower.num_layers, borrower.growable(), PAGES_AT_ONCE)
        if pages > 0:
            borrower.borrow(pages)
            self.num_moves += 1

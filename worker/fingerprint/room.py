"""Pages for a fingerprint: free ones, and those of models' KV that lies idle."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from worker.deploy.sharing import fair_pages, gift, next_lender
from worker.deploy.site import PAGES_AT_ONCE, Site, holder_of
from worker.memory import PagePool


class NoRoom(Exception):
    """It takes more pages than it may have."""


class Room(Protocol):
    def available(self) -> int:
        """Pages that it could have."""

    def make(self, num_pages: int) -> Generator[bool, None, None]:
        """Until so many are free; a few pages at a time. Raises NoRoom."""

    def give_back(self) -> None:
        """What was lent for it, behind its end."""


class FreeRoom:
    """What is free."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool

    def available(self) -> int:
        return self._pool.num_free

    def make(self, num_pages: int) -> Generator[bool, None, None]:
        yield True

    def give_back(self) -> None:
        """Nothing was lent."""


class SiteRoom:
    """Of a worker that serves: its reserve for swaps stays, and its models get their KV back."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def available(self) -> int:
        holders = [holder_of(one) for one in self._site.residents.values()]
        fair = fair_pages(holders, 0)
        return max(0, self._site.num_spare_pages + sum(gift(one, fair) for one in holders))

    def make(self, num_pages: int) -> Generator[bool, None, None]:
        site = self._site
        while site.taken_by:  # a model comes or goes: it counts on what is free
            yield False
        while (missing := num_pages - site.num_spare_pages) > 0:
            move = next_lender([holder_of(one) for one in site.residents.values()], missing)
            if move is None:
                raise NoRoom(f"{missing} pages are missing: models need their KV by now")
            resizer = site.residents[move.lender].target.resizer
            resizer.lend(min(move.pages // resizer.num_layers, PAGES_AT_ONCE))
            yield True

    def give_back(self) -> None:
        while self._site.give_back():
            pass

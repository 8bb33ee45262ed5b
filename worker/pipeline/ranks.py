"""The ranks of one stage, and their communicator.

An all-reduce holds the engine's thread until every rank has come. So a worker in a stage of several ranks
belongs to no other group: two groups that wait for each other crosswise could not go on.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.distributed.communicator import Communicator, PeerLost
from worker.distributed.rendezvous import CommunicatorPool
from worker.model.shard import Shard


class Ranks:
    """`shard`: this worker's place; a stage of one rank has no communicator. Owned by the engine's thread."""

    def __init__(
        self, shard: Shard, host: str, device: str, timeout_s: float, on_news: Callable[[], None]
    ) -> None:
        """host: of this rank, for others. on_news: called in any thread when `have_met` may have changed."""
        self.shard = shard
        self.group: Communicator | None = None
        self._on_news = on_news
        self._why_not, self._is_closed = "", False
        self._pool = CommunicatorPool(host, device, timeout_s, self._met)

    @property
    def store(self) -> str:
        """The address (host:port) where the ranks meet, at the first of several; else ""."""
        return self._pool.store if self.shard.size > 1 and self.shard.rank == 0 else ""

    def meet(self, rendezvous: str, store: str) -> None:
        """Meet the other ranks in another thread, within the timeout."""
        if self.shard.size > 1:
            self._pool.start(rendezvous, store, self.shard.rank, self.shard.size)

    @property
    def have_met(self) -> bool:
        """True once the ranks have met and several have a `group`. Raises PeerLost if one did not come."""
        if self._why_not:
            raise PeerLost(self._why_not)
        return self.group is not None or self.shard.size == 1

    def close(self) -> None:
        """Leave the communicator: all-reduces of other ranks fail from here on. May be repeated."""
        self._is_closed = True
        if self.group:
            self.group.close()
        self._pool.close()

    def _met(self, _: str, made: Communicator | str) -> None:
        """Note the end of the rendezvous, in its thread; `close` may have been called before."""
        if isinstance(made, str):
            self._why_not = made
        else:
            self.group = made
            if self._is_closed:
                made.close()
                self.group = None
        self._on_news()

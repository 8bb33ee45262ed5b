"""The ranks of one stage: how this worker meets the other ranks, and their communicator.

An all-reduce holds the engine's thread until every rank has come to it, at most for the timeout. So a worker
in a stage of several ranks belongs to no other group and to no second such stage: two groups that wait for
each other crosswise could not go on. Plain instances beside the stage only delay an all-reduce by a step.
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
        """Prepare the ranks of one stage.

        host: where the other ranks reach this one. on_news: called when `have_met` may have changed, in any
        thread.
        """
        self.shard = shard
        self.group: Communicator | None = None
        self._on_news = on_news
        self._rendezvous, self._why_not, self._is_closed = "", "", False
        self._pool = CommunicatorPool(host, device, timeout_s, self._met)

    @property
    def store(self) -> str:
        """Where the ranks meet (host:port), at the first of several; else ""."""
        return self._pool.store if self.shard.size > 1 and self.shard.rank == 0 else ""

    def meet(self, rendezvous: str, store: str) -> None:
        """Meet the other ranks in another thread, within the timeout."""
        self._rendezvous = rendezvous
        if self.shard.size > 1:
            self._pool.start(rendezvous, store, self.shard.rank, self.shard.size)

    @property
    def have_met(self) -> bool:
        """True once the ranks have met; then `group` is set, if there are several.

        Raises PeerLost if one did not come.
        """
        if self._why_not:
            raise PeerLost(self._why_not)
        if self.shard.size > 1 and self.group is None and self._rendezvous:
            try:
                self.group = self._pool.take_made(self._rendezvous)
            except KeyError:
                return False
        return self.group is not None or self.shard.size == 1

    def close(self) -> None:
        """Leave the communicator: all-reduces of the other ranks fail from here on.

        Closing again does nothing.
        """
        self._is_closed = True
        if self.group:
            self.group.close()
        self._pool.close()

    def _met(self, rendezvous: str, why_not: str) -> None:
        """Note the end of the rendezvous, in its thread; `close` may have been called before."""
        self._why_not = why_not
        if self._is_closed:
            self._pool.drop(rendezvous)
        self._on_news()

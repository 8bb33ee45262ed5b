"""The ranks of one stage: how this worker meets the others of its own, and what they add up by.

A sum holds the engine's thread until every rank has come to it, at most for the timeout. So a worker in a
stage of several ranks belongs to no other group, nor to a second such stage: of two that wait for each other
crosswise neither could go on. Plain instances beside it only make a sum wait for a step of theirs.
"""

from __future__ import annotations

from collections.abc import Callable

from worker.distributed.communicator import Communicator, PeerLost
from worker.distributed.rendezvous import Meetings
from worker.model.shard import Shard


class Ranks:
    """`shard`: this worker's place. Of one rank nobody is to be met. The engine's thread owns it."""

    def __init__(
        self, shard: Shard, host: str, device: str, timeout_s: float, on_news: Callable[[], None]
    ) -> None:
        """host: at which the others reach this one. on_news: look at `have_met` again; in any thread."""
        self.shard = shard
        self.group: Communicator | None = None
        self._on_news = on_news
        self._meeting, self._why_not, self._is_closed = "", "", False
        self._meetings = Meetings(host, device, timeout_s, self._met)

    @property
    def store(self) -> str:
        """Where they meet (host:port), of the first of several; else empty."""
        return self._meetings.store if self.shard.size > 1 and self.shard.rank == 0 else ""

    def meet(self, meeting: str, store: str) -> None:
        """In another thread, within the timeout. All ranks come to the same."""
        self._meeting = meeting
        if self.shard.size > 1:
            self._meetings.begin(meeting, store, self.shard.rank, self.shard.size)

    @property
    def have_met(self) -> bool:
        """From then on there is a `group`, if there are several. Raises PeerLost where one did not come."""
        if self._why_not:
            raise PeerLost(self._why_not)
        if self.shard.size > 1 and self.group is None and self._meeting:
            try:
                self.group = self._meetings.made(self._meeting)
            except KeyError:
                return False
        return self.group is not None or self.shard.size == 1

    def close(self) -> None:
        """Sums of the other ranks fail from here on. Repeating it is harmless."""
        self._is_closed = True
        if self.group:
            self.group.close()
        self._meetings.close()

    def _met(self, meeting: str, why_not: str) -> None:
        """In the meeting's thread; `close` may have come before."""
        self._why_not = why_not
        if self._is_closed:
            self._meetings.drop(meeting)
        self._on_news()

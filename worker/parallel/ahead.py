"""Communicators of groups that may form some day are made now: that takes a moment, which a transformation
saves then."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence

from worker.parallel.links import Link, Links
from worker.parallel.meetings import Meetings, key_of
from worker.parallel.wire import MeetAhead, Peer


class MeetingsAhead:
    """Those under way; what they make is kept by `Meetings`."""

    def __init__(self, worker: str, links: Links, meetings: Meetings) -> None:
        self._worker, self._links, self._meetings = worker, links, meetings
        self._keys: dict[str, str] = {}  # by the meeting's name
        self._asked: dict[str, list[Link]] = {}  # over which others were, likewise

    def call(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """All of them, this worker the first; unless they have met, or are about to."""
        key = key_of(members, peers)
        if self._meetings.has(key) or key in self._keys.values():
            return
        order = MeetAhead(
            group=f"ahead {uuid.uuid4().hex[:8]}",
            members=list(members),
            peers={name: peers[name] for name in members},
            store=self._meetings.store,
        )
        others = [peers[name] for name in members if name != self._worker]
        links = [self._links.connect(peer.address, peer.key) for peer in others]
        for link in links:
            link.send(order)
        self._asked[order.group] = links
        self.come(order)

    def come(self, order: MeetAhead) -> None:
        self._keys[order.group] = key_of(order.members, order.peers)
        rank = order.members.index(self._worker)
        self._meetings.begin(order.group, order.store, rank, len(order.members))

    def end(self, name: str, reason: str) -> bool:
        """A meeting has ended, well or not (`reason`). False: it is none of these."""
        for link in self._asked.pop(name, []):
            link.close()
        key = self._keys.pop(name, "")
        if key and not reason:
            self._meetings.keep(key, self._meetings.take(name))
        return bool(key)

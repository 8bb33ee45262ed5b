"""Communicators of groups that may form some day are made now: that takes a moment, which a transformation
saves then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.distributed.messages import GroupMessage, Peer, RendezvousAhead
from worker.distributed.rendezvous import Meetings, key_of, new_meeting
from worker.distributed.transport import Endpoint, Link


class MeetingsAhead:
    """Those under way; what they make is kept by `Meetings`."""

    def __init__(self, worker: str, links: Endpoint[GroupMessage], meetings: Meetings) -> None:
        self._worker, self._links, self._meetings = worker, links, meetings
        self._keys: dict[str, str] = {}  # by meeting
        self._asked: dict[str, list[Link]] = {}  # by meeting: over which others were

    def call(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """All of them, this worker the first; unless they have met, or are about to."""
        key = key_of(members, peers)
        if self._meetings.kept(key) or key in self._keys.values():
            return
        order = RendezvousAhead(
            group="",
            meeting=new_meeting(),
            members=list(members),
            peers={name: peers[name] for name in members},
            store=self._meetings.store,
        )
        others = [peers[name] for name in members if name != self._worker]
        links = [self._links.connect(peer.address, peer.key) for peer in others]
        for link in links:
            link.send(order)
        self._asked[order.meeting] = links
        self.come(order)

    def come(self, order: RendezvousAhead) -> None:
        self._keys[order.meeting] = key_of(order.members, order.peers)
        rank = order.members.index(self._worker)
        self._meetings.begin(order.meeting, order.store, rank, len(order.members))

    def end(self, meeting: str, reason: str) -> bool:
        """It has ended, well or not (`reason`). False: it is none of these."""
        for link in self._asked.pop(meeting, []):
            link.close()
        key = self._keys.pop(meeting, "")
        if key and not reason:
            self._meetings.keep(key, meeting, self._meetings.made(meeting))
        return bool(key)

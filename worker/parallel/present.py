"""The group that a worker is in now: its executor, and the links to the other members."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from worker.distributed.messages import GroupEnded, Peer
from worker.distributed.transport import Link
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.ties import PeerLinks

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Present:
    """What follows when it cannot go on is for `worker.parallel.grouping`."""

    party: TensorParallelExecutor
    key: str  # of its communicator
    meeting: str  # that made it
    peers: dict[str, Peer]
    ties: PeerLinks
    former: list[Link]  # of the groups that became this one

    def say_bye(self, reason: str) -> None:
        for link in self.ties:
            link.send(GroupEnded(group=self.party.group, reason=reason))

    def close(self) -> None:
        """Its links, and those of the groups before: not earlier, else it looks like a loss to who has not
        entered yet, or not made the last step."""
        self.ties.close()
        for link in self.former:
            link.close()
        self.former = []

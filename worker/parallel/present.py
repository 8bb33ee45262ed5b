"""The group that a worker is in now: its part in it, and the links to the others."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from worker.distributed.communicator import PeerLost
from worker.distributed.messages import GroupEnded, Peer
from worker.distributed.transport import Link
from worker.morph.executor import FATAL
from worker.parallel.party import Party
from worker.parallel.ties import PeerLinks

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Present:
    """What follows when it cannot go on is for `worker.parallel.grouping`."""

    party: Party
    key: str  # of its communicator
    meeting: str  # that made it
    peers: dict[str, Peer]
    ties: PeerLinks
    former: list[Link]  # of the groups that became this one

    def tick(self, may_plan: bool) -> str:
        """The group's step, if it is called. Returns why it cannot go on; empty: it can. Raises what the
        worker itself cannot go on after."""
        try:
            self.party.tick(may_plan)
        except FATAL:
            raise
        except PeerLost as error:
            return str(error)
        except Exception as error:
            log.exception("a step of the group failed")
            return f"{type(error).__name__}: {error}"
        return ""

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

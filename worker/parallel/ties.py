"""Over which the members of one group talk: its leader has a link to each other one, those have one to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from worker.distributed.messages import Message
from worker.distributed.transport import Link


@dataclass(slots=True)
class PeerLinks:
    """At one member. The links to others are this worker's to close, the one to the leader is not."""

    others: dict[str, Link] = field(default_factory=dict)  # the leader's, by worker
    leader: Link | None = None

    def __iter__(self) -> Iterator[Link]:
        yield from self.others.values()
        if self.leader:
            yield self.leader

    def has(self, link: Link) -> bool:
        return any(link is each for each in self)

    def tell_others(self, message: Message) -> None:
        for link in self.others.values():
            link.send(message)

    def tell_leader(self, message: Message) -> None:
        if self.leader:
            self.leader.send(message)

    def close(self) -> None:
        for link in self.others.values():
            link.close()

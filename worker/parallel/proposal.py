"""A change of group that is not decided yet: at its coordinator, and at a member that has voted for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bus.messages import LayerShape, Number
from worker.distributed.messages import Message, Prepare, Vote
from worker.distributed.transport import Link
from worker.model.shard import Shard
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance


@dataclass(slots=True)
class PeerLinks:
    """The links of one member of a group.

    The leader has one to each other member, the others have one to the leader.
    """

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


@dataclass(slots=True)
class Proposal:
    """The coordinator's record: which members were asked and what they answered."""

    prepare: Prepare
    formation: Formation
    links: dict[str, Link]  # of the others
    votes: dict[str, Vote] = field(default_factory=dict)
    rendezvous: dict[str, str] = field(default_factory=dict)  # by member: why it failed; "": it succeeded
    has_called_rendezvous: bool = False
    lost: str = ""  # a member that is gone, and why

    @property
    def group(self) -> str:
        return self.prepare.group

    @property
    def missing_votes(self) -> list[str]:
        return [name for name in self.formation.members if name not in self.votes]

    @property
    def refusals(self) -> list[str]:
        refused = [f"{name}: {vote.reason}" for name, vote in self.votes.items() if vote.reason]
        return refused + [f"{name}: {reason}" for name, reason in self.rendezvous.items() if reason]

    @property
    def is_rendezvous_done(self) -> bool:
        """True if the rendezvous of every member has ended, well or not."""
        return all(name in self.rendezvous for name in self.formation.members)

    @property
    def is_rendezvous_partial(self) -> bool:
        """True if a rendezvous was called and is not known to have succeeded for all members."""
        return self.has_called_rendezvous and (not self.is_rendezvous_done or any(self.rendezvous.values()))

    def name_of(self, link: Link) -> str:
        """Return the member at the other end, or ""."""
        return next((name for name, each in self.links.items() if each is link), "")


@dataclass(slots=True)
class Prepared:
    """A member's record: it has voted yes and waits for the decision."""

    prepare: Prepare
    formation: Formation
    link: Link


def vote_on(
    prepare: Prepare,
    formation: Formation,
    worker: str,
    local: LocalInstance,
    executor: TensorParallelExecutor | None,
    *,
    in_the_way: str,
    rendezvous: str,
) -> Vote:
    """Return whether `worker` can make this change, and what it would have then. in_the_way.

    What else forbids a change now, or "". rendezvous: the one whose communicator it has kept, or "".
    """
    rank = formation.members.index(worker)
    shard = formation.high_shard(rank) if prepare.grows else formation.low_shard(rank)
    numbers, not_laid_out = _numbers(local, shard, executor, is_split=not prepare.grows)

    def reasons() -> Iterator[str]:
        now = executor.formation.members if executor else (worker,)
        wanted = formation.part(rank).members if prepare.grows else formation.members
        yield in_the_way
        yield "" if prepare.model == local.name else f"it serves {local.name}, not {prepare.model}"
        yield "" if now == wanted else f"it is at one with {', '.join(now)}, not with {', '.join(wanted)}"
        yield difference(local.instance.shape, prepare.shape, prepare.leader) if prepare.grows else ""
        yield not_laid_out

    reason = next(filter(None, reasons()), "")
    return Vote(group=prepare.group, worker=worker, reason=reason, rendezvous=rendezvous, numbers=numbers)


def _numbers(
    local: LocalInstance, shard: Shard, executor: TensorParallelExecutor | None, *, is_split: bool
) -> tuple[dict[str, Number], str]:
    """Return the numbers of a vote, and "" or why there are none.

    The weights are not laid out for this degree.
    """
    try:
        numbers = local.numbers(shard, executor.member.pages_alone if executor else None)
        return numbers | (local.row_costs(shard).numbers() if is_split else {}), ""
    except ValueError as error:
        return {}, str(error)


def difference(own: Sequence[LayerShape], leaders: Sequence[LayerShape], leader: str) -> str:
    """Return why two instances cannot form a group, or "".

    With a part of each layer's heads in other bits the group would have a shape that was never ordered,
    possibly below the floor of running requests.
    """
    for layer, (here, there) in enumerate(zip(own, leaders, strict=True)):
        if here != there:
            return (
                f"its layer {layer} is {here.attention}/{here.ffn} (attention/FFN) and {there.attention}/"
                f"{there.ffn} at {leader}; swap one of them first"
            )
    return ""

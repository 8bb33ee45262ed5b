"""A change of group that is not decided yet, and a worker's vote on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field

from bus.groups import can_change
from bus.messages import LayerShape, Number
from bus.precisions import KVPrecision
from worker.distributed.messages import Message, Prepare, Vote
from worker.distributed.rendezvous import members_key
from worker.distributed.transport import Link
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance


@dataclass(slots=True)
class PeerLinks:
    """The links of one member of a group: the leader's to each other member, or the other's to the leader."""

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
    """A change of group under way at one worker, which coordinates it or has voted for it."""

    prepare: Prepare
    formation: Formation
    worker: str
    links: PeerLinks  # the coordinator's to the other members, or a member's to the coordinator
    votes: dict[str, Vote] = field(default_factory=dict)
    rendezvous_ends: dict[str, str] = field(default_factory=dict)  # why it failed, by member; "": it did not
    has_called_rendezvous: bool = False
    lost: str = ""  # a member that is gone, and why
    rendezvous: str = ""  # the one whose communicator the change needs
    has_communicator: bool = False

    @property
    def group(self) -> str:
        return self.prepare.group

    @property
    def is_coordinator(self) -> bool:
        return self.links.leader is None

    @property
    def rank(self) -> int:
        return self.formation.members.index(self.worker)

    @property
    def next_formation(self) -> Formation:
        """The members with whom this worker runs steps afterwards, one subgroup of them or all."""
        return self.formation if self.prepare.grows else self.formation.part(self.rank)

    @property
    def next_group(self) -> str:
        """The id of their group."""
        return self.group if self.prepare.grows else f"{self.group}/{self.formation.subgroup(self.rank)}"

    @property
    def key(self) -> str:
        """The key of their communicator."""
        return members_key(self.next_formation.members, self.prepare.peers)

    @property
    def leads_subgroup(self) -> bool:
        """True if this worker leads a subgroup of several after a split."""
        is_first = self.formation.low_shard(self.rank).rank == 0
        return not self.prepare.grows and self.formation.low > 1 and is_first

    @property
    def missing_votes(self) -> list[str]:
        return [name for name in self.formation.members if name not in self.votes]

    @property
    def refusals(self) -> list[str]:
        reasons = [(name, vote.reason) for name, vote in self.votes.items()]
        return [f"{name}: {reason}" for name, reason in (*reasons, *self.rendezvous_ends.items()) if reason]

    @property
    def is_rendezvous_done(self) -> bool:
        """True if the rendezvous of every member has ended, well or not."""
        return all(name in self.rendezvous_ends for name in self.formation.members)

    @property
    def is_rendezvous_partial(self) -> bool:
        """True if a rendezvous was called and is not known to have succeeded for all members."""
        has_failed = not self.is_rendezvous_done or any(self.rendezvous_ends.values())
        return self.has_called_rendezvous and has_failed


def vote_on(
    change: Proposal,
    local: LocalInstance,
    executor: TensorParallelExecutor | None,
    *,
    in_the_way: str,
    rendezvous: str,
) -> Vote:
    """Return whether this worker can make the change, and what it would have then.

    in_the_way: why not, or "". rendezvous: the one whose communicator it has kept, or "".
    """
    prepare, formation, rank = change.prepare, change.formation, change.rank
    shard = formation.high_shard(rank) if prepare.grows else formation.low_shard(rank)
    numbers, not_laid_out = dict[str, Number](), ""
    try:
        numbers = local.numbers(shard, executor.member.pages_alone if executor else None)
        which = "pages_per_layer" if prepare.grows else "pages_after"
        between = local.blocks_between(formation, int(numbers[which]))
        if prepare.grows:
            numbers["blocks"] = min(numbers["blocks"], between)
        else:
            numbers |= asdict(local.row_costs(shard)) | {"blocks_after": between}
    except ValueError as error:
        not_laid_out = str(error)

    def reasons() -> Iterator[str]:
        now = executor.formation.members if executor else (change.worker,)
        wanted = formation.part(rank).members if prepare.grows else formation.members
        yield in_the_way
        yield "" if prepare.model == local.name else f"it serves {local.name}, not {prepare.model}"
        yield "" if now == wanted else f"it is at one with {', '.join(now)}, not with {', '.join(wanted)}"
        yield difference(local.instance.shape, prepare.shape, prepare.leader) if prepare.grows else ""
        yield kv_difference(local.cache.form, prepare.kv_form, prepare.leader) if prepare.grows else ""
        yield context_difference(local.model.config.max_position_embeddings, prepare)
        yield not_laid_out or repeated_heads(formation, local.model.config.num_kv_heads)

    reason = next(filter(None, reasons()), "")
    return Vote(
        group=change.group, worker=change.worker, reason=reason, rendezvous=rendezvous, numbers=numbers
    )


def kv_difference(own: KVPrecision | None, leaders: KVPrecision | None, leader: str) -> str:
    """Return why two KV caches cannot exchange blocks, or "". None: a conversion ended half-way."""
    if own is None:
        return "its KV cache is half-way between two precisions; convert it"
    if leaders is None:
        return f"the KV cache of {leader} is half-way between two precisions; convert it"
    return (
        ""
        if own == leaders
        else f"its KV cache is in {own} and in {leaders} at {leader}; convert one of them"
    )


def repeated_heads(formation: Formation, kv_heads: int) -> str:
    """Return why groups, not single workers, cannot come together or part so, or ""."""
    low, size = formation.low, formation.size
    if can_change(low, size, kv_heads):
        return ""
    return (
        f"at degree {size} several workers have the same of {kv_heads} KV heads: single workers join and"
        f" leave such a group, not groups of {low}; go to degree 1 first"
    )


def context_difference(own: int, prepare: Prepare) -> str:
    """Return why the positions of one worker's sequences are no rows of the other's rotary tables, or ""."""
    if prepare.context in (0, own):
        return ""
    return (
        f"it serves sequences of up to {own} tokens, and {prepare.leader} of up to {prepare.context};"
        " give both one worker.max_model_len"
    )


def difference(own: Sequence[LayerShape], leaders: Sequence[LayerShape], leader: str) -> str:
    """Return why two instances cannot form a group, or "": it would have a shape that was never ordered."""
    for layer, (here, there) in enumerate(zip(own, leaders, strict=True)):
        if here != there:
            return (
                f"its layer {layer} is {here.attention}/{here.ffn} (attention/FFN) and {there.attention}/"
                f"{there.ffn} at {leader}; swap one of them first"
            )
    return ""

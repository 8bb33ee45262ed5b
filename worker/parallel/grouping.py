"""The group that this worker is in, if any, and how it comes to be in another."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from worker.distributed import messages
from worker.distributed.communicator import Communicator
from worker.distributed.rendezvous import AheadRendezvous, CommunicatorPool
from worker.distributed.transport import Link, Transport
from worker.memory import BlockAllocator, OutOfBlocks
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.local_instance import LocalInstance
from worker.parallel.member import Member
from worker.parallel.proposal import PeerLinks, Proposal
from worker.parallel.two_phase_commit import TwoPhaseCommit

log = logging.getLogger(__name__)

MAX_EARLY = 64  # Ready messages that come before this leader has entered


@dataclass(slots=True)
class CurrentGroup:
    """The group that a worker is in now, and its links."""

    executor: TensorParallelExecutor
    change: Proposal  # proposal that made it
    links: PeerLinks
    former: list[Link]  # links of the groups that became this one

    def close(self) -> None:
        """Close the links, with those of former groups: earlier a slower member would take it for a loss."""
        self.links.close()
        for link in self.former:
            link.close()


class Grouping:
    """Links and rendezvous call back in threads of their own; `post` brings the calls into the engine's."""

    def __init__(
        self, worker: str, local: LocalInstance, transport: Transport, *, device: str = "cpu"
    ) -> None:
        self.worker, self.local = worker, local
        self.post: Callable[[Callable[[], None]], None] = lambda call: call()
        # Called with the members in the order of their shards (empty: this worker is alone), and why.
        self.on_regrouped: Callable[[tuple[str, ...], str], None] = lambda members, why: None
        # Called at the leader when a member is about to leave: the group should split.
        self.on_split_requested: Callable[[], None] = lambda: None
        # Called during long work, which is no hang.
        self.on_progress: Callable[[], None] = lambda: None
        self.why_not: Callable[[], str] = lambda: ""  # returns what else forbids a change, or ""
        self._links = transport.endpoint(
            messages.GroupMessage,
            lambda link, message, payload: self.post(lambda: self._take(link, message)),
            lambda link, reason: self.post(lambda: self._lost(link, reason)),
        )
        self._communicators = CommunicatorPool(
            transport.host,
            device,
            transport.timeout_s,
            lambda rendezvous, made: self.post(lambda: self._rendezvous_ended(rendezvous, made)),
        )
        self._ahead = AheadRendezvous(worker, self._links, self._communicators)
        self._current: CurrentGroup | None = None
        self.change = TwoPhaseCommit(
            worker,
            local,
            self._links,
            self._communicators,
            lambda: (self.executor, self._current.links if self._current else PeerLinks()),
            lambda: self.why_not() or self.busy_with,
        )
        self._early: list[messages.Ready] = []  # messages of members that entered before this leader
        self._losses: list[tuple[Link, str]] = []  # seen before this worker made the group's last step

    @property
    def executor(self) -> TensorParallelExecutor | None:
        return self._current.executor if self._current else None

    @property
    def peers(self) -> dict[str, messages.Peer]:
        """The members of the group that this worker is in."""
        return self._current.change.prepare.peers if self._current else {}

    @property
    def busy_with(self) -> str:
        """Why no other morph may begin here now; empty: it may."""
        if self.change.is_under_way:
            return "its degree of tensor parallelism is about to change"
        if self.executor and not self.executor.formation.is_uniform:
            return "its degree of tensor parallelism is changing"
        return ""

    def close(self) -> None:
        """Leave: the others go on alone."""
        self._links.close()
        self._communicators.close()
        self.local.copier.close()

    def request_split(self) -> None:
        """Ask the leader to split the group, since this worker is to leave. It may refuse: repeat it."""
        if self._current and self._current.executor.coordinator:
            self.on_split_requested()
        elif self._current:
            self._current.links.tell_leader(messages.RequestSplit(group=self._current.executor.group))

    # ----------------------------------------------------------------------------- the coordinator

    def prepare_communicator(self, members: Sequence[str], peers: Mapping[str, messages.Peer]) -> None:
        """Make the communicator of a group that may form later, unless it is kept already."""
        if not self.executor and not self.busy_with:
            self._ahead.call(members, peers)

    def commit(self, proposal: Proposal, blocks: int) -> None:
        """Enter the group, then with its executor, and let the others enter, each at its next boundary."""
        self._enter(blocks)
        if self.executor:  # else it cannot
            for name in proposal.formation.members[1 : proposal.formation.num_subgroups]:
                # The first member of each other subgroup takes its subgroup along.
                proposal.links.others[name].send(messages.Commit(group=proposal.group, blocks=blocks))

    # ----------------------------------------------------------------------------- at every boundary

    def _after_step(self) -> None:
        """Go from one group to the next where the step just made was the last one in it."""
        current = self._current
        assert current is not None
        if current.executor.enters_next:
            self._enter_next(current)
        elif current.executor.member.is_over:
            self._part(current)
        losses, self._losses = self._losses, []
        for link, reason in losses:
            if self._is_of_group(link):
                self.fall_apart(reason)

    # ----------------------------------------------------------------------------- from one to the next

    def _enter(self, blocks: int) -> None:
        """Enter at once if this worker is alone; a group enters when its members are at the same step."""
        if self.executor:
            assert self.executor.coordinator
            self.executor.coordinator.add(messages.EnterGroup(blocks=blocks))
            return
        self.local.instance.settle()  # tokens in flight may end sequences, whose blocks are free then
        try:
            high = self.change.take_communicator()
            pages, share = self.local.cache.pages_per_layer, self.local.enter_group(blocks)
        except (KeyError, OutOfBlocks) as error:
            self.change.withdraw(f"{self.worker} cannot enter: {error}")
            return
        self._join(high, None, share, pages, [])

    def _enter_next(self, before: CurrentGroup) -> None:
        """Enter the larger group: all members of this one have made the same last step.

        Without a coordinator this group cannot go on either: not all members may know that it is gone.
        """
        try:
            high = self.change.take_communicator()
        except KeyError:
            self.fall_apart("the larger group does not come about")
            return
        member = before.executor.member
        former = [*before.former, *before.links.others.values()]
        self._join(high, member.high, member.share, member.pages_alone, former)

    def _part(self, before: CurrentGroup) -> None:
        """Go on alone, or in a smaller group."""
        member = before.executor.member
        self._communicators.keep(before.change.key, before.change.rendezvous, member.high)
        if member.formation.low == 1:
            self._leave(before)
            self.on_regrouped((), "the group has parted")
            return
        before.close()
        assert member.low
        self._join(member.low, None, member.share, member.pages_alone, [])
        assert self.executor
        self.on_regrouped(self.executor.formation.members, "the group has parted")

    def _join(
        self,
        high: Communicator,
        low: Communicator | None,
        share: BlockAllocator,
        pages: int,
        former: list[Link],
    ) -> None:
        """Run steps in the group of the change under way from here on. pages: of each layer, alone."""
        change, links = self.change.finish()
        formation = change.next_formation
        rank = formation.members.index(self.worker)
        executor = TensorParallelExecutor(
            change.next_group,
            Member(formation, rank, self.local, high, low, share, pages, self.on_progress),
            send=links.tell_leader,
            broadcast=links.tell_others,
            on_settled=lambda: self.on_regrouped(formation.members, "all layers have their new degree"),
            after_step=self._after_step,
            on_failed=self.fall_apart,
        )
        self.local.instance.use(executor)
        self.post(lambda: None)  # the first step is due
        former = [link for link in former if not links.has(link)]
        self._current = CurrentGroup(executor, change, links, former)
        for ready in self._early:
            if executor.coordinator and ready.group == change.next_group:
                executor.coordinator.take(ready)
        self._early = []
        if change.prepare.grows and change.lost:  # since the last look: no other message will say so
            self.fall_apart(f"a member was lost: {change.lost}")

    def fall_apart(self, reason: str) -> None:
        """End the group: its members serve alone."""
        self._losses = []
        before = self._current
        if before is None:
            return
        log.warning("the group %s falls apart: %s", list(before.executor.formation.members), reason)
        for link in before.links:
            link.send(messages.GroupEnded(group=before.executor.group, reason=reason))
        self.change.withdraw(reason)
        self._leave(before)
        before.executor.fall_apart()
        self.on_regrouped((), f"the group fell apart: {reason}")

    def _leave(self, before: CurrentGroup) -> None:
        before.close()
        self.change.cancel()
        self._current = None
        self.local.instance.use(self.local.instance.local_executor)
        self.post(lambda: None)  # a morph that waits for it is due, and nothing else wakes an idle engine

    # ----------------------------------------------------------------------------- messages of other workers

    def _take(self, link: Link, message: messages.GroupMessage) -> None:
        change, current = self.change, self._current
        coordinator = current.executor.coordinator if current else None
        group = current.executor.group if current else ""
        match message:
            case messages.Prepare():
                change.receive_prepare(link, message)
            case messages.Vote() | messages.RendezvousDone() | messages.JoinRendezvous() | messages.Abort():
                change.receive(link, message)
            case messages.RendezvousAhead() if self.worker in message.members:
                self._ahead.join(message)
            case messages.Commit() if change.is_prepared(link, message.group):
                self._enter(message.blocks)
            case messages.LeadSubgroup() if current:  # may come before Prepare
                change.receive_subgroup_leader(link, message.group)
            case messages.Ready() if coordinator and message.group == group:
                coordinator.take(message)
            case messages.Ready():
                self._early = [*self._early[-MAX_EARLY:], message]
            case messages.Step() if current and link is current.links.leader and message.group == group:
                current.executor.called = message
            case messages.RequestSplit() if coordinator:
                self.on_split_requested()
            case messages.GroupEnded() if self._is_of_group(link):
                self._lose(link, f"a member left: {message.reason}")
            case messages.GroupEnded():
                change.lose(link, message.reason, said_so=True)
            case _:
                log.debug("ignored %s of %s, which is out of date", type(message).__name__, message.group)

    def _rendezvous_ended(self, rendezvous: str, made: Communicator | str) -> None:
        if not self._ahead.end(rendezvous, made):
            self.change.end_rendezvous(rendezvous, made)

    def _lost(self, link: Link, reason: str) -> None:
        if self._is_of_group(link):
            self._lose(link, f"a member was lost: {reason}")
        else:
            self.change.lose(link, reason)

    def _lose(self, link: Link, reason: str) -> None:
        """Leave the group, unless the member that is lost has made its final step, which is no loss."""
        if self.executor and self.executor.is_in_last_step:
            self._losses.append((link, reason))
        else:
            self.fall_apart(reason)

    def _is_of_group(self, link: Link) -> bool:
        """Return whether `link` belongs to this group or to the group that it splits into."""
        return self._current is not None and (
            self._current.links.has(link) or self.change.has_subgroup_link(link)
        )

"""The group that this worker is in, if any, and how it comes to be in another.

Owned by the engine's thread.

`TwoPhaseCommit` decides on a change, `TensorParallelExecutor` runs the steps of a group. Here one follows
from the other: a worker enters a group, a group becomes a subgroup of a larger one, or splits into smaller
ones; after any failure its members are alone again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from worker.distributed.communicator import Communicator
from worker.distributed.messages import (
    Abort,
    Commit,
    EnterGroup,
    GroupEnded,
    GroupMessage,
    JoinRendezvous,
    LeadSubgroup,
    Peer,
    Prepare,
    Ready,
    RendezvousAhead,
    RendezvousDone,
    RequestSplit,
    Step,
    Vote,
)
from worker.distributed.rendezvous import AheadRendezvous, CommunicatorPool
from worker.distributed.transport import Link, Transport
from worker.memory import OutOfBlocks
from worker.parallel.block_share import BlockShare
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance
from worker.parallel.member import Member
from worker.parallel.proposal import PeerLinks, Proposal
from worker.parallel.two_phase_commit import NextGroup, TwoPhaseCommit

log = logging.getLogger(__name__)

MAX_EARLY = 64  # Ready messages that come before this leader has entered


@dataclass(slots=True)
class CurrentGroup:
    """The group that a worker is in now, and its links."""

    executor: TensorParallelExecutor
    key: str  # of its communicator
    rendezvous: str  # that made it
    peers: dict[str, Peer]
    links: PeerLinks
    former: list[Link]  # of the groups that became this one

    def tell_end(self, reason: str) -> None:
        """Tell the other members that this worker leaves the group."""
        for link in self.links:
            link.send(GroupEnded(group=self.executor.group, reason=reason))

    def close(self) -> None:
        """Close the links, and those of the groups before.

        Closed earlier, they would look like a loss to a member that has not entered yet, or not made the
        last step.
        """
        self.links.close()
        for link in self.former:
            link.close()
        self.former = []


class Grouping:
    """Links and rendezvous call back in threads of their own; `post` brings the calls into the engine's."""

    def __init__(
        self,
        worker: str,
        local: LocalInstance,
        transport: Transport,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
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
        self._clock = clock
        self._links = transport.endpoint(
            GroupMessage,
            lambda link, message, payload: self.post(lambda: self._take(link, message)),
            lambda link, reason: self.post(lambda: self._lost(link, reason)),
        )
        self._communicators = CommunicatorPool(
            transport.host,
            device,
            transport.timeout_s,
            lambda rendezvous, reason: self.post(lambda: self._rendezvous_ended(rendezvous, reason)),
        )
        self._ahead = AheadRendezvous(worker, self._links, self._communicators)
        self._current: CurrentGroup | None = None
        self._change = TwoPhaseCommit(
            worker,
            local,
            self._links,
            self._communicators,
            lambda: (self.executor, self._current.links if self._current else PeerLinks()),
            lambda: self.why_not() or self.busy_with,
        )
        self._early: list[Ready] = []  # of members that entered before this leader
        self._losses: list[tuple[Link, str]] = []  # seen before this worker made the group's last step

    @property
    def executor(self) -> TensorParallelExecutor | None:
        return self._current.executor if self._current else None

    @property
    def peers(self) -> dict[str, Peer]:
        """The members of the group that this worker is in."""
        return self._current.peers if self._current else {}

    @property
    def busy_with(self) -> str:
        """Why no other morph may begin here now; empty: it may."""
        if self._change.is_under_way:
            return "its degree of tensor parallelism is about to change"
        if self.executor and not self.executor.formation.is_uniform:
            return "its degree of tensor parallelism is changing"
        return ""

    def close(self) -> None:
        """Leave: the others go on alone."""
        self._links.close()
        self._communicators.close()

    def request_split(self) -> None:
        """Ask the leader to split the group, since this worker is about to leave.

        The request may be refused, or come too late: repeat it.
        """
        if self._current and self._current.executor.coordinator:
            self.on_split_requested()
        elif self._current:
            self._current.links.tell_leader(RequestSplit(group=self._current.executor.group))

    # ----------------------------------------------------------------------------- the coordinator

    def propose(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Proposal:
        """Ask all members for their votes (`TwoPhaseCommit.propose`).

        Raises KeyError for a member without a peer.
        """
        return self._change.propose(group, formation, peers)

    def call_rendezvous(self, proposal: Proposal) -> None:
        """Let the members make the communicators that are needed, once all have voted."""
        self._change.call_rendezvous(proposal)

    def prepare_communicator(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """Make the communicator of a group that may form later, unless it is kept already."""
        if not self.executor and not self.busy_with:
            self._ahead.call(members, peers)

    def commit(self, proposal: Proposal, blocks: int) -> None:
        """Enter the group, and let the others enter, each at its next boundary.

        `executor` is the new one then.
        """
        self._enter(blocks)
        if self.executor:  # else it cannot
            self._change.send_commit(proposal, blocks)

    def abort(self, proposal: Proposal, reason: str) -> None:
        """Give the change up; all members go on as before."""
        self._change.abort(proposal, reason)

    def break_up(self, reason: str) -> None:
        """End the group: its members serve alone."""
        self._fall_apart(reason)

    # ----------------------------------------------------------------------------- at every boundary

    def _after_step(self) -> None:
        """Go from one group to the next where the step just made was the last one in it."""
        current = self._current
        assert current is not None
        if current.executor.enters_next:
            self._enter_next(current)
        elif current.executor.is_over:
            self._part(current)
        losses, self._losses = self._losses, []
        for link, reason in losses:
            if self._is_of_group(link):
                self._fall_apart(reason)

    # ----------------------------------------------------------------------------- from one to the next

    def _enter(self, blocks: int) -> None:
        """Enter at once if this worker is alone; a group enters when its members are at the same step."""
        if self.executor:
            assert self.executor.coordinator
            self.executor.coordinator.add(EnterGroup(blocks=blocks))
            return
        try:
            high = self._change.take_communicator()
            pages, share = self.local.cache.pages_per_layer, self.local.enter_group(blocks)
        except (KeyError, OutOfBlocks) as error:
            self._change.withdraw(f"{self.worker} cannot enter: {error}")
            return
        self._join(self._change.finish_entering(), high, None, share, pages, [])

    def _enter_next(self, before: CurrentGroup) -> None:
        """Enter the larger group: all members of this one have made the same last step.

        If the coordinator is gone by now, not all members may know it, so this group cannot go on either.
        """
        try:
            high = self._change.take_communicator()
        except KeyError:
            self._fall_apart("the larger group does not come about")
            return
        member, to = before.executor.member, self._change.finish_entering()
        still_open = [link for link in before.links.others.values() if not to.links.has(link)]
        former = before.former + still_open
        self._join(to, high, member.high, member.share, member.pages_alone, former)

    def _part(self, before: CurrentGroup) -> None:
        """Go on alone, or in a smaller group."""
        member, formation = before.executor.member, before.executor.formation
        self._communicators.keep(before.key, before.rendezvous, member.high)
        if formation.low == 1:
            self._leave(before)
            self.on_regrouped((), "the group has parted")
            return
        before.close()
        assert member.low
        to = self._change.finish_split()
        self._join(to, member.low, None, member.share, member.pages_alone, [])
        self.on_regrouped(to.formation.members, "the group has parted")

    def _join(
        self,
        to: NextGroup,
        high: Communicator,
        low: Communicator | None,
        share: BlockShare,
        pages_alone: int,
        former: list[Link],
    ) -> None:
        rank = to.formation.members.index(self.worker)
        executor = TensorParallelExecutor(
            to.group,
            Member(
                to.formation, rank, self.local, high, low, share, pages_alone, self._clock, self.on_progress
            ),
            send=to.links.tell_leader,
            broadcast=to.links.tell_others,
            on_settled=lambda: self.on_regrouped(to.formation.members, "all layers have their new degree"),
            after_step=self._after_step,
            on_failed=self._fail,
        )
        self.local.instance.use(executor)
        self.post(lambda: None)  # its first step is due
        self._current = CurrentGroup(executor, to.key, to.rendezvous, to.peers, to.links, former)
        for ready in self._early:
            if executor.coordinator and ready.group == to.group:
                executor.coordinator.take(ready)
        self._early = []
        if to.lost:  # since the last look: no other message will say so
            self._fall_apart(f"a member was lost: {to.lost}")

    def _fall_apart(self, reason: str) -> None:
        before = self._current
        if before is None:
            return
        log.warning("the group %s falls apart: %s", list(before.executor.formation.members), reason)
        before.tell_end(reason)
        self._change.withdraw(reason)
        self._leave(before)
        before.executor.fall_apart()
        self.on_regrouped((), f"the group fell apart: {reason}")

    def _leave(self, before: CurrentGroup) -> None:
        before.close()
        self._change.cancel()
        self._current = None
        self.local.instance.use(self.local.instance.local_executor)
        self.post(lambda: None)  # a morph that waits for it is due, and nothing else wakes an idle engine

    def _fail(self, reason: str) -> None:
        self._losses = []
        self._fall_apart(reason)

    # ----------------------------------------------------------------------------- messages of other workers

    def _take(self, link: Link, message: GroupMessage) -> None:
        change, current = self._change, self._current
        match message:
            case Prepare():
                change.receive_prepare(link, message)
            case Vote() | RendezvousDone() | JoinRendezvous() | Abort():
                change.receive(link, message)
            case RendezvousAhead() if self.worker in message.members:
                self._ahead.join(message)
            case Commit() if change.is_prepared(link, message.group):
                self._enter(message.blocks)
            case LeadSubgroup() if current:  # it may come before Prepare
                change.receive_subgroup_leader(link, message.group)
            case Ready() if (
                current and current.executor.coordinator and current.executor.group == message.group
            ):
                current.executor.coordinator.take(message)
            case Ready():
                self._early = [*self._early[-MAX_EARLY:], message]
            case Step() if (
                current and link is current.links.leader and message.group == current.executor.group
            ):
                current.executor.take_step(message)
            case RequestSplit() if current and current.executor.coordinator:
                self.on_split_requested()
            case GroupEnded() if self._is_of_group(link):
                self._lose(link, f"a member left: {message.reason}")
            case GroupEnded():
                change.lose(link, message.reason, said_so=True)
            case _:
                log.debug("ignored %s of %s, which is out of date", type(message).__name__, message.group)

    def _rendezvous_ended(self, rendezvous: str, reason: str) -> None:
        if not self._ahead.end(rendezvous, reason):
            self._change.end_rendezvous(rendezvous, reason)

    def _lost(self, link: Link, reason: str) -> None:
        if self._is_of_group(link):
            self._lose(link, f"a member was lost: {reason}")
        else:
            self._change.lose(link, reason)

    def _lose(self, link: Link, reason: str) -> None:
        """Leave the group, since a member is lost.

        A member that disconnects after its final step left normally.
        """
        if self.executor and self.executor.is_in_last_step:
            self._losses.append((link, reason))
        else:
            self._fall_apart(reason)

    def _is_of_group(self, link: Link) -> bool:
        """Return whether `link` belongs to this group or to the group that it splits into."""
        return self._current is not None and (
            self._current.links.has(link) or self._change.has_subgroup_link(link)
        )

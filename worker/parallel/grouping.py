"""The group of this worker: none, one being prepared, or one that it is in. The engine's thread owns it.

`Assembly` brings workers together, and `TensorParallelExecutor` runs their steps. This module goes from one
to the other: a worker enters, a group becomes a subgroup of a larger one, or parts into smaller ones. After
any failure the members serve alone again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from worker.distributed.communicator import Communicator
from worker.distributed.messages import (
    Abort,
    Commit,
    EnterNext,
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
from worker.distributed.rendezvous import Meetings
from worker.distributed.transport import Link, Transport
from worker.memory import OutOfBlocks
from worker.parallel.ahead import MeetingsAhead
from worker.parallel.assembly import Assembly, Destination
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.gathering import Gathering
from worker.parallel.member import Member
from worker.parallel.place import Place
from worker.parallel.present import Present
from worker.parallel.share import BlockShare
from worker.parallel.ties import PeerLinks

log = logging.getLogger(__name__)

MAX_EARLY = 64  # Readies that came before this leader has entered


class Grouping:
    """Links and meetings call back in threads of their own; `post` brings that into the engine's."""

    def __init__(
        self,
        worker: str,
        place: Place,
        transport: Transport,
        *,
        device: str = "cpu",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker, self.place = worker, place
        self.post: Callable[[Callable[[], None]], None] = lambda call: call()
        # Members in the order of their shards, the leader first, or nobody else; and why.
        self.on_regrouped: Callable[[tuple[str, ...], str], None] = lambda members, why: None
        # A member leaves: the leader should let the group part.
        self.on_part_please: Callable[[], None] = lambda: None
        # In the middle of what takes long, and is no hang.
        self.on_progress: Callable[[], None] = lambda: None
        self.why_not: Callable[[], str] = lambda: ""  # what else would be in the way of a change, if anything
        self._clock = clock
        self._links = transport.endpoint(
            GroupMessage,
            lambda link, message, payload: self.post(lambda: self._take(link, message)),
            lambda link, reason: self.post(lambda: self._lost(link, reason)),
        )
        self._meetings = Meetings(
            transport.host,
            device,
            transport.timeout_s,
            lambda meeting, reason: self.post(lambda: self._met(meeting, reason)),
        )
        self._ahead = MeetingsAhead(worker, self._links, self._meetings)
        self._present: Present | None = None
        self._assembly = Assembly(
            worker,
            place,
            self._links,
            self._meetings,
            lambda: (self.party, self._present.ties if self._present else PeerLinks()),
            lambda: self.why_not() or self.busy_with,
        )
        self._early: list[Ready] = []  # of members that have entered before this leader has
        self._losses: list[tuple[Link, str]] = []  # that came before the group's last step was made here

    @property
    def party(self) -> TensorParallelExecutor | None:
        return self._present.party if self._present else None

    @property
    def peers(self) -> dict[str, Peer]:
        """Of the group that this worker is in."""
        return self._present.peers if self._present else {}

    @property
    def busy_with(self) -> str:
        """Why no other morph may begin here now; empty: it may."""
        if self._assembly.is_under_way:
            return "its degree of tensor parallelism is about to change"
        if self.party and not self.party.formation.is_uniform:
            return "its degree of tensor parallelism is changing"
        return ""

    def close(self) -> None:
        """Leave: the others go on alone."""
        self._links.close()
        self._meetings.close()

    def ask_to_part(self) -> None:
        """This worker is about to leave. What was asked may be refused, or come too late: ask again."""
        if self._present and self._present.party.coordinator:
            self.on_part_please()
        elif self._present:
            self._present.ties.tell_leader(RequestSplit(group=self._present.party.group))

    # ----------------------------------------------------------------------------- the leader's verbs

    def gather(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Gathering:
        """Ask all members. Raises KeyError for one that is not among the peers; then nobody was asked. Of one
        that cannot be reached the gathering tells (`lost`)."""
        return self._assembly.gather(group, formation, peers)

    def meet(self, gathering: Gathering) -> None:
        """All have answered: make the communicators that are needed, unless all have kept them."""
        self._assembly.meet(gathering)

    def meet_ahead(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """Make the communicator of a group that may form some day, unless it is there."""
        if not self.party and not self.busy_with:
            self._ahead.call(members, peers)

    def enter(self, gathering: Gathering, blocks: int) -> None:
        """All have met: from the next boundary of each subgroup on they are one group. `party` is the new one
        then."""
        self._enter(blocks)
        if self.party:  # else it cannot
            self._assembly.order_to_enter(gathering, blocks)

    def dismiss(self, gathering: Gathering, reason: str) -> None:
        """It does not come about; everybody goes on as before."""
        self._assembly.dismiss(gathering, reason)

    def break_up(self, reason: str) -> None:
        """The group must not go on: its members serve alone."""
        self._fall_apart(reason)

    # ----------------------------------------------------------------------------- at every boundary

    def _after_step(self) -> None:
        """Go from one group to the next where the step just made was the last one in it."""
        present = self._present
        assert present is not None
        if present.party.enters_next:
            self._enter_next(present)
        elif present.party.is_over:
            self._part(present)
        losses, self._losses = self._losses, []
        for link, reason in losses:
            if self._is_of_group(link):
                self._fall_apart(reason)

    # ----------------------------------------------------------------------------- from one to the next

    def _enter(self, blocks: int) -> None:
        """Now, if it is alone; a group enters when its members are at the same step."""
        if self.party:
            assert self.party.coordinator
            self.party.coordinator.add(EnterNext(blocks=blocks))
            return
        try:
            high = self._assembly.communicator()
            pages, share = self.place.cache.pages_per_layer, self.place.enter_with(blocks)
        except (KeyError, OutOfBlocks) as error:
            self._assembly.decline(f"{self.worker} cannot enter: {error}")
            return
        self._join(self._assembly.enter(), high, None, share, pages, [])

    def _enter_next(self, before: Present) -> None:
        """The whole of this group has made the same last step. Whoever was to lead may be gone by now, and
        this group's members may not all know it: they cannot go on as before either."""
        try:
            high = self._assembly.communicator()
        except KeyError:
            self._fall_apart("the larger group does not come about")
            return
        member, to = before.party.member, self._assembly.enter()
        still_open = [link for link in before.ties.others.values() if not to.ties.has(link)]
        former = before.former + still_open
        self._join(to, high, member.high, member.share, member.pages_alone, former)

    def _part(self, before: Present) -> None:
        """Alone, or into a smaller group."""
        member, formation = before.party.member, before.party.formation
        self._meetings.keep(before.key, before.meeting, member.high)
        if formation.low == 1:
            self._leave(before)
            self.on_regrouped((), "the group has parted")
            return
        before.close()
        assert member.low
        to = self._assembly.part()
        self._join(to, member.low, None, member.share, member.pages_alone, [])
        self.on_regrouped(to.formation.members, "the group has parted")

    def _join(
        self,
        to: Destination,
        high: Communicator,
        low: Communicator | None,
        share: BlockShare,
        pages_alone: int,
        former: list[Link],
    ) -> None:
        rank = to.formation.members.index(self.worker)
        party = TensorParallelExecutor(
            to.group,
            Member(
                to.formation, rank, self.place, high, low, share, pages_alone, self._clock, self.on_progress
            ),
            send=to.ties.tell_leader,
            broadcast=to.ties.tell_others,
            on_settled=lambda: self.on_regrouped(to.formation.members, "all layers have their new degree"),
            after_step=self._after_step,
            on_failed=self._fail,
        )
        self.place.instance.use(party)
        self.post(lambda: None)  # its first step is due
        self._present = Present(party, to.key, to.meeting, to.peers, to.ties, former)
        for ready in self._early:
            if party.coordinator and ready.group == to.group:
                party.coordinator.take(ready)
        self._early = []
        if to.lost:  # since it was last looked at: nobody would tell again
            self._fall_apart(f"a member was lost: {to.lost}")

    def _fall_apart(self, reason: str) -> None:
        before = self._present
        if before is None:
            return
        log.warning("the group %s falls apart: %s", list(before.party.formation.members), reason)
        before.say_bye(reason)
        self._assembly.decline(reason)
        self._leave(before)
        before.party.fall_apart()
        self.on_regrouped((), f"the group fell apart: {reason}")

    def _leave(self, before: Present) -> None:
        before.close()
        self._assembly.call_off()
        self._present = None
        self.place.instance.use(self.place.instance.local_executor)
        self.post(lambda: None)  # a morph that waits for it is due, and nothing else wakes an idle engine

    def _fail(self, reason: str) -> None:
        self._losses = []
        self._fall_apart(reason)

    # ----------------------------------------------------------------------------- what others say

    def _take(self, link: Link, message: GroupMessage) -> None:
        assembly, present = self._assembly, self._present
        match message:
            case Prepare():
                assembly.consider(link, message)
            case Vote() | RendezvousDone() | JoinRendezvous() | Abort():
                assembly.take(link, message)
            case RendezvousAhead() if self.worker in message.members:
                self._ahead.come(message)
            case Commit() if assembly.is_standing_by(link, message.group):
                self._enter(message.blocks)
            case LeadSubgroup() if present:  # it may be here before the invitation
                assembly.follow(link, message.group)
            case Ready() if present and present.party.coordinator and present.party.group == message.group:
                present.party.coordinator.take(message)
            case Ready():
                self._early = [*self._early[-MAX_EARLY:], message]
            case Step() if present and link is present.ties.leader and message.group == present.party.group:
                present.party.take_step(message)
            case RequestSplit() if present and present.party.coordinator:
                self.on_part_please()
            case GroupEnded() if self._is_of_group(link):
                self._lose(link, f"a member left: {message.reason}")
            case GroupEnded():
                assembly.lose(link, message.reason, said_so=True)
            case _:
                log.debug("nobody waits for this %s of %s", type(message).__name__, message.group)

    def _met(self, meeting: str, reason: str) -> None:
        if not self._ahead.end(meeting, reason):
            self._assembly.met(meeting, reason)

    def _lost(self, link: Link, reason: str) -> None:
        if self._is_of_group(link):
            self._lose(link, f"a member was lost: {reason}")
        else:
            self._assembly.lose(link, reason)

    def _lose(self, link: Link, reason: str) -> None:
        """One of the group; whoever made its last step a moment before this worker is not lost."""
        if self.party and self.party.is_in_last_step:
            self._losses.append((link, reason))
        else:
            self._fall_apart(reason)

    def _is_of_group(self, link: Link) -> bool:
        """Or of the smaller one that it becomes."""
        return self._present is not None and (self._present.ties.has(link) or self._assembly.has_tie(link))

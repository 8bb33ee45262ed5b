"""Coming together into a group, and making ready to part from one.

It takes three rounds, so that nobody waits inside of a step for one that does not come: the leader asks, and
whoever can come stands by and goes on as it is; those that have no communicator yet make it; then all are
told to enter, which each does at its next boundary. Until that last word everything can be called off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from worker.distributed.communicator import Communicator
from worker.distributed.messages import (
    Abort,
    Commit,
    GroupEnded,
    GroupMessage,
    JoinRendezvous,
    LeadSubgroup,
    Peer,
    Prepare,
    RendezvousDone,
    Vote,
)
from worker.distributed.rendezvous import Meetings, key_of, new_meeting
from worker.distributed.transport import Endpoint, Link
from worker.parallel.answering import answer
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.gathering import Gathering, StandingBy
from worker.parallel.place import Place
from worker.parallel.ties import PeerLinks


@dataclass(frozen=True, slots=True)
class Destination:
    """What its members are about to be in. `lost`: one of them is gone already, says the leader."""

    group: str
    formation: Formation
    key: str  # of its communicator
    meeting: str
    peers: dict[str, Peer]
    ties: PeerLinks
    lost: str = ""


class Assembly:
    """At most one at a time: this worker leads it (`gathering`) or stands by for it."""

    def __init__(
        self,
        worker: str,
        place: Place,
        links: Endpoint[GroupMessage],
        meetings: Meetings,
        now: Callable[[], tuple[TensorParallelExecutor | None, PeerLinks]],
        in_the_way: Callable[[], str],
    ) -> None:
        """now: the group that this worker is in, and the links of it. in_the_way: why no change may begin."""
        self.worker, self.place = worker, place
        self._links, self._meetings, self._now, self._in_the_way = links, meetings, now, in_the_way
        self._gathering: Gathering | None = None
        self._standing_by: StandingBy | None = None
        self._parting = PeerLinks()  # of the smaller group that this one is to become
        self._has_met, self._meeting = False, ""  # whose communicator is the one to enter with

    @property
    def is_under_way(self) -> bool:
        return self._coming is not None

    # ----------------------------------------------------------------------------- the leader's

    def gather(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Gathering:
        """Ask all members. Raises KeyError for one that is not among the peers; then nobody was asked. Of one
        that cannot be reached the gathering tells (`lost`)."""
        members = {name: peers[name] for name in formation.members}
        known = self._now()[1].others
        links = {
            name: known.get(name) or self._links.connect(peer.address, peer.key)
            for name, peer in members.items()
            if name != self.worker
        }
        invite = Prepare(
            group=group,
            leader=self.worker,
            model=self.place.name,
            members=list(formation.members),
            low=formation.low,
            grows=formation.grows,
            peers=members,
            shape=self.place.instance.shape,
        )
        self._gathering = gathering = Gathering(invite, formation, links)
        gathering.answers[self.worker] = answer = self._answer(invite, formation)
        self._has_met, self._meeting = False, answer.meeting
        self._prepare_to_lead(invite, formation)
        for link in links.values():
            link.send(invite)
        return gathering

    def meet(self, gathering: Gathering) -> None:
        """All have answered: make the communicators that are needed, unless all have kept them."""
        formation = gathering.formation
        kept = {answer.meeting for answer in gathering.answers.values()}
        if (not formation.grows and formation.low == 1) or (len(kept) == 1 and "" not in kept):
            gathering.met = dict.fromkeys(formation.members, "")
            return
        order = JoinRendezvous(group=gathering.group, meeting=new_meeting(), store=self._meetings.store)
        gathering.is_meeting = True
        for link in gathering.links.values():
            link.send(order)
        self._come_to(order)

    def dismiss(self, gathering: Gathering, reason: str) -> None:
        """It does not come about; everybody goes on as before."""
        self._gathering = None
        gathering.lost = gathering.lost or reason
        if gathering.has_met_in_part:  # then the next meeting is for all again
            self._meetings.forget(self._key(gathering.invite, gathering.formation))
        known = self._now()[1].others
        for name, link in gathering.links.items():
            link.send(Abort(group=gathering.group, reason=reason))
            if name not in known:
                link.close()
        self._forget_parting(gathering.group, reason)

    # ----------------------------------------------------------------------------- what others say

    def consider(self, link: Link, invite: Prepare) -> None:
        formation = self._formation(invite)
        answer = self._answer(invite, formation)
        if not answer.reason:
            self._standing_by = StandingBy(invite, formation, link)
            self._has_met, self._meeting = False, answer.meeting
            self._prepare_to_lead(invite, formation)
        link.send(answer)

    def take(self, link: Link, message: Vote | RendezvousDone | JoinRendezvous | Abort) -> None:
        """What belongs to no gathering or standing by of now is out of date."""
        match message:
            case Vote() if self._is_gathering(message.group):
                self._the_gathering.answers[message.worker] = message
            case RendezvousDone() if self._is_gathering(message.group):
                self._the_gathering.met[message.worker] = message.reason
            case JoinRendezvous() if self.is_standing_by(link, message.group):
                self._come_to(message)
            case Abort() if self.is_standing_by(link, message.group):
                self._standing_by = None
                self._forget_parting(message.group, message.reason)
            case Abort() if link is self._parting.leader:
                self._parting.leader = None

    def follow(self, link: Link, group: str) -> None:
        """Over it the leader of the smaller group will speak; that may be here before the invitation, or
        after another one."""
        if self._standing_by is None or self._standing_by.invite.group == group:
            self._parting.leader = link
            self._tell_met()

    def met(self, meeting: str, reason: str) -> None:
        """It has ended, well or not."""
        coming, (party, _) = self._coming, self._now()
        if coming is None or meeting != self._meeting:  # given up meanwhile
            self._meetings.drop(meeting)
            return
        if reason:
            self._say_met(reason)
            return
        communicator = self._meetings.made(meeting)
        if coming.invite.grows or party is None:
            self._meetings.keep(self._key(coming.invite, coming.formation), meeting, communicator)
        else:
            party.member.take_next_low(communicator)
        self._has_met = True
        self._tell_met()

    def lose(self, link: Link, reason: str, *, said_so: bool = False) -> None:
        """Somebody is gone, or has said that the group does not come about."""
        if self._standing_by and self._standing_by.link is link:
            self._standing_by = None
        elif self._gathering and (name := self._gathering.name_of(link)):
            self._gathering.lost = reason if said_so else f"{name}: {reason}"

    def is_standing_by(self, link: Link, group: str) -> bool:
        here = self._standing_by
        return here is not None and here.link is link and here.invite.group == group

    # ----------------------------------------------------------------------------- its end

    def order_to_enter(self, gathering: Gathering, blocks: int) -> None:
        """The first of each other subgroup, who takes the rest of it along."""
        formation = gathering.formation
        for name in formation.members[1 : formation.num_subgroups]:
            gathering.links[name].send(Commit(group=gathering.group, blocks=blocks))

    def communicator(self) -> Communicator:
        """Of the group to enter, taken. KeyError where its members have not met, or nothing is under way."""
        coming = self._coming
        if coming is None:
            raise KeyError("no group is to be entered")
        return self._meetings.take(self._key(coming.invite, coming.formation), self._meeting)

    def enter(self) -> Destination:
        """What is under way has come about."""
        coming, gathering, standing_by = self._coming, self._gathering, self._standing_by
        assert coming
        ties = PeerLinks(others=gathering.links) if gathering else PeerLinks()
        if standing_by:
            ties.leader = standing_by.link
        self._gathering = self._standing_by = None
        return Destination(
            coming.invite.group,
            coming.formation,
            self._key(coming.invite, coming.formation),
            self._meeting,
            coming.invite.peers,
            ties,
            gathering.lost if gathering else "",
        )

    def part(self) -> Destination:
        """Into this worker's subgroup."""
        coming, ties, self._parting = self._coming, self._parting, PeerLinks()
        assert coming
        self._gathering = self._standing_by = None
        invite, formation = coming.invite, coming.formation
        rank = formation.members.index(self.worker)
        return Destination(
            f"{invite.group}/{formation.subgroup(rank)}",
            formation.part(rank),
            self._key(invite, formation),
            self._meeting,
            invite.peers,
            ties,
        )

    def decline(self, reason: str) -> None:
        """Too late for a refusal: the others have entered."""
        if self._standing_by:
            self._standing_by.link.send(GroupEnded(group=self._standing_by.invite.group, reason=reason))
            self._standing_by = None
        elif self._gathering:
            self._gathering.lost = reason

    def call_off(self) -> None:
        """The group that was to become another one is no more, or nobody is asked any longer."""
        self._parting.close()
        self._gathering, self._standing_by, self._parting = None, None, PeerLinks()

    def has_tie(self, link: Link) -> bool:
        """To the smaller group that this one is to become."""
        return self._parting.has(link)

    # ----------------------------------------------------------------------------- meeting

    def _come_to(self, order: JoinRendezvous) -> None:
        coming = self._coming
        assert coming
        invite, formation = coming.invite, coming.formation
        rank = formation.members.index(self.worker)
        meeting, size = order.meeting, formation.size
        if not invite.grows:
            meeting, size = f"{meeting}/{formation.subgroup(rank)}", formation.low
            rank = formation.low_shard(rank).rank
        self._has_met, self._meeting = False, meeting
        self._meetings.begin(meeting, order.store, rank, size)

    def _tell_met(self) -> None:
        """When it has all that it needs to go on."""
        here = self._standing_by
        if here and not here.invite.grows and here.formation.low > 1:
            leads = here.formation.low_shard(here.formation.members.index(self.worker)).rank == 0
            if not leads and self._parting.leader is None:
                return
        if self._has_met:
            self._say_met("")

    def _say_met(self, reason: str) -> None:
        if self._gathering:
            self._gathering.met[self.worker] = reason
        elif self._standing_by:
            group = self._standing_by.invite.group
            self._standing_by.link.send(RendezvousDone(group=group, worker=self.worker, reason=reason))

    def _key(self, invite: Prepare, formation: Formation) -> str:
        """Of the communicator that is needed: of all, or of its subgroup."""
        if not invite.grows:
            formation = formation.part(formation.members.index(self.worker))
        return key_of(formation.members, invite.peers)

    # ----------------------------------------------------------------------------- details

    def _answer(self, invite: Prepare, formation: Formation) -> Vote:
        return answer(
            invite,
            formation,
            self.worker,
            self.place,
            self._now()[0],
            in_the_way="" if invite.leader == self.worker else self._in_the_way(),
            meeting=self._meetings.kept(self._key(invite, formation)) if invite.grows else "",
        )

    def _prepare_to_lead(self, invite: Prepare, formation: Formation) -> None:
        """Whoever leads a subgroup after the parting needs a link to each of its members."""
        rank = formation.members.index(self.worker)
        if invite.grows or formation.low == 1 or formation.low_shard(rank).rank > 0:
            return
        links = self._parting.others
        for name in formation.part(rank).members[1:]:
            if name not in links:  # else it was asked before, for a parting that did not come about
                peer = invite.peers[name]
                links[name] = self._links.connect(peer.address, peer.key)
            links[name].send(LeadSubgroup(group=invite.group))

    def _forget_parting(self, group: str, reason: str) -> None:
        """What was made ahead for smaller groups: the next order may be for others. Who was to follow is told
        over the same link: it may hear of its end before it hears of the leader's, or of this link only
        afterwards, and would take that for the loss of a member."""
        self._parting.tell_others(Abort(group=group, reason=reason))
        self._parting.close()
        self._parting = PeerLinks()
        if party := self._now()[0]:
            party.member.drop_next_low()

    @property
    def _coming(self) -> Gathering | StandingBy | None:
        return self._standing_by or self._gathering

    @property
    def _the_gathering(self) -> Gathering:
        assert self._gathering
        return self._gathering

    def _is_gathering(self, group: str) -> bool:
        return self._gathering is not None and self._gathering.group == group

    def _formation(self, invite: Prepare) -> Formation:
        return Formation(tuple(invite.members), invite.low, self.place.num_layers, invite.grows)

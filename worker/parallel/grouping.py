"""What this worker is in: no group, on its way into one, or in one. The engine's thread owns it.

Coming together takes three rounds, so that nobody waits inside of a step for one that does not come: the
leader asks, and whoever can come stands by and goes on alone; those that have no communicator yet make it;
then all are told to enter, which each does at its next boundary. Until that last word everything can be
called off.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bus.messages import LayerShape, Number
from worker.engine.instance import Output
from worker.memory import OutOfBlocks
from worker.morph.executor import FATAL
from worker.parallel.communicator import Communicator, PeerLost
from worker.parallel.formation import Formation
from worker.parallel.links import Link, Links
from worker.parallel.meetings import Meetings
from worker.parallel.party import Party
from worker.parallel.place import Place
from worker.parallel.share import BlockShare
from worker.parallel.wire import (
    Answer,
    Bye,
    Dismiss,
    Enter,
    EnterNext,
    Follow,
    Invite,
    Meet,
    MeetAhead,
    Messages,
    Met,
    PartPlease,
    Peer,
    Ready,
    Step,
)

log = logging.getLogger(__name__)

MAX_EARLY = 64  # Readies that came before this leader has entered


@dataclass(slots=True)
class Gathering:
    """The leader's: who was asked, and what they said."""

    invite: Invite
    formation: Formation
    links: dict[str, Link]  # of the others
    answers: dict[str, Answer] = field(default_factory=dict)
    met: dict[str, str] = field(default_factory=dict)  # why not; "": it has met the others
    lost: str = ""  # somebody is gone

    @property
    def group(self) -> str:
        return self.invite.group

    @property
    def silent(self) -> list[str]:
        return [name for name in self.formation.members if name not in self.answers]

    @property
    def refusals(self) -> list[str]:
        said = [f"{name}: {answer.reason}" for name, answer in self.answers.items() if answer.reason]
        return said + [f"{name}: {reason}" for name, reason in self.met.items() if reason]

    @property
    def has_met(self) -> bool:
        return all(name in self.met for name in self.formation.members)


@dataclass(slots=True)
class _StandingBy:
    """A member's: invited, and it will come."""

    invite: Invite
    link: Link


class Grouping:
    """`links` and `meetings` call back in threads of their own; `post` brings that into the engine's."""

    def __init__(
        self,
        worker: str,
        place: Place,
        *,
        host: str = "127.0.0.1",
        device: str = "cpu",
        timeout_s: float = 20.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OSError where the host cannot be listened on."""
        self.worker, self.place = worker, place
        self.party: Party | None = None
        self.post: Callable[[Callable[[], None]], None] = lambda call: call()
        # Members in the order of their shards, the leader first, or nobody else; and why.
        self.on_regrouped: Callable[[tuple[str, ...], str], None] = lambda members, why: None
        # A member leaves: the leader should let the group part.
        self.on_part_please: Callable[[], None] = lambda: None
        self.peers: dict[str, Peer] = {}  # of the group that this worker is in
        self.why_not: Callable[[], str] = lambda: ""  # what else would be in the way of a change, if anything
        self._clock = clock
        self._links = Links(
            host,
            timeout_s,
            lambda link, message: self.post(lambda: self._take(link, message)),
            lambda link, reason: self.post(lambda: self._lost(link, reason)),
        )
        self._meetings = Meetings(
            host, device, timeout_s, lambda name, reason: self.post(lambda: self._met(name, reason))
        )
        self._gathering: Gathering | None = None
        self._standing_by: _StandingBy | None = None
        self._members: dict[str, Link] = {}  # the leader's
        self._leader: Link | None = None  # a member's
        self._next_members: dict[str, Link] = {}  # when the group has parted into smaller ones
        self._next_leader: Link | None = None
        self._key = ""  # of the present group's communicator
        self._ahead: dict[str, str] = {}  # meetings of groups that may be: what they are called, and the key
        self._courtesies: dict[str, list[Link]] = {}  # over which others were asked to these
        self._former: list[Link] = []  # of the groups that became this one
        self._early: list[Ready] = []  # of members that have entered before this leader has
        self._losses: list[tuple[Link, str]] = []  # that came before the group's last step was made here
        self._has_met, self._met_as = False, ""

    @property
    def address(self) -> str:
        return self._links.address

    @property
    def link_key(self) -> bytes:
        return self._links.key

    @property
    def busy_with(self) -> str:
        """Why no other morph may begin here now; empty: it may."""
        if self._standing_by or self._gathering:
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
        if self.party and self.party.chair:
            self.on_part_please()
        elif self.party and self._leader:
            self._leader.send(PartPlease(group=self.party.group))

    # ----------------------------------------------------------------------------- the leader's verbs

    def gather(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Gathering:
        """Ask all members. Raises KeyError for one that is not among the peers; then nobody was asked. Of one
        that cannot be reached the gathering tells (`lost`)."""
        links: dict[str, Link] = {}
        try:
            for peer in (peers[name] for name in formation.members if name != self.worker):
                known = self._members.get(peer.worker)
                links[peer.worker] = known or self._links.connect(peer.address, peer.key)
        except KeyError:
            self._close_new(links)
            raise
        invite = Invite(
            group=group,
            leader=self.worker,
            model=self.place.name,
            members=list(formation.members),
            low=formation.low,
            grows=formation.grows,
            peers={name: peers[name] for name in formation.members},
            shape=self.place.instance.shape,
        )
        self._gathering = gathering = Gathering(invite, formation, links)
        gathering.answers[self.worker] = self._answer(invite)
        self._prepare_to_lead(invite)
        for link in links.values():
            link.send(invite)
        return gathering

    def meet(self, gathering: Gathering) -> None:
        """All have answered: make the communicators that are needed, unless all have kept them."""
        formation = gathering.formation
        if (not formation.grows and formation.low == 1) or all(
            answer.has_met for answer in gathering.answers.values()
        ):
            gathering.met = dict.fromkeys(formation.members, "")
            return
        order = Meet(group=gathering.group, store=self._meetings.store)
        for link in gathering.links.values():
            link.send(order)
        self._meet(gathering.invite, order.store)

    def meet_ahead(self, members: Sequence[str], peers: Mapping[str, Peer]) -> None:
        """Make the communicator of a group that may form some day, unless it is there: that takes a moment,
        which a transformation saves then."""
        key = _key(members, peers)
        if self.party or self.busy_with or self._meetings.has(key) or key in self._ahead.values():
            return
        order = MeetAhead(
            group=f"ahead {uuid.uuid4().hex[:8]}",
            members=list(members),
            peers={name: peers[name] for name in members},
            store=self._meetings.store,
        )
        others = [peers[name] for name in members if name != self.worker]
        links = [self._links.connect(peer.address, peer.key) for peer in others]
        for link in links:
            link.send(order)
        self._courtesies[order.group] = links
        self._come_ahead(order)

    def _come_ahead(self, order: MeetAhead) -> None:
        self._ahead[order.group] = _key(order.members, order.peers)
        rank = order.members.index(self.worker)
        self._meetings.begin(order.group, order.store, rank, len(order.members))

    def enter(self, gathering: Gathering, blocks: int) -> None:
        """All have met: from the next boundary of each subgroup on they are one group. `party` is the new one
        then."""
        formation = gathering.formation
        order = Enter(group=gathering.group, blocks=blocks)
        for rank in range(formation.num_subgroups if formation.low > 1 else formation.size):
            name = formation.members[rank]
            if name == self.worker:
                self._enter(blocks)
                if self.party is None:  # it cannot
                    return
            else:
                gathering.links[name].send(order)

    def dismiss(self, gathering: Gathering, reason: str) -> None:
        """It does not come about; everybody goes on as before."""
        self._gathering = None
        for link in gathering.links.values():
            link.send(Dismiss(group=gathering.group, reason=reason))
        self._close_new(gathering.links)
        self._forget_parting()

    def _forget_parting(self) -> None:
        """What was made ahead for smaller groups: the next order may be for others."""
        for link in self._next_members.values():
            link.close()
        self._next_members, self._next_leader = {}, None
        if self.party:
            self.party.drop_low()

    def _close_new(self, links: Mapping[str, Link]) -> None:
        for name, link in links.items():
            if name not in self._members:
                link.close()

    def break_up(self, reason: str) -> None:
        """The group must not go on: its members serve alone."""
        self._fall_apart(reason)

    # ----------------------------------------------------------------------------- at every boundary

    def tick(self, may_plan: bool) -> list[Output]:
        """The group's step, if it is called. A group that fails is left; the requests stay."""
        party = self.party
        assert party is not None
        try:
            party.tick(may_plan)
        except FATAL:
            raise
        except PeerLost as error:
            self._fall_apart(str(error))
        except Exception as error:
            log.exception("a step of the group failed")
            self._fall_apart(f"{type(error).__name__}: {error}")
        else:
            if party.enters_next:
                self._enter_next(party)
            elif party.is_over:
                self._parted(party)
        losses, self._losses = self._losses, []
        for link, reason in losses:
            if self._is_of_group(link):
                self._fall_apart(reason)
        return party.take_outputs()

    def _parted(self, party: Party) -> None:
        """Alone, or in a smaller group."""
        formation = party.formation
        self._meetings.keep(self._key, party.communicators[0])
        if formation.low == 1:
            self._leave()
            self.on_regrouped((), "the group has parted")
            return
        invite = self._gathering.invite if self._gathering else self._invite()
        self._former += self._members.values()
        self._close_former()
        self._members, self._next_members = self._next_members, {}
        self._leader, self._next_leader = self._next_leader, None
        self._gathering = self._standing_by = None
        part = formation.part(party.rank)
        group = f"{invite.group}/{formation.subgroup(party.rank)}"
        self._key = self._key_of(invite)
        self._begin(group, part, party.communicators[1], None, party.share, party.pages_alone)
        self.on_regrouped(part.members, "the group has parted")

    def _fall_apart(self, reason: str) -> None:
        party = self.party
        if party is None:
            return
        log.warning("the group %s falls apart: %s", list(party.formation.members), reason)
        for link in [*self._members.values(), *([self._leader] if self._leader else [])]:
            link.send(Bye(group=party.group, reason=reason))
        if self._standing_by:
            self._standing_by.link.send(Bye(group=self._standing_by.invite.group, reason=reason))
        self._leave()
        party.fall_apart()
        self.on_regrouped((), f"the group fell apart: {reason}")

    def _leave(self) -> None:
        for link in [*self._members.values(), *self._next_members.values()]:
            link.close()
        self._close_former()
        self.party, self._members, self._leader = None, {}, None
        self._next_members, self._next_leader = {}, None
        self._gathering = self._standing_by = None

    def _close_former(self) -> None:
        """Not before all have entered the next group, or know of the last step: else it looks like a loss."""
        for link in self._former:
            link.close()
        self._former = []

    # ----------------------------------------------------------------------------- what others say

    def _take(self, link: Link, message: Messages) -> None:
        match message:
            case Invite():
                self._consider(link, message)
            case Answer() if self._is_gathering(message):
                assert self._gathering
                self._gathering.answers[message.worker] = message
            case Met() if self._is_gathering(message):
                assert self._gathering
                self._gathering.met[message.worker] = message.reason
            case Meet() if self._is_standing_by(link, message):
                self._meet(self._invite(), message.store)
            case MeetAhead() if self.worker in message.members:
                self._come_ahead(message)
            case Enter() if self._is_standing_by(link, message):
                self._enter(message.blocks)
            case Follow() if self.party:  # it may be here before the invitation
                self._next_leader = link
                self._tell_met()
            case Dismiss() if self._is_standing_by(link, message):
                self._standing_by = None
                self._forget_parting()
            case Ready() if self.party and self.party.chair and self.party.group == message.group:
                self.party.chair.take(message)
            case Ready():
                self._early = [*self._early[-MAX_EARLY:], message]
            case Step() if self.party and link is self._leader and message.group == self.party.group:
                self.party.take_step(message)
            case PartPlease() if self.party and self.party.chair:
                self.on_part_please()
            case Bye() if self._is_of_group(link):
                self._lose(link, f"a member left: {message.reason}")
            case Bye() if self._gathering and link in self._gathering.links.values():
                self._gathering.lost = message.reason
            case _:
                log.debug("nobody waits for this %s of %s", type(message).__name__, message.group)

    def _consider(self, link: Link, invite: Invite) -> None:
        answer = self._answer(invite)
        if not answer.reason:
            self._standing_by = _StandingBy(invite, link)
            self._prepare_to_lead(invite)
        link.send(answer)

    def _answer(self, invite: Invite) -> Answer:
        formation = _formation(invite, self.place.num_layers)
        rank = formation.members.index(self.worker)
        reason = "" if invite.leader == self.worker else self.why_not() or self.busy_with
        if invite.model != self.place.name:
            reason = reason or f"it serves {self.place.name}, not {invite.model}"
        now = self.party.formation.members if self.party else (self.worker,)
        wanted = formation.part(rank).members if invite.grows else formation.members
        if now != wanted:
            reason = reason or f"it is at one with {', '.join(now)}, not with {', '.join(wanted)}"
        if invite.grows:
            reason = reason or what_differs(self.place.instance.shape, invite.shape, invite.leader)
        shard = formation.high_shard(rank) if invite.grows else formation.low_shard(rank)
        numbers: dict[str, Number] = {}
        try:
            numbers = self.place.numbers(shard, self.party.pages_alone if self.party else None)
        except ValueError as error:  # a degree that its weights are not laid out for
            reason = reason or str(error)
        return Answer(
            group=invite.group,
            worker=self.worker,
            reason=reason,
            has_met=invite.grows and self._meetings.has(self._key_of(invite)),
            numbers=numbers,
        )

    def _prepare_to_lead(self, invite: Invite) -> None:
        """Whoever leads a subgroup after the parting needs a link to each of its members."""
        formation = _formation(invite, self.place.num_layers)
        rank = formation.members.index(self.worker)
        if invite.grows or formation.low == 1 or formation.low_shard(rank).rank > 0:
            return
        for name in formation.part(rank).members[1:]:
            if (
                name not in self._next_members
            ):  # else it was asked before, for a parting that did not come about
                peer = invite.peers[name]
                self._next_members[name] = self._links.connect(peer.address, peer.key)
            self._next_members[name].send(Follow(group=invite.group))

    def _key_of(self, invite: Invite) -> str:
        """Of the communicator that is needed: of all, or of its subgroup."""
        formation = _formation(invite, self.place.num_layers)
        names = formation.members
        if not invite.grows:
            names = formation.part(names.index(self.worker)).members
        return _key(names, invite.peers)

    def _meet(self, invite: Invite, store: str) -> None:
        formation = _formation(invite, self.place.num_layers)
        rank = formation.members.index(self.worker)
        name, size = invite.group, formation.size
        if not invite.grows:
            name, size = f"{name}/{formation.subgroup(rank)}", formation.low
            rank = formation.low_shard(rank).rank
        self._has_met, self._met_as = False, name
        self._meetings.begin(name, store, rank, size)

    def _met(self, name: str, reason: str) -> None:
        for link in self._courtesies.pop(name, []):
            link.close()
        if key := self._ahead.pop(name, ""):
            if not reason:
                self._meetings.keep(key, self._meetings.take(name))
            return
        invite = self._gathering.invite if self._gathering else None
        if self._standing_by:
            invite = self._standing_by.invite
        if invite is None or name != self._met_as:  # given up meanwhile
            self._meetings.drop(name)
            return
        if reason:
            self._say_met(reason)
            return
        communicator = self._meetings.take(name)
        if invite.grows or self.party is None:
            self._meetings.keep(self._key_of(invite), communicator)
        else:
            self.party.take_low(communicator)
        self._has_met = True
        self._tell_met()

    def _tell_met(self) -> None:
        """When it has all that it needs to go on."""
        invite = self._standing_by.invite if self._standing_by else None
        if invite and not invite.grows and invite.low > 1:
            formation = _formation(invite, self.place.num_layers)
            leads = formation.low_shard(formation.members.index(self.worker)).rank == 0
            if not leads and self._next_leader is None:
                return
        if self._has_met:
            self._say_met("")

    def _say_met(self, reason: str) -> None:
        if self._gathering:
            self._gathering.met[self.worker] = reason
        elif self._standing_by:
            group = self._standing_by.invite.group
            self._standing_by.link.send(Met(group=group, worker=self.worker, reason=reason))

    def _invite(self) -> Invite:
        assert self._standing_by
        return self._standing_by.invite

    def _enter(self, blocks: int) -> None:
        """Now, if it is alone; a group enters when its members are at the same step."""
        if self.party:
            assert self.party.chair
            self.party.chair.add(EnterNext(blocks=blocks))
            return
        invite = self._gathering.invite if self._gathering else self._invite()
        try:
            communicator = self._meetings.take(self._key_of(invite))
            pages, share = self.place.cache.pages_per_layer, self.place.enter_with(blocks)
        except (KeyError, OutOfBlocks) as error:
            self._decline(f"{self.worker} cannot enter: {error}")
            return
        self._join(invite, communicator, None, share, pages)

    def _enter_next(self, party: Party) -> None:
        """The whole of this group has made the same last step. Whoever was to lead may be gone by now, and
        this group's members may not all know it: they cannot go on as before either."""
        coming = self._gathering or self._standing_by
        if coming is None or not self._meetings.has(self._key_of(coming.invite)):
            self._fall_apart("the larger group does not come about")
            return
        invite, low = coming.invite, party.communicators[0]
        self._join(invite, self._meetings.take(self._key_of(invite)), low, party.share, party.pages_alone)

    def _join(
        self, invite: Invite, high: Communicator, low: Communicator | None, share: BlockShare, pages: int
    ) -> None:
        self._key, self.peers = self._key_of(invite), invite.peers
        gathering = self._gathering
        if gathering:
            self._members, self._gathering = gathering.links, None
        elif self._standing_by:
            self._former += self._members.values()
            self._members, self._leader, self._standing_by = {}, self._standing_by.link, None
        self._begin(invite.group, _formation(invite, self.place.num_layers), high, low, share, pages)
        if gathering and gathering.lost:  # since it was last looked at: nobody would tell again
            self._fall_apart(f"a member was lost: {gathering.lost}")

    def _begin(
        self,
        group: str,
        formation: Formation,
        high: Communicator,
        low: Communicator | None,
        share: BlockShare,
        pages_alone: int,
    ) -> None:
        leader = self._leader
        self.party = Party(
            group,
            formation,
            formation.members.index(self.worker),
            self.place,
            high,
            low,
            share,
            pages_alone,
            send=lambda ready: leader.send(ready) if leader else None,
            broadcast=self._broadcast,
            on_settled=lambda: self.on_regrouped(formation.members, "all layers have their new degree"),
            clock=self._clock,
        )
        for ready in self._early:
            if self.party.chair and ready.group == group:
                self.party.chair.take(ready)
        self._early = []

    def _decline(self, reason: str) -> None:
        """Too late for a refusal: the others have entered."""
        if self._standing_by:
            self._standing_by.link.send(Bye(group=self._standing_by.invite.group, reason=reason))
            self._standing_by = None
        elif self._gathering:
            self._gathering.lost = reason

    def _broadcast(self, step: Step) -> None:
        for link in self._members.values():
            link.send(step)

    def _lost(self, link: Link, reason: str) -> None:
        if self._is_of_group(link):
            self._lose(link, f"a member was lost: {reason}")
        elif self._standing_by and self._standing_by.link is link:
            self._standing_by = None
        elif self._gathering and link in self._gathering.links.values():
            names = [name for name, each in self._gathering.links.items() if each is link]
            self._gathering.lost = f"{names[0]}: {reason}"

    def _lose(self, link: Link, reason: str) -> None:
        """One of the group; whoever made its last step a moment before this worker is not lost."""
        if self.party and self.party.is_in_last_step:
            self._losses.append((link, reason))
        else:
            self._fall_apart(reason)

    def _is_of_group(self, link: Link) -> bool:
        links = [self._leader, self._next_leader, *self._members.values(), *self._next_members.values()]
        return self.party is not None and any(link is each for each in links)

    def _is_gathering(self, message: Messages) -> bool:
        return self._gathering is not None and self._gathering.group == message.group

    def _is_standing_by(self, link: Link, message: Messages) -> bool:
        here = self._standing_by
        return here is not None and here.link is link and here.invite.group == message.group


def _key(members: Iterable[str], peers: Mapping[str, Peer]) -> str:
    """The same members in the same order, and none of them another one since."""
    return " ".join(f"{name}.{peers[name].epoch}" for name in members)


def what_differs(own: Sequence[LayerShape], leaders: Sequence[LayerShape], leader: str) -> str:
    """Why there can be no group: with a part of each layer's heads in other bits it would be no shape that
    anybody has asked for, and below the floor of requests that are here. Empty: nothing."""
    for layer, (here, there) in enumerate(zip(own, leaders, strict=True)):
        if here != there:
            return (
                f"its layer {layer} is {here.attention}/{here.ffn} (attention/FFN) and {there.attention}/"
                f"{there.ffn} at {leader}; swap one of them first"
            )
    return ""


def _formation(invite: Invite, num_layers: int) -> Formation:
    return Formation(tuple(invite.members), invite.low, num_layers, invite.grows)

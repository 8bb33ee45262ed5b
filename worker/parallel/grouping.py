"""What this worker is in: no group, on its way into one, or in one. The engine's thread owns it.

Coming together takes three rounds, so that nobody waits inside of a step for one that does not come: the
leader asks, and whoever can come stands by and goes on alone; those that have no communicator yet make it;
then all are told to enter, which each does at its next boundary. Until that last word everything can be
called off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from worker.engine.engine import DEVICE_ERRORS
from worker.engine.instance import Output
from worker.memory import BrokenInvariant, OutOfBlocks
from worker.parallel.communicator import Communicator, PeerLost
from worker.parallel.formation import Formation, joined
from worker.parallel.links import Link, Links
from worker.parallel.meetings import Meetings
from worker.parallel.party import Party
from worker.parallel.place import Place
from worker.parallel.wire import (
    Answer,
    Bye,
    Dismiss,
    Enter,
    Invite,
    Meet,
    Messages,
    Met,
    Ready,
    Step,
)

log = logging.getLogger(__name__)

# The books or the device are broken: no going on.
_FATAL: tuple[type[Exception], ...] = (BrokenInvariant, AssertionError, *DEVICE_ERRORS)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker as its card tells of it."""

    worker: str
    epoch: int
    address: str
    key: bytes


@dataclass(slots=True)
class Gathering:
    """The leader's: who was asked, and what they said."""

    group: str
    formation: Formation
    key: str
    links: dict[str, Link]  # of the others
    answers: dict[str, Answer] = field(default_factory=dict)
    met: dict[str, str] = field(default_factory=dict)  # why not; "": it has met the others
    lost: str = ""  # somebody is gone

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
        self._key = ""

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

    # ----------------------------------------------------------------------------- the leader's verbs

    def gather(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Gathering:
        """Ask all members. Raises OSError where one cannot be reached; then nobody was asked."""
        rest = [peers[name] for name in formation.members if name != self.worker]
        links: dict[str, Link] = {}
        try:
            for peer in rest:
                known = self._members.get(peer.worker)
                links[peer.worker] = known or self._links.connect(peer.address, peer.key)
        except OSError:
            for name, link in links.items():
                if name not in self._members:
                    link.close()
            raise
        epochs = "-".join(f"{name}.{peers[name].epoch}" for name in formation.members if name in peers)
        gathering = Gathering(group, formation, f"{formation.members}{epochs}", links)
        invite = Invite(
            group=group,
            leader=self.worker,
            model=self.place.name,
            members=list(formation.members),
            low=formation.low,
            grows=formation.grows,
            key=gathering.key,
        )
        self._gathering = gathering
        gathering.answers[self.worker] = self._answer(invite)
        for link in links.values():
            link.send(invite)
        return gathering

    def meet(self, gathering: Gathering) -> None:
        """All have answered: make the communicator, unless all have kept it."""
        if all(answer.has_met for answer in gathering.answers.values()):
            gathering.met = dict.fromkeys(gathering.formation.members, "")
            return
        order = Meet(group=gathering.group, store=self._meetings.store, name=gathering.group)
        for link in gathering.links.values():
            link.send(order)
        self._meet(order, gathering.formation, gathering.key)

    def enter(self, gathering: Gathering, blocks: int) -> Party:
        """All have met: from the next boundary of each on they are one group."""
        for link in gathering.links.values():
            link.send(Enter(group=gathering.group, blocks=blocks))
        self._gathering, self._members = None, gathering.links
        return self._enter(gathering.group, gathering.formation, gathering.key, blocks)

    def dismiss(self, gathering: Gathering, reason: str) -> None:
        """It does not come about; everybody goes on as before."""
        self._gathering = None
        for name, link in gathering.links.items():
            link.send(Dismiss(group=gathering.group, reason=reason))
            if name not in self._members:
                link.close()

    def go_on(self, gathering: Gathering) -> None:
        """It was about a group that is there already; it goes on with what it was asked."""
        self._gathering = None

    # ----------------------------------------------------------------------------- at every boundary

    def tick(self, may_plan: bool) -> list[Output]:
        """The group's step, if it is called. A group that fails is left; the requests stay."""
        party = self.party
        assert party is not None
        try:
            outputs = party.tick(may_plan)
        except _FATAL:
            raise
        except PeerLost as error:
            self._fall_apart(str(error))
            return []
        except Exception as error:
            log.exception("a step of the group failed")
            self._fall_apart(f"{type(error).__name__}: {error}")
            return []
        if party.is_over:
            self._parted(party)
        return outputs

    def _parted(self, party: Party) -> None:
        for communicator in party.communicators:
            self._meetings.keep(self._key, communicator)
        self._leave()
        self.on_regrouped((), "the group has parted")

    def _fall_apart(self, reason: str) -> None:
        party = self.party
        if party is None:
            return
        log.warning("the group %s falls apart: %s", list(party.formation.members), reason)
        for link in [*self._members.values(), *([self._leader] if self._leader else [])]:
            link.send(Bye(group=party.group, reason=reason))
        self._leave()
        party.fall_apart()
        self.on_regrouped((), f"the group fell apart: {reason}")

    def _leave(self) -> None:
        for link in self._members.values():
            link.close()
        self.party, self._members, self._leader = None, {}, None

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
                assert self._standing_by
                invite = self._standing_by.invite
                self._meet(message, _formation(invite, self.place.num_layers), invite.key)
            case Enter() if self._is_standing_by(link, message):
                assert self._standing_by
                invite = self._standing_by.invite
                self._standing_by, self._leader = None, link
                formation = _formation(invite, self.place.num_layers)
                try:
                    self._enter(invite.group, formation, invite.key, message.blocks)
                except (KeyError, OutOfBlocks) as error:
                    link.send(Bye(group=message.group, reason=f"{self.worker} cannot enter: {error}"))
            case Dismiss() if self._is_standing_by(link, message):
                self._standing_by = None
            case Ready() if self.party and self.party.chair and self.party.group == message.group:
                self.party.chair.take(message)
            case Step() if self.party and link is self._leader:
                self.party.take_step(message)
            case Bye() if self._is_of_group(link):
                self._fall_apart(f"a member left: {message.reason}")
            case _:
                log.debug("nobody waits for this %s of %s", type(message).__name__, message.group)

    def _consider(self, link: Link, invite: Invite) -> None:
        answer = self._answer(invite)
        if not answer.reason and invite.grows:
            self._standing_by = _StandingBy(invite, link)
        link.send(answer)

    def _answer(self, invite: Invite) -> Answer:
        is_own = invite.leader == self.worker
        reason = "" if is_own else self.why_not() or self.busy_with
        if invite.model != self.place.name:
            reason = reason or f"it serves {self.place.name}, not {invite.model}"
        if invite.grows and self.party:
            reason = reason or f"it is in a group of {self.party.formation.size}"
        formation = _formation(invite, self.place.num_layers)
        rank = formation.members.index(self.worker)
        shard = formation.high_shard(rank) if invite.grows else formation.low_shard(rank)
        return Answer(
            group=invite.group,
            worker=self.worker,
            reason=reason,
            has_met=self._meetings.has(invite.key),
            numbers=self.place.numbers(shard),
        )

    def _meet(self, order: Meet, formation: Formation, key: str) -> None:
        self._key = key
        self._meetings.begin(order.name, order.store, formation.members.index(self.worker), formation.size)

    def _met(self, name: str, reason: str) -> None:
        if not reason:
            self._meetings.keep(self._key, self._meetings.take(name))
        if self._gathering and self._gathering.group == name:
            self._gathering.met[self.worker] = reason
        elif self._standing_by and self._standing_by.invite.group == name:
            self._standing_by.link.send(Met(group=name, worker=self.worker, reason=reason))

    def _enter(self, group: str, formation: Formation, key: str, blocks: int) -> Party:
        """KeyError where the communicator is not there."""
        high: Communicator = self._meetings.take(key)
        self._key = key
        self.place.resizer.vacate(blocks)
        leader = self._leader
        self.party = Party(
            group,
            formation,
            formation.members.index(self.worker),
            self.place,
            high,
            None,
            blocks,
            send=lambda ready: leader.send(ready) if leader else None,
            broadcast=self._broadcast,
            clock=self._clock,
        )
        return self.party

    def _broadcast(self, step: Step) -> None:
        for link in self._members.values():
            link.send(step)

    def _lost(self, link: Link, reason: str) -> None:
        if self._is_of_group(link):
            self._fall_apart(f"a member was lost: {reason}")
        elif self._standing_by and self._standing_by.link is link:
            self._standing_by = None
        elif self._gathering and link in self._gathering.links.values():
            names = [name for name, each in self._gathering.links.items() if each is link]
            self._gathering.lost = f"{names[0]}: {reason}"

    def _is_of_group(self, link: Link) -> bool:
        return self.party is not None and (link is self._leader or link in self._members.values())

    def _is_gathering(self, message: Messages) -> bool:
        return self._gathering is not None and self._gathering.group == message.group

    def _is_standing_by(self, link: Link, message: Messages) -> bool:
        here = self._standing_by
        return here is not None and here.link is link and here.invite.group == message.group


def _formation(invite: Invite, num_layers: int) -> Formation:
    members = tuple(invite.members)
    if invite.grows and invite.low == 1:
        return joined([(name,) for name in members], num_layers)
    return Formation(members, invite.low, num_layers, invite.grows)

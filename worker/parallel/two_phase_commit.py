"""Forming a group, or splitting one, as a two-phase commit with a rendezvous in between.

No step ever waits for a member that does not answer: the coordinator asks (Prepare), each member that can
make the change votes yes and goes on as before (Vote); members without a communicator make it; then the
coordinator decides (Commit), and each member changes at its next boundary. Until Commit everything can be
aborted.
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
from worker.distributed.rendezvous import CommunicatorPool, members_key, new_rendezvous
from worker.distributed.transport import Endpoint, Link
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance
from worker.parallel.proposal import PeerLinks, Prepared, Proposal, vote_on


@dataclass(frozen=True, slots=True)
class NextGroup:
    """The group that a worker is about to be in.

    `lost`: a member that is gone already, as the coordinator knows.
    """

    group: str
    formation: Formation
    key: str  # of its communicator
    rendezvous: str
    peers: dict[str, Peer]
    links: PeerLinks
    lost: str = ""


class TwoPhaseCommit:
    """At most one change at a time: this worker coordinates it, or has voted for it."""

    def __init__(
        self,
        worker: str,
        local: LocalInstance,
        links: Endpoint[GroupMessage],
        communicators: CommunicatorPool,
        now: Callable[[], tuple[TensorParallelExecutor | None, PeerLinks]],
        in_the_way: Callable[[], str],
    ) -> None:
        """Make the agreement of one worker.

        now: returns the group that this worker is in, and its links. in_the_way: returns why no change may
        begin, or an empty string.
        """
        self.worker, self.local = worker, local
        self._links, self._communicators, self._now, self._in_the_way = links, communicators, now, in_the_way
        self._proposal: Proposal | None = None
        self._prepared: Prepared | None = None
        self._subgroup = PeerLinks()  # of the smaller group after a split
        self._has_communicator, self._rendezvous = False, ""  # the one to change with

    @property
    def is_under_way(self) -> bool:
        return self._pending is not None

    # ----------------------------------------------------------------------------- the coordinator

    def propose(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Proposal:
        """Ask all members.

        A member that cannot be reached shows up as `lost` of the proposal. Raises KeyError for a member
        without a peer, before any is asked.
        """
        members = {name: peers[name] for name in formation.members}
        known = self._now()[1].others
        links = {
            name: known.get(name) or self._links.connect(peer.address, peer.key)
            for name, peer in members.items()
            if name != self.worker
        }
        prepare = Prepare(
            group=group,
            leader=self.worker,
            model=self.local.name,
            members=list(formation.members),
            low=formation.low,
            grows=formation.grows,
            peers=members,
            shape=self.local.instance.shape,
        )
        self._proposal = proposal = Proposal(prepare, formation, links)
        proposal.votes[self.worker] = vote = self._vote(prepare, formation)
        self._has_communicator, self._rendezvous = False, vote.rendezvous
        self._open_subgroup_links(prepare, formation)
        for link in links.values():
            link.send(prepare)
        return proposal

    def call_rendezvous(self, proposal: Proposal) -> None:
        """All have voted: make the communicators that are needed, unless all members have kept them."""
        formation = proposal.formation
        kept = {vote.rendezvous for vote in proposal.votes.values()}
        if (not formation.grows and formation.low == 1) or (len(kept) == 1 and "" not in kept):
            proposal.rendezvous = dict.fromkeys(formation.members, "")
            return
        order = JoinRendezvous(
            group=proposal.group, rendezvous=new_rendezvous(), store=self._communicators.store
        )
        proposal.has_called_rendezvous = True
        for link in proposal.links.values():
            link.send(order)
        self._join_rendezvous(order)

    def abort(self, proposal: Proposal, reason: str) -> None:
        """Tell all members that the change does not happen."""
        self._proposal = None
        proposal.lost = proposal.lost or reason
        if proposal.is_rendezvous_partial:  # then the next rendezvous is for all again
            self._communicators.forget(self._key(proposal.prepare, proposal.formation))
        known = self._now()[1].others
        for name, link in proposal.links.items():
            link.send(Abort(group=proposal.group, reason=reason))
            if name not in known:
                link.close()
        self._drop_subgroup_links(proposal.group, reason)

    def send_commit(self, proposal: Proposal, blocks: int) -> None:
        """Tell the first member of each other subgroup, which takes its subgroup along."""
        formation = proposal.formation
        for name in formation.members[1 : formation.num_subgroups]:
            proposal.links[name].send(Commit(group=proposal.group, blocks=blocks))

    # ----------------------------------------------------------------------------- messages of other members

    def receive_prepare(self, link: Link, prepare: Prepare) -> None:
        """Vote, and wait for the decision after a yes."""
        formation = self._formation(prepare)
        vote = self._vote(prepare, formation)
        if not vote.reason:
            self._prepared = Prepared(prepare, formation, link)
            self._has_communicator, self._rendezvous = False, vote.rendezvous
            self._open_subgroup_links(prepare, formation)
        link.send(vote)

    def receive(self, link: Link, message: Vote | RendezvousDone | JoinRendezvous | Abort) -> None:
        """Handle a message of the change under way; others are out of date."""
        proposal = self._proposal if self._proposal and self._proposal.group == message.group else None
        match message:
            case Vote() if proposal:
                proposal.votes[message.worker] = message
            case RendezvousDone() if proposal:
                proposal.rendezvous[message.worker] = message.reason
            case JoinRendezvous() if self.is_prepared(link, message.group):
                self._join_rendezvous(message)
            case Abort() if self.is_prepared(link, message.group):
                self._prepared = None
                self._drop_subgroup_links(message.group, message.reason)
            case Abort() if link is self._subgroup.leader:
                self._subgroup.leader = None

    def receive_subgroup_leader(self, link: Link, group: str) -> None:
        """Remember the link of the future leader of the subgroup.

        It may come before Prepare, or late, after another Prepare.
        """
        if self._prepared is None or self._prepared.prepare.group == group:
            self._subgroup.leader = link
            self._report_rendezvous()

    def end_rendezvous(self, rendezvous: str, reason: str) -> None:
        """Take the communicator that a rendezvous made, or report why it failed."""
        pending, (executor, _) = self._pending, self._now()
        if pending is None or rendezvous != self._rendezvous:  # given up meanwhile
            self._communicators.drop(rendezvous)
            return
        if reason:
            self._send_rendezvous_done(reason)
            return
        communicator = self._communicators.take_made(rendezvous)
        if pending.prepare.grows or executor is None:
            self._communicators.keep(self._key(pending.prepare, pending.formation), rendezvous, communicator)
        else:
            executor.member.take_next_low(communicator)
        self._has_communicator = True
        self._report_rendezvous()

    def lose(self, link: Link, reason: str, *, said_so: bool = False) -> None:
        """Note that a member is gone, or has said (`said_so`) that it leaves."""
        if self._prepared and self._prepared.link is link:
            self._prepared = None
        elif self._proposal and (name := self._proposal.name_of(link)):
            self._proposal.lost = reason if said_so else f"{name}: {reason}"

    def is_prepared(self, link: Link, group: str) -> bool:
        """Return whether this worker has voted for `group` over this link."""
        prepared = self._prepared
        return prepared is not None and prepared.link is link and prepared.prepare.group == group

    # ----------------------------------------------------------------------------- the end of the change

    def take_communicator(self) -> Communicator:
        """Return the communicator of the group to enter and hand it over.

        Raises KeyError if its members have not met, or nothing is under way.
        """
        pending = self._pending
        if pending is None:
            raise KeyError("no group is to be entered")
        return self._communicators.take(self._key(pending.prepare, pending.formation), self._rendezvous)

    def finish_entering(self) -> NextGroup:
        """End the change under way: this worker enters the larger group now."""
        pending, proposal, prepared = self._pending, self._proposal, self._prepared
        assert pending
        links = PeerLinks(others=proposal.links) if proposal else PeerLinks()
        if prepared:
            links.leader = prepared.link
        self._proposal = self._prepared = None
        return NextGroup(
            pending.prepare.group,
            pending.formation,
            self._key(pending.prepare, pending.formation),
            self._rendezvous,
            pending.prepare.peers,
            links,
            proposal.lost if proposal else "",
        )

    def finish_split(self) -> NextGroup:
        """End the change under way: this worker is in its subgroup now."""
        pending, links, self._subgroup = self._pending, self._subgroup, PeerLinks()
        assert pending
        self._proposal = self._prepared = None
        prepare, formation = pending.prepare, pending.formation
        rank = formation.members.index(self.worker)
        return NextGroup(
            f"{prepare.group}/{formation.subgroup(rank)}",
            formation.part(rank),
            self._key(prepare, formation),
            self._rendezvous,
            prepare.peers,
            links,
        )

    def withdraw(self, reason: str) -> None:
        """Leave a change that other members may have made already, when it is too late to vote no."""
        if self._prepared:
            self._prepared.link.send(GroupEnded(group=self._prepared.prepare.group, reason=reason))
            self._prepared = None
        elif self._proposal:
            self._proposal.lost = reason

    def cancel(self) -> None:
        """Forget the change under way: the group that was to change is no more."""
        self._subgroup.close()
        self._proposal, self._prepared, self._subgroup = None, None, PeerLinks()

    def has_subgroup_link(self, link: Link) -> bool:
        """Return whether `link` belongs to the subgroup that this worker's group splits into."""
        return self._subgroup.has(link)

    # ----------------------------------------------------------------------------- rendezvous

    def _join_rendezvous(self, order: JoinRendezvous) -> None:
        pending = self._pending
        assert pending
        prepare, formation = pending.prepare, pending.formation
        rank = formation.members.index(self.worker)
        rendezvous, size = order.rendezvous, formation.size
        if not prepare.grows:
            rendezvous, size = f"{rendezvous}/{formation.subgroup(rank)}", formation.low
            rank = formation.low_shard(rank).rank
        self._has_communicator, self._rendezvous = False, rendezvous
        self._communicators.start(rendezvous, order.store, rank, size)

    def _report_rendezvous(self) -> None:
        """Report success once this worker has all that the change needs."""
        prepared = self._prepared
        if prepared and not prepared.prepare.grows and prepared.formation.low > 1:
            rank = prepared.formation.members.index(self.worker)
            leads = prepared.formation.low_shard(rank).rank == 0
            if not leads and self._subgroup.leader is None:
                return
        if self._has_communicator:
            self._send_rendezvous_done("")

    def _send_rendezvous_done(self, reason: str) -> None:
        if self._proposal:
            self._proposal.rendezvous[self.worker] = reason
        elif self._prepared:
            group = self._prepared.prepare.group
            self._prepared.link.send(RendezvousDone(group=group, worker=self.worker, reason=reason))

    def _key(self, prepare: Prepare, formation: Formation) -> str:
        """Return the key of the communicator that is needed: of all members, or of this worker's subgroup."""
        if not prepare.grows:
            formation = formation.part(formation.members.index(self.worker))
        return members_key(formation.members, prepare.peers)

    # ----------------------------------------------------------------------------- details

    def _vote(self, prepare: Prepare, formation: Formation) -> Vote:
        return vote_on(
            prepare,
            formation,
            self.worker,
            self.local,
            self._now()[0],
            in_the_way="" if prepare.leader == self.worker else self._in_the_way(),
            rendezvous=self._communicators.kept(self._key(prepare, formation)) if prepare.grows else "",
        )

    def _open_subgroup_links(self, prepare: Prepare, formation: Formation) -> None:
        """Connect to the members of the subgroup that this worker will lead after a split, if it will."""
        rank = formation.members.index(self.worker)
        if prepare.grows or formation.low == 1 or formation.low_shard(rank).rank > 0:
            return
        links = self._subgroup.others
        for name in formation.part(rank).members[1:]:
            if name not in links:  # else it was asked before, for a split that was aborted
                peer = prepare.peers[name]
                links[name] = self._links.connect(peer.address, peer.key)
            links[name].send(LeadSubgroup(group=prepare.group))

    def _drop_subgroup_links(self, group: str, reason: str) -> None:
        """Close what was opened for subgroups: the next split may be another one.

        Members hear of the abort over these links too: they may see them close before the leader's Abort
        comes, or hear of LeadSubgroup only afterwards, and would take either for the loss of a member.
        """
        self._subgroup.tell_others(Abort(group=group, reason=reason))
        self._subgroup.close()
        self._subgroup = PeerLinks()
        if executor := self._now()[0]:
            executor.member.drop_next_low()

    @property
    def _pending(self) -> Proposal | Prepared | None:
        return self._prepared or self._proposal

    def _formation(self, prepare: Prepare) -> Formation:
        return Formation(tuple(prepare.members), prepare.low, self.local.num_layers, prepare.grows)

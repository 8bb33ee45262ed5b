"""Forming a group, or splitting one, as a two-phase commit with a rendezvous in between.

The coordinator asks (Prepare), each member votes and goes on as before (Vote); members without a communicator
make it; then the coordinator decides (Commit), and each member changes between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from worker.distributed.communicator import Communicator
from worker.distributed.messages import (
    Abort,
    GroupEnded,
    GroupMessage,
    JoinRendezvous,
    LeadSubgroup,
    Peer,
    Prepare,
    RendezvousDone,
    Vote,
)
from worker.distributed.rendezvous import CommunicatorPool, new_rendezvous
from worker.distributed.transport import Endpoint, Link
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance
from worker.parallel.proposal import PeerLinks, Proposal, vote_on


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
        """now: returns this worker's group and its links. in_the_way: why no change may begin, or ""."""
        self.worker, self.local = worker, local
        self._links, self._communicators, self._now, self._in_the_way = links, communicators, now, in_the_way
        self._pending: Proposal | None = None
        self._subgroup = PeerLinks()  # links of the smaller group after a split

    @property
    def is_under_way(self) -> bool:
        return self._pending is not None

    # ----------------------------------------------------------------------------- the coordinator

    def propose(self, group: str, formation: Formation, peers: Mapping[str, Peer]) -> Proposal:
        """Ask all members; one that is not reached becomes `lost`. Raises KeyError for one without a peer."""
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
            kv_form=self.local.cache.form,
            context=self.local.model.config.max_position_embeddings,
        )
        self._pending = proposal = Proposal(prepare, formation, self.worker, PeerLinks(links))
        proposal.votes[self.worker] = self._vote(proposal)
        self._open_subgroup_links(proposal)
        proposal.links.tell_others(prepare)
        return proposal

    def call_rendezvous(self, proposal: Proposal) -> None:
        """All have voted: make the communicators that are needed, unless all members have kept them."""
        formation = proposal.formation
        kept = {vote.rendezvous for vote in proposal.votes.values()}
        if (not formation.grows and formation.low == 1) or (len(kept) == 1 and "" not in kept):
            proposal.rendezvous_ends = dict.fromkeys(formation.members, "")
            return
        store = self._communicators.store
        order = JoinRendezvous(group=proposal.group, rendezvous=new_rendezvous(), store=store)
        proposal.has_called_rendezvous = True
        proposal.links.tell_others(order)
        self._join_rendezvous(proposal, order)

    def abort(self, proposal: Proposal, reason: str) -> None:
        """Tell all members that the change does not happen; they go on as before."""
        if self._pending is proposal:
            self._pending = None
        proposal.lost = proposal.lost or reason
        if proposal.is_rendezvous_partial:  # then the next rendezvous is for all again
            self._communicators.forget(proposal.key)
        known = self._now()[1].others
        proposal.links.tell_others(Abort(group=proposal.group, reason=reason))
        for name, link in proposal.links.others.items():
            if name not in known:
                link.close()
        self._drop_subgroup_links(proposal.group, reason)

    # ----------------------------------------------------------------------------- messages of other members

    def receive_prepare(self, link: Link, prepare: Prepare) -> None:
        """Vote, and wait for the decision after a yes."""
        formation = Formation(tuple(prepare.members), prepare.low, self.local.num_layers, prepare.grows)
        change = Proposal(prepare, formation, self.worker, PeerLinks(leader=link))
        vote = self._vote(change)
        if not vote.reason:
            self._pending = change
            self._open_subgroup_links(change)
        link.send(vote)

    def receive(self, link: Link, message: Vote | RendezvousDone | JoinRendezvous | Abort) -> None:
        """Handle a message of the change under way; others are out of date."""
        change = self._pending if self._pending and self._pending.group == message.group else None
        match message:
            case Vote() if change and change.is_coordinator:
                change.votes[message.worker] = message
            case RendezvousDone() if change and change.is_coordinator:
                change.rendezvous_ends[message.worker] = message.reason
            case JoinRendezvous() if change and self.is_prepared(link, message.group):
                self._join_rendezvous(change, message)
            case Abort() if self.is_prepared(link, message.group):
                self._pending = None
                self._drop_subgroup_links(message.group, message.reason)
            case Abort() if link is self._subgroup.leader:
                self._subgroup.leader = None

    def receive_subgroup_leader(self, link: Link, group: str) -> None:
        """Note the future leader's link. It may come before Prepare, or late, after another Prepare."""
        if self._pending is None or self._pending.is_coordinator or self._pending.group == group:
            self._subgroup.leader = link
            self._report_rendezvous()

    def end_rendezvous(self, rendezvous: str, made: Communicator | str) -> None:
        """Take the communicator that a rendezvous made, or report why it failed."""
        change, (executor, _) = self._pending, self._now()
        if change is None or rendezvous != change.rendezvous:  # given up meanwhile
            if not isinstance(made, str):
                made.close()
            return
        if isinstance(made, str):
            self._send_rendezvous_done(change, made)
            return
        if change.prepare.grows or executor is None:
            self._communicators.keep(change.key, rendezvous, made)
        else:
            executor.member.take_next_low(made)
        change.has_communicator = True
        self._report_rendezvous()

    def lose(self, link: Link, reason: str, *, said_so: bool = False) -> None:
        """Note that a member is gone, or has said (`said_so`) that it leaves."""
        if change := self._pending:
            if change.links.leader is link:
                self._pending = None
            for name, each in change.links.others.items():
                if each is link:
                    change.lost = reason if said_so else f"{name}: {reason}"

    def is_prepared(self, link: Link, group: str) -> bool:
        """Return whether this worker has voted for `group` over this link."""
        change = self._pending
        return change is not None and change.links.leader is link and change.group == group

    # ----------------------------------------------------------------------------- the end of the change

    def take_communicator(self) -> Communicator:
        """Hand over the communicator of the group to enter. Raises KeyError if there is none."""
        if self._pending is None:
            raise KeyError("no group is to be entered")
        return self._communicators.take(self._pending.key, self._pending.rendezvous)

    def finish(self) -> tuple[Proposal, PeerLinks]:
        """End the change under way, which this worker makes now. Returns it and its new group's links."""
        change, self._pending = self._pending, None
        assert change
        if change.prepare.grows:
            return change, change.links
        links, self._subgroup = self._subgroup, PeerLinks()
        return change, links

    def withdraw(self, reason: str) -> None:
        """Leave a change that other members may have made already, when it is too late to vote no."""
        change = self._pending
        if change and change.is_coordinator:
            change.lost = reason
        elif change:
            change.links.tell_leader(GroupEnded(group=change.group, reason=reason))
            self._pending = None

    def cancel(self) -> None:
        """Forget the change under way: the group that was to change is no more."""
        self._subgroup.close()
        self._pending, self._subgroup = None, PeerLinks()

    def has_subgroup_link(self, link: Link) -> bool:
        """Return whether `link` belongs to the subgroup that this worker's group splits into."""
        return self._subgroup.has(link)

    # ----------------------------------------------------------------------------- details

    def _vote(self, change: Proposal) -> Vote:
        change.rendezvous = self._communicators.kept(change.key) if change.prepare.grows else ""
        in_the_way = "" if change.is_coordinator else self._in_the_way()
        executor = self._now()[0]
        return vote_on(change, self.local, executor, in_the_way=in_the_way, rendezvous=change.rendezvous)

    def _join_rendezvous(self, change: Proposal, order: JoinRendezvous) -> None:
        change.rendezvous, change.has_communicator = order.rendezvous, False
        if not change.prepare.grows:
            change.rendezvous += f"/{change.formation.subgroup(change.rank)}"
        members = change.next_formation.members
        rank = members.index(self.worker)
        self._communicators.start(change.rendezvous, order.store, rank, len(members))

    def _report_rendezvous(self) -> None:
        """Report success once this worker has all that the change needs."""
        change = self._pending
        if change is None or not change.has_communicator:
            return
        is_led = not change.prepare.grows and change.formation.low > 1 and not change.leads_subgroup
        if not is_led or self._subgroup.leader:
            self._send_rendezvous_done(change, "")

    def _send_rendezvous_done(self, change: Proposal, reason: str) -> None:
        if change.is_coordinator:
            change.rendezvous_ends[self.worker] = reason
        else:
            change.links.tell_leader(RendezvousDone(group=change.group, worker=self.worker, reason=reason))

    def _open_subgroup_links(self, change: Proposal) -> None:
        """Connect to the members of the subgroup that this worker will lead after a split, if it will."""
        if not change.leads_subgroup:
            return
        links = self._subgroup.others
        for name in change.next_formation.members[1:]:
            if name not in links:  # else it was asked before, for a split that was aborted
                peer = change.prepare.peers[name]
                links[name] = self._links.connect(peer.address, peer.key)
            links[name].send(LeadSubgroup(group=change.group))

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

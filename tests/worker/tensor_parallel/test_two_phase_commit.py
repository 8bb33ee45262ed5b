"""A parting into groups of two that is called off: no member is lost by it, in whatever order they hear."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from worker.distributed.messages import Abort, LeadSubgroup, Message, Peer, Prepare
from worker.parallel.formation import Formation
from worker.parallel.proposal import PeerLinks, Proposal
from worker.parallel.two_phase_commit import TwoPhaseCommit

MEMBERS = ["w0", "w1", "w2", "w3"]  # as pairs: w0 w2 and w1 w3


class Recorded:
    """A link to somebody; what was sent before it closed."""

    def __init__(self, *_: Any) -> None:
        self.sent: list[Message] = []
        self.is_closed = False

    def send(self, message: Message) -> None:
        assert not self.is_closed
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


def asked(worker: str, to_leader: Any) -> Any:
    """The worker stands by for the parting that w0 leads."""
    executor = SimpleNamespace(member=SimpleNamespace(drop_next_low=lambda: None))
    place: Any = SimpleNamespace(name="m", num_layers=2)
    links: Any = SimpleNamespace(connect=Recorded)
    communicators: Any = SimpleNamespace()
    change = TwoPhaseCommit(worker, place, links, communicators, lambda: (executor, PeerLinks()), lambda: "")  # type: ignore[arg-type,return-value]
    formation = Formation(tuple(MEMBERS), 2, 2, grows=False)
    peers = {name: Peer(name, 1, "127.0.0.1:1", b"") for name in MEMBERS}
    invite = Prepare(
        group="g", leader="w0", model="m", members=MEMBERS, low=2, grows=False, peers=peers, shape=[]
    )
    change._pending = Proposal(invite, formation, worker, PeerLinks(leader=to_leader))
    change._open_subgroup_links(change._pending)
    return change


@pytest.mark.parametrize("hears_leader_first", [True, False])
def test_who_was_to_lead_a_pair_and_closes_its_link_is_no_loss_to_who_was_to_follow(
    hears_leader_first: bool,
) -> None:
    ends = {name: Recorded() for name in ("w1", "w3")}
    leads, follows = (asked(name, ends[name]) for name in ends)
    link = leads._subgroup.others["w3"]
    leads.receive(ends["w1"], Abort(group="g", reason="no room"))
    assert link.is_closed
    assert [type(message) for message in link.sent] == [LeadSubgroup, Abort]

    def its_words() -> None:
        follows.receive_subgroup_leader(link, "g")
        follows.receive(link, link.sent[1])
        assert not follows.has_subgroup_link(link)  # its end means nothing from here on

    def leaders_word() -> None:
        follows.receive(ends["w3"], Abort(group="g", reason="no room"))

    for hear in (leaders_word, its_words) if hears_leader_first else (its_words, leaders_word):
        hear()
    assert not follows.has_subgroup_link(link)
    assert not follows.is_under_way


def test_who_leads_a_pair_of_a_parting_that_was_called_off_does_not_lead_that_of_the_next() -> None:
    follows = asked("w3", Recorded())
    ahead, late = Recorded(), Recorded()
    follows.receive_subgroup_leader(ahead, "g")
    follows.receive_subgroup_leader(late, "of before")
    assert follows.has_subgroup_link(ahead) and not follows.has_subgroup_link(late)

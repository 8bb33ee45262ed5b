"""Communicators of groups that may form are made before: who asks whom, and that a transform finds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from bench.common.oracles import make_oracle
from bus.messages import InstanceCard, WorkerCard
from tests.support.group_workers import transform, workers
from worker.distributed.communicator import Communicator, PeerLost, connect
from worker.distributed.messages import Peer
from worker.distributed.rendezvous import CommunicatorPool, new_rendezvous
from worker.service.groups import led_groups


def card(name: str, model: str = "m", degrees: list[int] | None = None) -> WorkerCard:
    instance = InstanceCard(
        id=f"{model}@{name}",
        model=model,
        model_path="",
        max_model_len=1,
        vocab_size=1,
        num_layers=1,
        dtype="float32",
        block_tokens=1,
        degrees=degrees or [1, 2, 4],
    )
    return WorkerCard(
        id=name, epoch=1, host="h", pid=1, device="cpu", page_bytes=1, state="serving", instances=[instance]
    )


@pytest.mark.parametrize(
    ("own", "groups"),
    [
        ("w0", [("w0", "w1"), ("w0", "w1", "w2", "w3")]),
        ("w1", []),
        ("w2", [("w2", "w3")]),
        ("w10", []),
    ],
)
def test_the_first_of_an_aligned_group_asks_the_others(own: str, groups: list[tuple[str, ...]]) -> None:
    cards = [card(name) for name in ("w10", "w3", "w1", "w2", "w0")] + [card("w4", "another")]
    [mine] = [each for each in cards if each.id == own]
    assert list(led_groups(mine, cards)) == groups


def test_degrees_that_the_weights_are_not_padded_for_are_not_prepared() -> None:
    cards = [card(f"w{i}", degrees=[1, 2]) for i in range(4)]
    assert list(led_groups(cards[0], cards)) == [("w0", "w1")]


def test_a_transform_finds_the_communicator_that_was_made_ahead(tmp_path: Path) -> None:
    model: Any = make_oracle("llama")
    model.save_pretrained(tmp_path)
    with workers(tmp_path, 2) as each:
        peers = {worker.name: worker.peer for worker in each}
        each[0].thread.prepare_communicator(("w0", "w1"), peers)
        for worker in each:
            made = worker.grouping._communicators
            worker.wait(lambda made=made: made.kept("w0.1 w1.1"), "the meeting")  # type: ignore[misc]
        kept = each[0].grouping._communicators._kept["w0.1 w1.1"][1]
        assert each[0].end_of(transform(each, 2)).state == "applied"
        assert each[0].grouping.executor is not None and each[0].grouping.executor.member.high is kept
        assert each[0].end_of(transform(each, 1)).state == "applied"
        each[0].wait_degree(1)
        assert each[0].grouping._communicators.kept("w0.1 w1.1"), "it is kept for the next time"


def test_members_that_met_ahead_and_for_an_order_at_once_have_the_same_communicator(tmp_path: Path) -> None:
    """One of them hears of the meeting ahead last of all, and had heard of the other one first."""
    make_oracle("llama").save_pretrained(tmp_path)
    with workers(tmp_path, 2) as each:
        met, late = each[1].grouping._rendezvous_ended, list[tuple[str, Communicator | str]]()

        def hear_late(rendezvous: str, made: Communicator | str) -> None:
            if rendezvous in each[1].grouping._ahead._keys:
                late.append((rendezvous, made))
            else:
                met(rendezvous, made)

        each[1].grouping._rendezvous_ended = hear_late  # type: ignore[method-assign]
        each[0].thread.prepare_communicator(("w0", "w1"), {worker.name: worker.peer for worker in each})
        assert each[0].end_of(transform(each, 2)).state == "applied"
        each[1].wait(lambda: bool(late), "the meeting ahead")
        each[1].call(lambda: met(*late[0]))
        for tp in (1, 2, 1):
            assert each[0].end_of(transform(each, tp)).state == "applied"
        each[1].wait(lambda: each[1].grouping.executor is None, "its group's end")
        there = [worker.grouping._communicators for worker in each]
        assert there[0].kept("w0.1 w1.1") == there[1].kept("w0.1 w1.1") > late[0][0]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_of_two_meetings_of_the_same_members_the_later_one_counts(order: list[int]) -> None:
    pool = CommunicatorPool("127.0.0.1", "cpu", 5.0, lambda rendezvous, reason: None)
    made = [(new_rendezvous(), connect(HashStore(), 0, 1, timeout_s=5)) for _ in range(2)]
    for which in order:
        pool.keep("w0.1", *made[which])
    with pytest.raises(KeyError):
        pool.take("w0.1", made[0][0])
    with pytest.raises(PeerLost):
        made[0][1].all_reduce(torch.ones(1))
    pool.take("w0.1", made[1][0]).close()


def test_nothing_is_kept_of_a_meeting_that_nobody_waits_for(tmp_path: Path) -> None:
    """An order was given up while the members met; or one of them is never reached, again and again."""
    make_oracle("llama").save_pretrained(tmp_path)
    with workers(tmp_path, 1, timeout_s=30.0) as (worker,):
        grouping = worker.grouping
        alone = connect(HashStore(), 0, 1, timeout_s=5)
        worker.call(lambda: grouping._rendezvous_ended("given up", alone))
        with pytest.raises(PeerLost):
            alone.all_reduce(torch.ones(1))

        there = [Peer(name, 1, worker.peer.address, worker.peer.key) for name in ("w1", "w2")]
        for peer in there:
            peers = {"w0": worker.peer, peer.worker: peer}
            worker.call(lambda p=peers: grouping.prepare_communicator(tuple(p), p))  # type: ignore[misc]
        [first, _] = list(grouping._ahead._opened)
        links = grouping._ahead._opened[first]
        worker.call(lambda: grouping._rendezvous_ended(first, "nobody came"))
        assert all(link.is_closed for link in links) and len(grouping._ahead._opened) == 1

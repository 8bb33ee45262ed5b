"""The ranks of one stage meet, or say who did not come, and leave nothing behind."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

from bench.common.service import wait_for
from worker.distributed.communicator import PeerLost
from worker.model.shard import ALONE, Shard
from worker.pipeline.ranks import Ranks


def ranks_of(shard: Shard, timeout_s: float = 10.0) -> Ranks:
    return Ranks(shard, "127.0.0.1", "cpu", timeout_s, lambda: None)


def test_one_rank_has_nobody_to_meet() -> None:
    alone = ranks_of(ALONE)
    assert alone.store == ""
    alone.meet("m", "")
    assert alone.have_met and alone.group is None


def test_ranks_add_up_once_they_have_met_and_a_sum_fails_when_one_has_left() -> None:
    first, second = ranks_of(Shard(0, 2)), ranks_of(Shard(1, 2))
    assert second.store == ""
    for each in (first, second):
        each.meet("m", first.store)
    for each in (first, second):
        wait_for("it to meet", lambda each=each: each.have_met, 10.0)  # type: ignore[misc]
    x = torch.ones(3)
    assert first.group and second.group
    other = threading.Thread(target=second.group.all_reduce, args=(torch.ones(3),))
    other.start()
    first.group.all_reduce(x)
    other.join()
    assert x.tolist() == [2.0, 2.0, 2.0]
    second.close()
    with pytest.raises(PeerLost):
        first.group.all_reduce(x)
    first.close()


def test_nobody_listens_where_ranks_have_met_when_they_have_ended() -> None:
    first = ranks_of(Shard(0, 2))
    host, _, port = first.store.rpartition(":")
    socket.create_connection((host, int(port)), timeout=5.0).close()
    first.close()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), timeout=5.0)


def test_a_rank_that_nobody_meets_says_so() -> None:
    first = ranks_of(Shard(0, 2), 0.3)
    first.meet("m", first.store)

    def says_so() -> bool:
        try:
            return first.have_met
        except PeerLost:
            return True

    wait_for("it to give up", says_so, 10.0)
    assert first.group is None
    first.close()


def test_ranks_that_meet_when_one_is_closed_already_keep_nothing() -> None:
    first, second = ranks_of(Shard(0, 2)), ranks_of(Shard(1, 2))
    told = threading.Event()
    first._on_news = told.set
    first.meet("m", first.store)
    first._is_closed = True  # as `close` does just before the others come
    second.meet("m", first.store)
    assert told.wait(10.0)
    assert not first.have_met
    first.close()
    second.close()

"""The messages of two workers are measured in bounded time, and never hold a profile up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bus.deployments import LinkSample, ProbePeer
from worker.distributed.transport import Link, Transport
from worker.profiler import links
from worker.profiler.links import ProbeResponder, measure_links

HOST = "127.0.0.1"
HIDDEN = 64
responders: dict[Transport, ProbeResponder] = {}


@pytest.fixture
def other() -> Iterator[Transport]:
    made = Transport(HOST, 10.0)
    responders[made] = ProbeResponder(made, torch.device("cpu"))
    yield made
    made.close()


def peer_of(other: Transport, **changes: Any) -> ProbePeer:
    return replace(ProbePeer(worker="w1", link=other.address, link_key=other.key), **changes)


def measured(peer: ProbePeer) -> list[LinkSample]:
    return measure_links(peer, HIDDEN, torch.float32, torch.device("cpu"), HOST, rows=(1, 16))


def test_hops_and_sums_are_measured_at_a_few_sizes(other: Transport) -> None:
    found = measured(peer_of(other))
    assert [(one.kind, one.nbytes) for one in found] == [
        (kind, rows * HIDDEN * 4) for kind in ("hop", "all_reduce") for rows in (1, 16)
    ]
    assert all(len(one.seconds) == links.ROUNDS and min(one.seconds) > 0 for one in found)


def test_a_worker_can_be_asked_again_and_keeps_nothing(other: Transport) -> None:
    before = threading.active_count()
    for _ in range(2):
        assert len(measured(peer_of(other))) == 4
    assert wait_until(lambda: threading.active_count() <= before)


def test_ranks_of_two_hosts_are_none_so_only_hops_are_measured(other: Transport) -> None:
    assert {one.kind for one in measured(peer_of(other, shares_host=False))} == {"hop"}


def test_nobody_there_or_with_another_key_gives_no_samples(other: Transport) -> None:
    assert measured(peer_of(other, link_key=os.urandom(32))) == []
    other.close()
    assert measured(peer_of(other)) == []


def test_one_that_is_silent_is_not_waited_for_long(other: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PATIENCE_S", 0.3)
    monkeypatch.setattr(links.ProbeResponder, "_take", lambda *_: None)
    assert measured(peer_of(other)) == []


def test_one_that_measures_with_another_already_says_so_and_the_hops_stay(
    other: Transport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "PATIENCE_S", 0.3)
    with responders[other]._measures:
        assert {one.kind for one in measured(peer_of(other))} == {"hop"}
    assert "another worker measures with it already" in caplog.text


def test_one_that_leaves_in_the_middle_ends_it(other: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, answered = links.ProbeResponder._take, 0

    def leaves(self: links.ProbeResponder, link: Link, message: Any, behind: torch.Tensor) -> None:
        nonlocal answered
        answered += 1
        answer(self, link, message, behind) if answered < 20 else link.close()

    monkeypatch.setattr(links.ProbeResponder, "_take", leaves)
    assert measured(peer_of(other)) == []


def test_a_dtype_that_no_model_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.int8: these are known: torch\.float32"):
        links.tensors_for([4], "torch.int8", torch.device("cpu"))


def wait_until(holds: Callable[[], bool], within_s: float = 5.0) -> bool:
    waited = threading.Event()
    for _ in range(int(within_s / 0.05)):
        if holds():
            return True
        waited.wait(0.05)
    return False

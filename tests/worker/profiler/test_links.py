"""What two workers say to each other is measured, in bounded time, and never holds a profile up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from bus.deployments import LinkSample, Peer
from worker.pipeline import probe
from worker.pipeline.hop import Hop
from worker.pipeline.stages import Stages
from worker.profiler import links
from worker.profiler.links import measure_links

HOST = "127.0.0.1"
HIDDEN = 64


@pytest.fixture
def stages() -> Iterator[Stages]:
    made = Stages(HOST, 10.0, is_gpu=False)
    yield made
    made.close()


def peer_of(stages: Stages, **changes: Any) -> Peer:
    return replace(Peer(worker="w1", door=stages.address, door_key=stages.key), **changes)


def measured(peer: Peer) -> list[LinkSample]:
    return measure_links(peer, HIDDEN, torch.float32, torch.device("cpu"), HOST, rows=(1, 16))


def test_hops_and_sums_are_measured_at_a_few_sizes(stages: Stages) -> None:
    found = measured(peer_of(stages))
    assert [(one.kind, one.nbytes) for one in found] == [
        (kind, rows * HIDDEN * 4) for kind in ("hop", "all_reduce") for rows in (1, 16)
    ]
    assert all(len(one.seconds) == links.ROUNDS and min(one.seconds) > 0 for one in found)


def test_a_worker_can_be_asked_again_and_keeps_nothing(stages: Stages) -> None:
    before = threading.active_count()
    for _ in range(2):
        assert len(measured(peer_of(stages))) == 4
    assert wait_until(lambda: threading.active_count() <= before)
    assert not stages.followers and not stages._early


def test_ranks_of_two_hosts_are_none_so_only_hops_are_measured(stages: Stages) -> None:
    assert {one.kind for one in measured(peer_of(stages, shares_host=False))} == {"hop"}


def test_nobody_there_or_with_another_key_gives_no_samples(stages: Stages) -> None:
    assert measured(peer_of(stages, door_key=os.urandom(32))) == []
    stages.close()
    assert measured(peer_of(stages)) == []


def test_one_that_is_silent_is_not_waited_for_long(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "PATIENCE_S", 0.3)
    monkeypatch.setattr(probe.Probed, "take", lambda *_: None)
    assert measured(peer_of(stages)) == []


def test_one_that_measures_with_another_already_says_so_and_the_hops_stay(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(probe, "PATIENCE_S", 0.3)
    with stages._probed._meets:
        assert {one.kind for one in measured(peer_of(stages))} == {"hop"}
    assert "another worker measures with it already" in caplog.text


def test_one_that_leaves_in_the_middle_ends_it(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, answered = probe.Probed.take, 0

    def leaves(self: probe.Probed, hop: Hop, message: Any, behind: torch.Tensor) -> None:
        nonlocal answered
        answered += 1
        answer(self, hop, message, behind) if answered < 20 else hop.close()

    monkeypatch.setattr(probe.Probed, "take", leaves)
    assert measured(peer_of(stages)) == []


def test_a_dtype_that_no_model_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.int8: these are known: torch\.float32"):
        probe.tensors_for([4], "torch.int8", torch.device("cpu"))


def wait_until(holds: Callable[[], bool], within_s: float = 5.0) -> bool:
    waited = threading.Event()
    for _ in range(int(within_s / 0.05)):
        if holds():
            return True
        waited.wait(0.05)
    return False

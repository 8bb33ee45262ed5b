"""Whom a worker that measures a model is told to measure its links with."""

from __future__ import annotations

from typing import Any

import pytest

from bus.catalogue import Contents
from bus.deployments import Measure, ModelCard, ProbePeer
from bus.messages import WorkerCard
from controller.deployments.observation import Observation, WorkerView
from controller.deployments.profiling import next_of_model

CARD = ModelCard(name="m", path="/m", digest="d", num_layers=4, state="registered")


def device(name: str, *, load: float = 0.0, **changes: Any) -> WorkerView:
    fields: dict[str, Any] = {
        "host": "h",
        "device": "cpu",
        "state": "serving",
        "link": f"{name}:1",
        "link_key": name.encode(),
        **changes,
    }
    return WorkerView(card=WorkerCard(id=name, epoch=1, pid=1, page_bytes=65536, **fields), load=load)


def peer_of(*devices: WorkerView, models: tuple[ModelCard, ...] = ()) -> ProbePeer | None:
    """The first is chosen to measure: it has the least to do."""
    contents = Contents()
    for card in models:
        contents = contents.with_record(card)
    seen = Observation(now_ms=0, workers={one.card.id: one for one in devices})
    transition = next_of_model(CARD, contents, seen)
    assert transition is not None
    ((worker, command),) = transition.commands
    assert worker == devices[0].card.id
    assert isinstance(command, Measure)
    return command.peer


def test_links_are_measured_with_the_idlest_worker_of_its_host_if_there_is_one() -> None:
    far, near = device("w1", host="elsewhere"), device("w2", load=0.5)
    assert peer_of(device("w0"), far, near) == ProbePeer(worker="w2", link="w2:1", link_key=b"w2")
    assert peer_of(device("w0"), near, device("w3", load=0.2)) == ProbePeer(
        worker="w3", link="w3:1", link_key=b"w3"
    )


def test_with_one_of_another_host_only_hops_can_be_measured() -> None:
    assert peer_of(device("w0"), device("w1", host="elsewhere")) == ProbePeer(
        worker="w1", link="w1:1", link_key=b"w1", shares_host=False
    )


@pytest.mark.parametrize("changes", [{"link": ""}, {"state": "draining"}, {"device": "cuda:0", "load": 0.1}])
def test_a_worker_that_cannot_take_part_is_not_asked(changes: dict[str, Any]) -> None:
    assert peer_of(device("w0"), device("w1", **{"load": 0.0, **changes})) is None


def test_a_worker_that_measures_another_model_is_not_disturbed() -> None:
    other = ModelCard(name="n", path="/n", digest="d", num_layers=4, state="profiling", worker="w1", epoch=1)
    assert peer_of(device("w0"), device("w1"), models=(other,)) is None
    assert peer_of(device("w0")) is None

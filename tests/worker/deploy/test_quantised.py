"""A worker that serves a checkpoint which is AWQ or GPTQ alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.morphs import Resize, Swap
from controller.morphing.resting import Rest, rest_of
from tests.support.deploy_models import Place, settings_for, write_model
from tests.support.engine_toys import Client
from tests.support.ready_models import Ready

PROMPTS = {"a": [1, 2, 3], "b": [5, 4, 3, 2, 1, 9, 8, 7], "c": [50]}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "full", 1)


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "activation-ordered"])
def ready(
    request: pytest.FixtureRequest, full: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The quantised checkpoint and its dense twin."""
    made, folder = Ready(full, is_ordered=request.param), tmp_path_factory.mktemp("ready")
    return made.write(folder / "q"), made.write_twin(folder / "twin")


def answers(place: Place, model: str = "first") -> dict[str, list[int]]:
    for name, prompt in PROMPTS.items():
        place.submit(name, model, prompt, 20)
    place.run()
    return place.client.tokens


@pytest.fixture
def expected(ready: tuple[Path, Path], tmp_path: Path) -> dict[str, list[int]]:
    place = Place(settings_for(ready[1], tmp_path, variants=[]))
    found = answers(place)
    place.close()
    return found


@pytest.fixture
def place(ready: tuple[Path, Path], tmp_path: Path) -> Iterator[Place]:
    made = Place(settings_for(ready[0], tmp_path))
    yield made
    made.check()
    made.close()


def test_it_serves_what_its_dense_twin_does_without_a_full_checkpoint(
    place: Place, expected: dict[str, list[int]], full: Path, tmp_path: Path
) -> None:
    hosted = place.model_host.models["first@w0"]
    assert hosted.card.variants == ["int4"] and hosted.card.precision == "int4" == hosted.card.best
    assert place.engine.instances["first@w0"].shape_id == "tp1-int4x2"
    assert answers(place) == expected
    dense = Place(settings_for(full, tmp_path))
    assert place.counts().weights < 0.6 * dense.counts().weights  # embedding and head are full in both
    assert place.model_host.reserve_pages == 0 < dense.model_host.reserve_pages
    dense.close()


@pytest.mark.parametrize("variants", [[], ["int8"]])
def test_a_worker_without_its_precision_among_the_variants_serves_it_too(
    variants: list[str], ready: tuple[Path, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    place = Place(settings_for(ready[0], tmp_path, variants=variants))
    assert answers(place) == expected
    place.close()


def test_a_morph_to_another_precision_is_refused_by_name(place: Place) -> None:
    for precision in ("full", "int8"):
        swap = place.begin(Swap, epoch=0, instance="first@w0", precision=precision, layers=[0])
        end = place.end_of(swap)
        assert end.state == "failed"
        assert end.reason == f"this instance has no {precision} variant; it has int4"
    resize = place.begin(Resize, epoch=0, instance="first@w0", blocks=20)
    assert place.end_of(resize).state == "applied"


def test_it_comes_and_goes_beside_another(
    ready: tuple[Path, Path], full: Path, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    place = Place(settings_for(full, tmp_path))
    before = place.counts()
    refused = place.end_of(place.deploy("second", ready[0], precision="int8"))
    assert refused.state == "failed"
    assert refused.reason.endswith("the checkpoint has its layers in int4 alone, not in int8")
    for precision in ("full", "int4"):  # as it is
        assert place.end_of(place.deploy("second", ready[0], precision=precision)).state == "applied"
        assert place.engine.instances["second@w0"].shape_id == "tp1-int4x2"
        place.client = Client()
        assert answers(place, "second") == expected
        assert place.end_of(place.retire("second")).state == "applied"
        assert place.counts() == before
    place.close()


def test_its_layers_rest_where_they_are_and_have_nothing_to_give(place: Place) -> None:
    hosted = place.model_host.models["first@w0"]
    assert rest_of(hosted.card, {}) == Rest(precision="int4")
    target = hosted.target
    assert target.losses.precisions == ["int4"] and target.saved_pages == 0
    assert target.losses.total(target.halves) == 0.0
    assert hosted.card.losses == {"int4": 0.0} and not hosted.card.losses_assumed

"""Models that come to a running worker and go again: what they compute, what they take and give back."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.checkpoints import folder_digest
from bus.messages import RejectReason, Stage
from bus.morphs import Swap
from tests.support.deploy_models import Place, settings_for, write_model
from worker.deploy.loader import ModelLoader

PROMPTS = {"a": [1, 2, 3], "b": [5, 4, 3, 2, 1, 9, 8, 7], "c": [50]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "first": write_model(folder / "first", 1),
        "second": write_model(folder / "second", 2, num_hidden_layers=3, num_key_value_heads=4),
    }


@pytest.fixture
def place(folders: dict[str, Path], tmp_path: Path) -> Iterator[Place]:
    made = Place(settings_for(folders["first"], tmp_path))
    yield made
    made.check()
    made.close()


def alone(folder: Path, host_dir: Path, precision: Any = "full", **changes: Any) -> dict[str, list[int]]:
    """Return what a worker of this model alone answers."""
    place = Place(settings_for(folder, host_dir, **changes))
    if precision != "full":
        swap = place.begin(Swap, epoch=0, instance="first@w0", precision=precision, layers=[0, 1, 2])
        assert place.end_of(swap).state == "applied"
    for name, prompt in PROMPTS.items():
        place.submit(name, "first", prompt, 20)
    place.run()
    place.close()
    return place.client.tokens


@pytest.mark.parametrize("variants", [["int8", "int4"], []], ids=["with variants", "without"])
def test_both_models_answer_as_each_does_alone(
    folders: dict[str, Path], tmp_path: Path, variants: list[str]
) -> None:
    place = Place(settings_for(folders["first"], tmp_path, variants=variants))
    place.submit("before", "first", [7, 7, 7], 50)
    assert place.end_of(place.deploy("second", folders["second"])).state == "applied"
    for name, prompt in PROMPTS.items():
        place.submit(f"1{name}", "first", prompt, 20)
        place.submit(f"2{name}", "second", prompt, 20)
    place.run()
    first, second = (alone(folders[name], tmp_path, variants=variants) for name in ("first", "second"))
    for name in PROMPTS:
        assert place.client.tokens[f"1{name}"] == first[name]
        assert place.client.tokens[f"2{name}"] == second[name]
    place.check()
    place.close()


def test_a_model_whose_variants_are_on_a_disk_serves_and_swaps_as_one_in_memory(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails in the middle of a swap ends it with its name, and the old variants serve on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    changes: dict[str, Any] = {"host_memory_mb": 1, "disk_dir": str(disk), "prefix_cache": False}
    place = Place(settings_for(folders["second"], tmp_path, **changes))
    assert len(list(disk.glob("*.images"))) == 1 and not list(tmp_path.glob("*.images"))
    order = {"epoch": 0, "instance": "first@w0", "layers": [0, 1, 2]}
    for name, prompt in PROMPTS.items():
        place.submit(f"full {name}", "first", prompt, 20)
    place.step(3)

    def fail(*given: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "preadv", fail)
        end = place.end_of(place.begin(Swap, **order, precision="int4"))
    assert (end.state, end.numbers.get("halves_applied")) == ("failed", 0), end
    assert re.search(
        r"ImageLost: attention of layer 0 in int4: .*\.images: cannot read .*Input/output", end.reason
    )
    place.run()
    place.check()
    end = place.end_of(place.begin(Swap, **order, precision="int4"))
    assert end.state == "applied" and end.numbers["bytes_from_disk"] == end.numbers["bytes_copied"] > 0
    assert end.numbers["disk_seconds"] > 0
    for name, prompt in PROMPTS.items():
        place.submit(f"int4 {name}", "first", prompt, 20)
    place.run()
    for precision in ("full", "int4"):
        known = alone(folders["second"], tmp_path, precision)
        assert {name: place.client.tokens[f"{precision} {name}"] for name in PROMPTS} == known
    assert place.end_of(place.begin(Swap, **order, precision="full")).state == "applied"
    place.check()
    place.close()
    assert not list(disk.glob("*.images"))


def test_a_model_can_come_with_its_kv_cache_in_8_bits(
    place: Place, folders: dict[str, Path], tmp_path: Path
) -> None:
    assert place.end_of(place.deploy("second", folders["second"], kv_dtype="int8")).state == "applied"
    assert place.engine.instances["second@w0"].shape_id == "tp1-full-kv8"
    assert str(folders["second"]) not in Path("/proc/self/maps").read_text(), "its checkpoint is closed"
    for name, prompt in PROMPTS.items():
        place.submit(name, "second", prompt, 20)
    place.run()
    assert place.client.tokens == alone(folders["second"], tmp_path, kv_dtype="int8")


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_a_model_can_come_in_fewer_bits_and_go_back_to_full(
    place: Place, folders: dict[str, Path], tmp_path: Path, precision: Any
) -> None:
    end = place.end_of(place.deploy("second", folders["second"], precision=precision))
    assert end.state == "applied"
    assert place.engine.instances["second@w0"].shape_id == f"tp1-{precision}x3"
    for name, prompt in PROMPTS.items():
        place.submit(name, "second", prompt, 20)
    place.run()
    assert place.client.tokens == alone(folders["second"], tmp_path, precision)
    swap = place.begin(Swap, epoch=0, instance="second@w0", precision="full", count=3)
    assert place.end_of(swap).state == "applied"
    place.submit("full", "second", PROMPTS["b"], 20)
    place.run()
    assert place.client.tokens["full"] == alone(folders["second"], tmp_path)["b"]


def test_every_page_is_back_where_it_was_when_a_model_is_gone(place: Place, folders: dict[str, Path]) -> None:
    before, blocks = place.counts(), place.model_host.models["first@w0"].target.resizer.cache.num_blocks
    for precision in ("full", "int4"):
        assert place.end_of(place.deploy("second", folders["second"], precision=precision)).state == "applied"
        assert place.counts().weights > before.weights
        end = place.end_of(place.retire("second"))
        assert (end.state, end.kind) == ("applied", "retire")
        assert place.counts() == before
        assert place.model_host.models["first@w0"].target.resizer.cache.num_blocks == blocks
    assert list(place.engine.instances) == ["first@w0"]


def test_the_last_model_can_go_and_another_one_come(place: Place, folders: dict[str, Path]) -> None:
    assert place.end_of(place.retire("first")).state == "applied"
    assert place.counts().free == place.counts().budget
    assert place.end_of(place.deploy("second", folders["second"])).state == "applied"
    place.submit("a", "second", [1, 2, 3])
    place.run()
    assert len(place.client.tokens["a"]) == 8


def test_a_worker_may_begin_without_a_model(folders: dict[str, Path], tmp_path: Path) -> None:
    place = Place(settings_for(Path(), tmp_path, models=[], may_be_empty=True))
    assert place.counts().free == place.counts().budget
    assert place.end_of(place.deploy("first", folders["first"])).state == "applied"
    for name, prompt in PROMPTS.items():
        place.submit(name, "first", prompt, 20)
    place.run()
    assert place.client.tokens == alone(folders["first"], tmp_path)
    place.close()


# --------------------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("fields", "state", "says"),
    [
        ({"epoch": 7}, "stale", "epoch 7"),
        ({"precision": "int3"}, "failed", "no int3 variants; there are full, int8, int4"),
        ({"digest": "f" * 32}, "failed", "not the checkpoint that was planned with"),
        ({"path": "/nowhere"}, "failed", "/nowhere"),
        ({"max_model_len": 65}, "failed", "ends at 64"),
        ({"instance": "first@w0"}, "conflict", "is served here already"),
        ({"stages": [Stage(workers=["w0"], first=0, end=1)] * 2}, "failed", "cannot be reached"),
        ({"blocks": 100_000}, "failed", "are missing"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(
    place: Place, folders: dict[str, Path], fields: dict[str, Any], state: str, says: str
) -> None:
    before = place.counts()
    end = place.end_of(place.deploy("second", folders["second"], **fields))
    assert end.state == state and says in end.reason, end
    assert place.counts() == before and list(place.engine.instances) == ["first@w0"]
    good = place.deploy("second", folders["second"], digest=folder_digest(folders["second"]))
    assert place.end_of(good).state == "applied"


def test_a_model_that_does_not_fit_says_what_is_missing_and_who_has_it(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    place = Place(settings_for(folders["first"], tmp_path, memory_mb=1, variants=[]))
    before = place.counts()
    end = place.end_of(place.deploy("second", folders["second"]))
    assert end.state == "failed" and "first@w0 has" in end.reason
    assert end.numbers["pages_missing"] > 0 and end.numbers["pages_needed"] > end.numbers["pages_free"]
    assert place.counts() == before
    place.check()
    place.close()


@pytest.mark.parametrize("after", range(1, 40, 3))
def test_a_deploy_that_is_called_off_at_any_time_leaves_nothing(
    place: Place, folders: dict[str, Path], after: int
) -> None:
    before = place.counts()
    morph = place.deploy("second", folders["second"], precision="int8")
    for _ in range(after):
        place.step()
    place.morphs.cancel(morph)
    end = place.end_of(morph)
    assert end.state in ("failed", "applied")
    if end.state == "failed":
        assert place.counts() == before
        assert list(place.engine.instances) == ["first@w0"]


def test_another_epoch_ends_a_deploy(place: Place, folders: dict[str, Path]) -> None:
    before = place.counts()
    morph = place.deploy("second", folders["second"])
    place.step(5)
    place.morphs.fence(3)
    assert "epoch 0 ended" in place.end_of(morph).reason
    assert place.counts() == before
    assert place.end_of(place.deploy("second", folders["second"], epoch=3)).state == "applied"


def test_a_worker_that_drains_takes_no_model(place: Place, folders: dict[str, Path]) -> None:
    morph = place.deploy("second", folders["second"])
    place.step(3)
    place.morphs.refuse_deploys("w0 is draining")
    assert (place.end_of(morph).state, place.end_of(morph).reason) == ("failed", "w0 is draining")
    end = place.end_of(place.deploy("second", folders["second"]))
    assert (end.state, end.reason) == ("conflict", "w0 is draining")


def test_two_that_come_at_once_come_one_after_the_other(place: Place, folders: dict[str, Path]) -> None:
    one = place.deploy("second", folders["second"], wait_s=10)
    other = place.deploy("third", folders["first"], wait_s=10)
    assert place.end_of(one).state == place.end_of(other).state == "applied"
    assert list(place.engine.instances) == ["first@w0", "second@w0", "third@w0"]


@pytest.mark.parametrize("variants", [["int8"], []], ids=["with variants", "without"])
def test_a_checkpoint_that_changes_while_it_is_read_is_not_served(
    tmp_path: Path, folders: dict[str, Path], variants: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = write_model(tmp_path / "changing", 3)
    place = Place(settings_for(folders["first"], tmp_path, variants=variants))
    before = place.counts()
    reserve = ModelLoader.reserve_rest

    def replaced(newcomer: ModelLoader) -> None:
        reserve(newcomer)
        os.utime(changing / "model.safetensors", ns=(1, 1))

    monkeypatch.setattr(ModelLoader, "reserve_rest", replaced)
    for digest in (folder_digest(changing), ""):
        end = place.end_of(place.deploy("changing", changing, digest=digest))
        assert end.state == "failed" and "is not the checkpoint that was planned with" in end.reason
        os.utime(changing / "model.safetensors", ns=(2, 2))
    assert place.counts() == before and list(place.engine.instances) == ["first@w0"]
    place.check()
    place.close()


# --------------------------------------------------------------------------- going with requests


def test_what_runs_is_finished_before_a_model_goes(place: Place, folders: dict[str, Path]) -> None:
    place.end_of(place.deploy("second", folders["second"]))
    place.submit("a", "second", [1, 2, 3], 30)
    place.step(3)
    end = place.end_of(place.retire("second"))
    assert end.state == "applied" and end.numbers["requests_sent_away"] == 0
    assert len(place.client.tokens["a"]) == 30 and place.client.ends["a"] == "length"


def test_what_is_not_finished_in_time_is_told_to_go_on_elsewhere(
    place: Place, folders: dict[str, Path]
) -> None:
    place.end_of(place.deploy("second", folders["second"]))
    for name in ("a", "b"):
        place.submit(name, "second", [1, 2, 3], 50)
    place.submit("c", "first", [1, 2, 3], 50)
    place.step(3)
    end = place.end_of(place.retire("second", wait_s=0.0))
    assert end.numbers["requests_sent_away"] == 2
    place.submit("late", "second", [1])
    place.run()
    for name in ("a", "b", "late"):
        assert place.client.reject_reasons[name] is RejectReason.RETIRED
    assert len(place.client.tokens["c"]) == 50

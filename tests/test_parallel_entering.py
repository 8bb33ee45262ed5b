"""The last moment before workers are one: who goes then costs the groups of now, no worker and no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.group_workers import GroupWorker, transform, workers
from tests.model_folders import make_oracle
from tests.test_parallel_workers import Load
from worker.parallel.grouping import Gathering, Grouping


@pytest.fixture(scope="module")
def model() -> Any:
    return make_oracle("llama", num_hidden_layers=2, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    model.save_pretrained(made)
    return made


def after_the_order(grouping: Grouping, gathering: Gathering) -> None:
    grouping.dismiss(gathering, "a member was lost")


def before_the_order(_: Grouping, gathering: Gathering) -> None:
    gathering.lost = "w1: gone"


def once(grouping: Grouping, first: Callable[..., None] | None, then: Callable[..., None] | None) -> None:
    """In front of, or behind, the order to enter."""
    plain = grouping.enter

    def enter(gathering: Gathering, blocks: int) -> None:
        grouping.enter = plain  # type: ignore[method-assign]
        if first:
            first(grouping, gathering)
        plain(gathering, blocks)
        if then:
            then(grouping, gathering)

    grouping.enter = enter  # type: ignore[method-assign]


def check_alone(each: list[GroupWorker], load: Load) -> None:
    load.check()
    for worker in each:
        worker.wait(lambda w=worker: w.grouping.party is None, "its group's end")  # type: ignore[misc]
        worker.check()
        assert worker.instance.tp == 1


def test_a_member_lost_right_before_two_enter_is_not_waited_for(folder: Path, model: Any) -> None:
    with workers(folder, 2) as each:
        load = Load(each, model)
        once(each[0].grouping, before_the_order, None)
        assert load.during(each[0], transform(each, 2)).state == "failed"
        check_alone(each, load)
        assert load.during(each[0], transform(each, 2)).state == "applied"
        assert load.during(each[0], transform(each, 1)).state == "applied"


@pytest.mark.parametrize(("first", "then"), [(before_the_order, None), (None, after_the_order)])
def test_a_member_lost_as_two_groups_enter_leaves_four_that_serve_alone(
    folder: Path, model: Any, first: Any, then: Any
) -> None:
    with workers(folder, 4) as each:
        load = Load(each, model, per_worker=1)
        in_order = [each[0], each[2], each[1], each[3]]  # of the shards: subgroups 0 1 and 2 3
        for pair in (each[:2], each[2:]):
            assert load.during(pair[0], transform(pair, 2)).state == "applied"
        once(each[0].grouping, first, then)
        assert load.during(each[0], transform(in_order, 4)).state in ("failed", "deferred")
        check_alone(each, load)

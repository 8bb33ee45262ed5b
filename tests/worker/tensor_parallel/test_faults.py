"""A member raises, goes or hangs, at any stage of a transformation: the others serve alone, and every answer
is whole and right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.group_workers import GroupWorker, model_fixtures, transform, workers
from tests.worker.tensor_parallel.test_workers import Load
from worker.memory import MappingFailed
from worker.model.linear import Linear
from worker.model.shard import Shard

LAYERS = 3
SLOW = [pytest.mark.faults, pytest.mark.slow]
pytestmark = SLOW


model, folder = model_fixtures(num_hidden_layers=LAYERS)


class Fault:
    """Strikes once, when its worker's boundary is at `boundary` while the group grows or not."""

    def __init__(self, worker: GroupWorker, boundary: int, *, grows: bool) -> None:
        self.worker, self.boundary, self.grows = worker, boundary, grows
        self.has_struck = threading.Event()

    def strikes(self) -> bool:
        executor = self.worker.grouping.executor
        formation = executor and executor.formation
        if not formation or formation.is_uniform or formation.grows != self.grows:
            return False
        if formation.boundary != self.boundary or self.has_struck.is_set():
            return False
        self.has_struck.set()
        return True


def before(place: Any, verb: str, fault: Fault, strike: Callable[[], None]) -> None:
    """`strike` comes in front of `place.verb` when the fault's moment has come."""
    plain = getattr(place, verb)

    def verb_with_fault(*args: Any, **options: Any) -> Any:
        if fault.strikes():
            strike()
        return plain(*args, **options)

    setattr(place, verb, verb_with_fault)


def come_and_go(each: list[GroupWorker], load: Load) -> list[str]:
    """Up and down while requests run; how each ended."""
    return [load.during(each[0], transform(each, tp)).state for tp in (len(each), 1)]


def check_alone(each: list[GroupWorker], load: Load) -> None:
    load.check()
    for worker in each:
        worker.wait(lambda w=worker: w.grouping.executor is None, "its group's end")  # type: ignore[misc]
        worker.check()
        assert all(layer.shard == Shard() for layer in worker.model.layers)
        assert worker.instance.tp == 1


@pytest.mark.parametrize(
    ("who", "boundary", "grows"),
    [
        (1, 2, True),
        *(
            pytest.param(0, *when, marks=SLOW)
            for when in [(3, True), (2, True), (1, True), (3, False), (1, False)]
        ),
        *(pytest.param(1, *when, marks=SLOW) for when in [(3, True), (1, True), (3, False), (1, False)]),
    ],
)
def test_a_step_that_raises_at_one_rank_costs_the_group_and_no_request(
    folder: Path, model: Any, who: int, boundary: int, grows: bool
) -> None:
    with workers(folder, 2) as each:
        load = Load(each, model)
        fault = Fault(each[who], boundary, grows=grows)

        def strike() -> None:
            raise RuntimeError("a kernel is out of order")

        before(each[who].model, "forward_segments", fault, strike)
        ended = come_and_go(each, load)
        assert fault.has_struck.is_set()
        assert "failed" in ended, ended
        check_alone(each, load)
        assert sum(worker.instance.scheduler.num_recomputed for worker in each) > 0
        # And it can be done again.
        assert come_and_go(each, load) == ["applied", "applied"]
        check_alone(each, load)


@pytest.mark.parametrize(
    ("verb", "boundary", "grows"),
    [
        ("map", 3, False),
        pytest.param("narrow", 3, True, marks=SLOW),
        pytest.param("narrow", 2, True, marks=SLOW),
        pytest.param("widen", 2, False, marks=SLOW),
        pytest.param("fill", 3, False, marks=SLOW),
    ],
)
def test_pages_that_cannot_be_had_at_one_rank_cost_the_group_and_no_request(
    folder: Path, model: Any, verb: str, boundary: int, grows: bool
) -> None:
    with workers(folder, 2) as each:
        load = Load(each, model)
        fault = Fault(each[1], boundary, grows=grows)

        def strike() -> None:
            raise MappingFailed("no memory behind this address")

        before(each[1].grouping.local.weights, verb, fault, strike)
        ended = come_and_go(each, load)
        assert fault.has_struck.is_set()
        assert "failed" in ended, ended
        check_alone(each, load)


@pytest.mark.parametrize(("boundary", "grows"), [(2, True), pytest.param(2, False, marks=SLOW)])
def test_a_rank_that_hangs_is_given_up(folder: Path, model: Any, boundary: int, grows: bool) -> None:
    """The others wait as long as the group's timeout says. It comes back, and finds itself alone."""
    with workers(folder, 2, timeout_s=2.0) as each:
        load = Load(each, model)
        fault = Fault(each[1], boundary, grows=grows)
        wakes = threading.Event()

        def hang() -> None:
            wakes.wait(30)

        before(each[1].model, "forward_segments", fault, hang)
        ended = []
        for tp in (2, 1):
            ended.append(load.during(each[0], transform(each, tp)).state)
            if fault.has_struck.is_set():
                each[0].wait(lambda: each[0].grouping.executor is None, "its group's end")
                wakes.set()
        assert "failed" in ended, ended
        check_alone(each, load)


@pytest.mark.parametrize(
    ("boundary", "grows"),
    [pytest.param(*when, marks=SLOW) for when in [(1, True), (3, True), (2, False)]],
)
def test_a_rank_that_goes_leaves_the_other_whole(
    folder: Path, model: Any, boundary: int, grows: bool
) -> None:
    with workers(folder, 2) as each:
        stays, goes = each
        load = Load([stays], model)
        goes.submit("lost", [1, 2, 3], 500)
        fault = Fault(goes, boundary, grows=grows)

        def leave() -> None:
            goes.grouping.close()
            raise SystemExit  # its thread ends where it stands

        before(goes.model, "forward_segments", fault, leave)
        for tp in (2, 1):
            load.during(stays, transform(each, tp))
        assert fault.has_struck.is_set()
        goes.death = None
        check_alone([stays], load)
        goes.engine = stays.engine  # nothing of it is there to be checked
        each.remove(goes)


def test_a_transform_that_cannot_have_its_blocks_changes_nothing(folder: Path, model: Any) -> None:
    """Apart, each keeps its own: what one has in use must fit its own cache."""
    with workers(folder, 2, megabytes=1.2) as each:
        load = Load([each[1]], model)
        alone = each[0].instance.scheduler.blocks.capacity * 4
        assert each[0].end_of(transform(each, 2)).state == "applied"
        each[0].submit("long", [i % 211 for i in range(alone + 40)], 300)
        each[0].wait(lambda: bool(each[0].tokens["long"]), "the long request")
        report = each[0].end_of(transform(each, 1))
        assert report.state == "deferred"
        assert report.numbers["blocks_used"] > report.numbers["blocks_room"], report
        assert each[0].instance.tp == 2
        each[0].wait_ends("long")
        assert each[0].end_of(transform(each, 1)).state == "applied"
        check_alone(each, load)


def test_orders_that_meet_are_a_conflict(folder: Path, model: Any) -> None:
    with workers(folder, 3) as each:
        load = Load(each, model)
        first = transform([each[0], each[1]], 2)
        second = transform([each[2], each[1]], 2)
        again = transform([each[0], each[2]], 2)
        ends = [each[0].end_of(first), each[2].end_of(second), each[0].end_of(again)]
        states = sorted(end.state for end in ends)
        assert states.count("applied") <= 1 and set(states) <= {"applied", "conflict", "failed"}, ends
        for end in (end for end in ends if end.state == "applied"):  # none, where each was busy with its own
            members = [each[int(name[1:])] for name in end.workers]
            assert load.during(members[0], transform(members, 1)).state == "applied"
        check_alone(each, load)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=SLOW)])
def test_a_group_whose_shape_computes_something_else_never_takes_a_new_request(
    folder: Path, model: Any, rank: int
) -> None:
    """One rank takes the other's rows of an FFN: all numbers look like numbers."""
    with workers(folder, 2) as each:
        weights = each[rank].grouping.local.weights
        plain = weights.narrow

        def narrow_wrongly(layer: int, shard: Shard) -> int:
            freed = plain(layer, shard)
            if layer == 1:
                down: Linear = each[rank].model.layers[1].feed_forward.down  # type: ignore[assignment]
                for _, matrix in down.dense():
                    matrix.neg_()
            return freed

        weights.narrow = narrow_wrongly  # type: ignore[method-assign]
        report = each[0].end_of(transform(each, 2))
        assert report.state == "failed" and "log-probability" in report.reason, report
        assert all(len(members) == 0 for worker in each for members, _ in worker.regrouped)
        for worker in each:
            worker.wait(lambda w=worker: w.grouping.executor is None, "its group's end")  # type: ignore[misc]

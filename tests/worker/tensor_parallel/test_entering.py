"""The last moment before workers are one, and before they part: who goes then costs the groups of now, no
worker and no token; who only was quicker costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.group_workers import GroupWorker, model_fixtures, transform, workers
from tests.worker.tensor_parallel.test_workers import Load
from worker.distributed.communicator import PeerLost
from worker.distributed.messages import EndSplit, GroupMessage, Prepare, Step
from worker.distributed.transport import Link
from worker.model.shard import Shard
from worker.morph.run import NotApplied
from worker.parallel.grouping import Grouping
from worker.parallel.proposal import Proposal
from worker.parallel.transform import TransformRun
from worker.shape.copier import Pause

model, folder = model_fixtures(num_hidden_layers=2)


def after_the_order(grouping: Grouping, proposal: Proposal) -> None:
    grouping.change.abort(proposal, "a member was lost")


def before_the_order(_: Grouping, proposal: Proposal) -> None:
    proposal.lost = "w1: gone"


def once(grouping: Grouping, first: Callable[..., None] | None, then: Callable[..., None] | None) -> None:
    """The message comes in front of, or behind, the order to enter."""
    plain = grouping.commit

    def commit(proposal: Proposal, blocks: int) -> None:
        grouping.commit = plain  # type: ignore[method-assign]
        if first:
            first(grouping, proposal)
        plain(proposal, blocks)
        if then:
            then(grouping, proposal)

    grouping.commit = commit  # type: ignore[method-assign]


def check_alone(each: list[GroupWorker], load: Load) -> None:
    load.check()
    for worker in each:
        worker.wait(lambda w=worker: w.grouping.executor is None, "its group's end")  # type: ignore[misc]
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


@pytest.mark.faults
@pytest.mark.slow
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


def slow_to_part(grouping: Grouping) -> None:
    """A member hears of the last step, and before it makes it, that the others have gone."""
    plain = grouping._take

    def take(link: Link, message: GroupMessage) -> None:
        plain(link, message)
        if isinstance(message, Step) and any(isinstance(action, EndSplit) for action in message.after):
            time.sleep(0.5)

    grouping._take = take  # type: ignore[method-assign]


def test_a_member_that_is_slow_to_part_has_lost_nobody(folder: Path) -> None:
    with workers(folder, 2) as each:
        slow_to_part(each[1].grouping)
        for tp in (2, 1):
            assert each[0].end_of(transform(each, tp)).state == "applied"
        each[1].wait(lambda: each[1].grouping.executor is None, "its group's end")
        assert [why for _, why in each[1].regrouped][1:] == ["the group has parted"]


@pytest.mark.faults
@pytest.mark.slow
def test_no_link_is_left_of_groups_of_groups_that_have_parted(folder: Path) -> None:
    with workers(folder, 4) as each:
        slow_to_part(each[1].grouping)
        in_order = [each[0], each[2], each[1], each[3]]
        for pair in (each[:2], each[2:]):
            assert pair[0].end_of(transform(pair, 2)).state == "applied"
        for tp in (4, 2):
            assert each[0].end_of(transform(in_order, tp)).state == "applied"
        for pair in (each[:2], each[2:]):
            pair[1].wait(lambda p=pair: p[1].instance.tp == 2 and p[1].thread.is_in_group, "its pair")  # type: ignore[misc]
            assert pair[0].end_of(transform(pair, 1)).state == "applied"
        for worker in each:
            worker.wait(lambda w=worker: w.grouping.executor is None, "its group's end")  # type: ignore[misc]
            assert not any("fell" in why for _, why in worker.regrouped), worker.regrouped

        def links() -> int:
            return sum(thread.name.startswith("link-") for thread in threading.enumerate())

        each[0].wait(lambda: links() == 0, "the end of all links", 10)


def test_a_parting_that_was_given_up_leaves_nothing_to_the_next_one(
    folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smaller groups had met already; the next order is for none."""

    def gives_up(self: TransformRun, *_: Any) -> Generator[bool, None, None]:
        monkeypatch.undo()
        yield False
        raise NotApplied("failed", "given up")

    with workers(folder, 4) as each:
        load = Load(each, model, per_worker=1)
        assert load.during(each[0], transform(each, 4)).state == "applied"
        monkeypatch.setattr(TransformRun, "_begin_split", gives_up)
        assert load.during(each[0], transform(each, 2)).reason == "given up"
        assert load.during(each[0], transform(each, 1)).state == "applied"
        assert sum(worker.instance.scheduler.num_recomputed for worker in each) == 0
        check_alone(each, load)


def test_an_order_of_a_group_that_falls_apart_ends_at_once(folder: Path) -> None:
    """The leader waited ten seconds for the answer of a member that is in no group with it any more."""
    with workers(folder, 2) as each:
        assert each[0].end_of(transform(each, 2)).state == "applied"
        take = each[1].grouping._take
        each[1].grouping._take = lambda link, message: (  # type: ignore[method-assign]
            None if isinstance(message, Prepare) else take(link, message)
        )
        order = transform(each, 1)
        each[0].wait(lambda: each[0].grouping.change.is_under_way, "the question")
        began = time.monotonic()
        each[0].call(lambda: each[0].grouping.fall_apart("a member was lost"))
        report = each[0].end_of(order)
        assert (report.state, report.reason) == ("failed", "a member was lost")
        assert time.monotonic() - began < 5


def test_taking_all_weights_back_is_no_hang_however_long_it_takes(folder: Path) -> None:
    with workers(folder, 2) as each:
        assert each[0].end_of(transform(each, 2)).state == "applied"
        thread, weights = each[0].thread, each[0].grouping.local.weights
        fill, since_progress, busy = weights.fill, list[float](), list[float]()

        def slow(layer: int, shard: Shard) -> Callable[[Pause], None]:
            def job(pause: Pause) -> None:
                fill(layer, shard)(pause)
                for _ in range(4):
                    time.sleep(0.1)
                    pause()
                    since_progress.append(thread.step_seconds())
                    busy.append(thread.busy_seconds())

            return job

        def fails() -> None:
            raise PeerLost("w1 is gone")

        def break_it() -> None:
            weights.fill = slow  # type: ignore[method-assign,assignment]
            each[0].grouping.executor.collect = fails  # type: ignore[method-assign,union-attr]

        each[0].call(break_it)
        each[0].wait(
            lambda: each[0].grouping.executor is None and len(since_progress) == 8, "its group's end"
        )
        assert max(since_progress) < 0.3 and busy == sorted(busy)
        assert busy[-1] - busy[0] > 0.5

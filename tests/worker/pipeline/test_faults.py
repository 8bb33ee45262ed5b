"""A stage that dies, hangs or fails costs its pipeline: requests go elsewhere, every page is given back."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.common.oracles import make_oracle
from bench.common.service import wait_for
from bus.messages import RejectReason, SamplingParams
from bus.precisions import KVPrecision
from tests.support.pipeline_workers import LIMITS, WAIT_S, Line, StageWorker, follow, load, release
from worker.distributed.messages import Peer
from worker.distributed.transport import Link
from worker.engine.outputs import Output
from worker.engine.sequence import own_request
from worker.model import ModelError
from worker.pipeline.build import start_leading
from worker.pipeline.pipeline import PipelineLost, RemoteStage


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    make_oracle("llama", num_hidden_layers=4, seed=3).save_pretrained(made)
    return made


def hang_up(link: Link) -> None:
    """Break the connection as the end of a process does."""
    link.is_closed = True
    assert link._socket
    link._socket.shutdown(socket.SHUT_RDWR)


def vanish(worker: StageWorker) -> None:
    """End as a process that is killed: connections end, and nothing is said."""
    worker.transport._listener.close()
    followers = worker.stages.runners
    for link in worker.stages._endpoint._links:
        hang_up(link)
    for each in followers:
        each._ranks.close()
    worker.thread.stop()


def let_go(line: Line) -> None:
    """Do what a worker does about a lost pipeline that it leads."""

    def gone(reason: str) -> None:
        line.leader.engine.remove_instance(line.id)
        line.release()

    line.instance.on_lost = gone


def busy(line: Line) -> list[str]:
    """Requests under way, and some that wait."""
    names = [str(i) for i in range(10)]
    for name in names:
        line.submit(name, [int(name) + 1] * 9, 200)
    line.leader.wait(lambda: any(line.leader.tokens.values()), "a first token")
    return names


def wait_empty(*workers: StageWorker) -> None:
    ends_at = time.monotonic() + WAIT_S
    while not all(worker.is_empty() for worker in workers):
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def check_all_went_elsewhere(line: Line, names: list[str], why: str) -> None:
    line.leader.wait_ends(*names)
    for name in names:
        assert line.leader.reject_reasons[name] is RejectReason.RETIRED
        assert why in line.leader.ends[name]


@pytest.mark.parametrize("which", [1, 2])
def test_a_stage_that_dies_ends_the_pipeline_and_nobody_keeps_a_page(folder: Path, which: int) -> None:
    with Line(folder, [0, 1, 3, 4]) as line:
        let_go(line)
        names = busy(line)
        vanish(line.workers[which])
        check_all_went_elsewhere(line, names, "gone")
        wait_empty(line.leader, line.workers[3 - which])
        line.submit("late", [1], 3)
        line.leader.wait_ends("late")
        assert line.leader.reject_reasons["late"] is RejectReason.RETIRED


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_rank_that_dies_ends_the_pipeline_and_nobody_keeps_a_page(folder: Path, which: int) -> None:
    with Line(folder, [0, 1, 4], tp=2) as line:
        let_go(line)
        names = busy(line)
        vanish(line.workers[which])
        check_all_went_elsewhere(line, names, "gone")
        wait_empty(*(worker for worker in line.workers if worker is not line.workers[which]))


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_a_rank_that_fails_in_a_step_leaves_no_other_in_its_sums(folder: Path, which: int) -> None:
    with Line(folder, [0, 1, 4], tp=2) as line:
        let_go(line)
        names = busy(line)
        worker = line.workers[which]
        model = worker.stages.runners[0].stage.model if which else line.model

        def poison(*args: Any) -> torch.Tensor:
            raise RuntimeError("a bad kernel")

        worker.call(lambda: setattr(model.layers[-1], "feed_forward", poison))
        check_all_went_elsewhere(line, names, "")
        wait_empty(*line.workers)


def test_a_leader_of_ranks_that_dies_leaves_no_page_anywhere(folder: Path) -> None:
    with Line(folder, [0, 1, 4], tp=2) as line:
        busy(line)
        for link in (rank.link for rank in line.executor.pipeline._ranks):
            hang_up(link)
        line.executor.ranks.close()
        line.leader.thread.stop()
        wait_empty(*line.workers[1:])


@pytest.mark.faults
@pytest.mark.slow
def test_a_rank_that_hangs_holds_the_others_no_longer_than_the_timeout(folder: Path) -> None:
    with Line(folder, [0, 1, 4], tp=2, timeout_s=2.5) as line:  # more than the second between signs of life
        let_go(line)
        names = busy(line)
        awake = threading.Event()

        def hang() -> None:
            awake.wait(WAIT_S)

        line.workers[1].thread._inbox.put(hang)
        began = time.monotonic()
        check_all_went_elsewhere(line, names, "rank of stage 0")
        assert time.monotonic() - began < 10
        awake.set()
        wait_empty(*line.workers)


def test_a_leader_that_dies_leaves_no_page_at_any_stage(folder: Path) -> None:
    with Line(folder, [0, 1, 3, 4]) as line:
        busy(line)
        for link in (rank.link for rank in line.executor.pipeline._ranks):
            hang_up(link)
        line.leader.thread.stop()
        wait_empty(*line.workers[1:])
        for worker in line.workers[1:]:  # a stage may hear of it first by the end of its neighbour
            assert "is gone" in worker.ended[line.id]


def test_pages_that_a_stage_gives_back_are_told_though_no_step_follows(folder: Path) -> None:
    with Line(folder, [0, 2, 4]) as line:
        let_go(line)
        busy(line)
        stage = line.workers[1]
        follower = stage.stages.runners[0]

        def end_behind_a_snapshot() -> None:
            stage.thread._report()  # the next is not due for a second
            follower._post(lambda: follower.end("it has had enough"))

        stage.call(end_behind_a_snapshot)
        wait_empty(stage)
        wait_for("the empty pool to be told", lambda: stage.told_pages == stage.pool.counts(), 10.0)


def test_a_step_that_fails_at_a_stage_says_why(folder: Path) -> None:
    with Line(folder, [0, 2, 4]) as line:
        let_go(line)
        names = busy(line)
        part = line.workers[1].stages.runners[0].stage

        def poison(*args: Any) -> torch.Tensor:
            raise RuntimeError("a bad kernel")

        line.workers[1].call(lambda: setattr(part.model, "run", poison))
        check_all_went_elsewhere(line, names, "a bad kernel")
        wait_empty(*line.workers)


def test_an_end_that_came_back_is_told_though_the_pipeline_is_lost_right_behind_it(folder: Path) -> None:
    with Line(folder, [0, 2, 4]) as line:
        let_go(line)
        instance, publish = line.instance, line.instance._publish

        def publish_and_lose(*args: Any) -> list[Output]:
            outputs = publish(*args)
            if any(output.delta.finish_reason for output in outputs):
                line.executor.pipeline._lost = "stage 1 is gone"
            return outputs

        line.leader.call(lambda: setattr(instance, "_publish", publish_and_lose))
        line.submit("short", [1, 2, 3], 3)
        line.submit("long", [4, 5, 6], 200)
        line.leader.wait_ends("short", "long")
        assert line.leader.ends["short"] == "length"
        assert len(line.leader.tokens["short"]) == 3
        assert line.leader.reject_reasons["long"] is RejectReason.RETIRED


def test_each_that_comes_to_a_lost_pipeline_is_told_once(folder: Path) -> None:
    with Line(folder, [0, 2, 4]) as line:
        instance, params = line.instance, SamplingParams(max_tokens=3, seed=0)

        def come() -> list[str]:
            instance.lost = "stage 1 is gone"
            for name in "abc":
                instance.submit(own_request(name, [1], params))
            return [output.request.request_id for output in instance.take_outputs()]

        assert line.leader.call(come) == ["a", "b", "c"]


def test_a_stage_that_hangs_counts_as_gone_after_the_timeout(folder: Path) -> None:
    with Line(folder, [0, 2, 4], timeout_s=2.5) as line:  # more than the second between signs of life
        let_go(line)
        names = busy(line)
        awake = threading.Event()

        def hang() -> None:
            awake.wait(WAIT_S)

        line.workers[1].thread._inbox.put(hang)
        check_all_went_elsewhere(line, names, "did not come back within 2.5 s")
        awake.set()
        wait_empty(*line.workers)


def test_a_stage_gives_its_pages_back_when_no_leader_comes(folder: Path) -> None:
    worker = StageWorker("w1")
    worker.call(partial(follow, folder, worker, "m@w0", (2, 4), join_within_s=0.05))
    wait_empty(worker)
    assert "no leader came" in worker.ended["m@w0"]
    worker.stop()


@pytest.mark.parametrize(
    ("layers", "epoch", "kv_dtype", "why"),
    [
        ((1, 4), 1, "full", "its range of layers is"),
        ((2, 4), 7, "full", "its worker's epoch is 7"),
        ((2, 4), 1, "int8", r"its KV cache \(kv_dtype\) is int8; w0 wants full"),
        ((2, 4), 1, "full", "1000000 KV blocks are wanted"),
    ],
)
def test_a_leader_that_does_not_fit_is_told_why_and_keeps_nothing(
    folder: Path, layers: tuple[int, int], epoch: int, kv_dtype: KVPrecision, why: str
) -> None:
    leader, worker = StageWorker("w0"), StageWorker("w1")
    limits = replace(LIMITS, kv_dtype=kv_dtype)
    worker.call(partial(follow, folder, worker, "m@w0", layers, epoch=epoch, limits=limits))
    lead(folder, leader, worker, worker.transport.key, why)
    worker.call(lambda: worker.stages.end("m@w0", "over"))
    wait_empty(leader, worker)
    leader.stop()
    worker.stop()


def test_a_stage_that_serves_other_lengths_is_refused(folder: Path, tmp_path: Path) -> None:
    """The stage's rotary tables have their rows elsewhere, or too few of them."""
    short = Path(shutil.copytree(folder, tmp_path / "short"))
    said = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(said | {"max_position_embeddings": 128}))
    leader, worker = StageWorker("w0"), StageWorker("w1")
    worker.call(partial(follow, short, worker, "m@w0", (2, 4)))
    why = r"longest sequence \(worker.max_model_len\) is 128; w0 wants"
    lead(folder, leader, worker, worker.transport.key, why)
    worker.call(lambda: worker.stages.end("m@w0", "over"))
    wait_empty(leader, worker)
    leader.stop()
    worker.stop()


def test_nobody_joins_without_the_key(folder: Path) -> None:
    leader, worker = StageWorker("w0"), StageWorker("w1")
    lead(folder, leader, worker, b"x" * 32, "w1 is gone")
    leader.stop()
    worker.stop()


def lead(folder: Path, leader: StageWorker, worker: StageWorker, key: bytes, why: str) -> None:
    model, cache, variants = load(folder, leader.pool, (0, 2), LIMITS, torch.float32)
    behind = [RemoteStage(2, 4, [Peer("w1", 1, worker.transport.address, key)])]
    steps = start_leading(
        "m@w0", "w0", model, cache, LIMITS, behind, blocks=10**6, timeout_s=5.0, wake=leader.wake
    )
    with pytest.raises((PipelineLost, ModelError), match=why):
        while True:
            next(steps)
            time.sleep(0.005)
    release(model, cache, variants)

"""The prefix cache in groups: what is found is right, whatever has happened to blocks and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.greedy import generate
from tests.support.group_workers import (
    BLOCK_TOKENS,
    GroupWorker,
    model_fixtures,
    resize,
    swap,
    transform,
    workers,
)
from tests.worker.tensor_parallel.test_workers import Load, prompt

BEGINNING = prompt(99, 12 * BLOCK_TOKENS)
N = 24


model, folder = model_fixtures(num_hidden_layers=3)


def applied(leader: GroupWorker, morph: str) -> None:
    report = leader.end_of(morph)
    assert report.state == "applied", report


def ask(worker: GroupWorker, name: str, beginning: list[int]) -> tuple[list[int], int]:
    """Return the answer to a prompt of 3 tokens after `beginning`, and how many tokens were found."""
    worker.submit(name, [*beginning, 1, 2, 3], N)
    worker.wait_ends(name)
    return worker.tokens[name], worker.cached[name]


def test_what_runs_while_workers_come_together_and_part_is_found_in_each_degree(
    folder: Path, model: Any
) -> None:
    right = generate(model, [*BEGINNING, 1, 2, 3], N)
    with workers(folder, 2, prefix_cache=True) as each:
        w0, w1 = each
        assert ask(w0, "first", BEGINNING) == (right, 0)
        assert ask(w0, "again", BEGINNING) == (right, len(BEGINNING))
        assert ask(w1, "elsewhere", BEGINNING) == (right, 0)
        for worker in each:
            worker.submit("runs through", [*BEGINNING, 7], 600)
        applied(w0, transform(each, 2))
        for worker in each:
            assert ask(worker, "in the group", BEGINNING) == (right, len(BEGINNING))
        applied(w0, resize(w0, w0.instance.scheduler.blocks.capacity // 2))
        for worker in each:
            assert ask(worker, "in half of it", BEGINNING) == (right, len(BEGINNING))
        applied(w0, transform(each, 1))
        w1.wait_degree(1)
        for worker in each:
            assert "runs through" not in worker.ends, "it is to outlast the group"
            assert ask(worker, "alone again", BEGINNING) == (right, len(BEGINNING))
            worker.thread.cancel(["runs through"])


def test_blocks_of_a_swapped_group_serve_nobody_in_full_precision(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    right = generate(model, [*BEGINNING, 1, 2, 3], N)
    with workers(folder, 2, host_dir=tmp_path, prefix_cache=True) as each:
        w0, w1 = each
        applied(w0, transform(each, 2))
        applied(w0, swap(w0, "int4"))
        quantized, found = ask(w0, "int4", BEGINNING)
        assert found == 0 and quantized != right
        assert ask(w0, "int4 again", BEGINNING) == (quantized, len(BEGINNING))
        assert ask(w1, "int4 at the other", BEGINNING) == (quantized, 0)
        applied(w0, swap(w0, "full"))
        for worker in each:
            assert ask(worker, "full", BEGINNING) == (right, 0)
            assert ask(worker, "full again", BEGINNING) == (right, len(BEGINNING))


def test_every_text_is_its_own_beside_merges_resizes_splits_and_cancels(folder: Path, model: Any) -> None:
    with workers(folder, 2, prefix_cache=True, megabytes=2) as each:
        load = Load(each, model, beginning=tuple(BEGINNING))
        leader = each[0]
        assert load.during(leader, transform(each, 2)).state == "applied"
        most = leader.instance.scheduler.blocks.capacity
        for blocks in (most // 2, most):
            assert load.during(leader, resize(leader, blocks)).state == "applied"
        assert load.during(leader, transform(each, 1)).state == "applied"
        each[1].wait_degree(1)
        load.check()
        assert all(worker.instance.scheduler.num_prefix_hits > 0 for worker in each)

"""Groups of more members than KV heads: several have the same one, and each counts what it really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.common.oracles import RoundedCache, make_oracle
from tests.support.greedy import assert_greedy
from tests.support.group_workers import GroupWorker, model_fixtures, resize, transform, workers
from tests.worker.tensor_parallel.test_workers import Load, converted, prompt

LAYERS = 3
SLOW = pytest.mark.slow

model, folder = model_fixtures(num_hidden_layers=LAYERS, num_key_value_heads=2)


def changed(each: list[GroupWorker], tp: int) -> Any:
    report = each[0].end_of(transform(each, tp))
    if report.state == "applied":
        for worker in each:
            worker.wait_degree(tp)
    return report


def blocks(worker: GroupWorker) -> int:
    return worker.instance.scheduler.blocks.capacity


def test_four_workers_share_two_kv_heads_while_requests_run(folder: Path, model: Any) -> None:
    with workers(folder, 4) as each:
        load = Load(each, model)
        pages = [worker.pool.counts() for worker in each]
        each[0].wait(lambda: len(each[0].tokens) > 0, "the first tokens")
        for tp in (4, 1):
            report = load.during(each[0], transform(each, tp, layers_per_step=1 if tp == 4 else 2))
            assert report.state == "applied" and report.numbers["layers_done"] == LAYERS, report
            for worker in each:
                worker.wait_degree(tp)
        load.check()
        for worker in each:
            worker.check()
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {"tp1-full", "tp4-full"}
        assert [worker.pool.counts() for worker in each] == pages


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
def test_a_falcon_with_one_kv_head_comes_together_and_parts(tmp_path: Path, size: int) -> None:
    """Ranks have unlike numbers of query heads, which do not divide either."""
    model = make_oracle("falcon with one KV head", max_position_embeddings=1024)
    model.save_pretrained(tmp_path)
    with workers(tmp_path, size) as each:
        load = Load(each, model)
        for tp in (size, 1) * 2:
            assert load.during(each[0], transform(each, tp)).state == "applied"
            for worker in each:
                worker.wait_degree(tp)
        load.check()
        for worker in each:
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {"tp1-full", f"tp{size}-full"}


def test_the_group_has_the_blocks_that_each_member_has_memory_for(folder: Path) -> None:
    with workers(folder, 4) as each:
        cache = each[0].grouping.local.cache
        alone, told = blocks(each[0]), each[0].grouping.local.tokens_at(4)
        assert changed(each, 4).state == "applied"
        for worker in each:
            own = worker.grouping.local.cache
            held = own.pages_per_layer * worker.pool.page_bytes
            # Of two heads each member has one: half a block's bytes.
            assert blocks(worker) * own.block_bytes // 2 <= held
            assert 2 * alone <= blocks(worker) == told // own.block_tokens
        assert changed(each, 1).state == "applied"
        assert blocks(each[0]) == cache.num_blocks == alone, "alone, all pages are its own again"


def test_it_is_deferred_while_a_member_uses_more_than_its_part_of_the_group(folder: Path, model: Any) -> None:
    """Four members of two heads have room for half of what each has alone."""
    with workers(folder, 4, megabytes=1.1) as each:
        cache = each[1].grouping.local.cache
        tokens = (cache.num_blocks * 2 // 3) * cache.block_tokens - 100
        each[1].submit("long", prompt(1, tokens), 90)
        each[1].wait(lambda: len(each[1].tokens["long"]) > 0, "its first token")
        report = changed(each, 4)
        assert report.state == "deferred" and "there is room for" in report.reason, report
        assert 2 * report.numbers["blocks"] <= cache.num_blocks
        each[1].wait_ends("long")
        assert_greedy(model, prompt(1, tokens), 90, each[1].tokens["long"])
        assert changed(each, 4).state == "applied"


def test_groups_neither_join_nor_leave_a_group_that_shares_heads(folder: Path) -> None:
    with workers(folder, 4) as each:
        w0, w1, w2, w3 = each
        assert changed([w0, w1], 2).state == "applied"
        assert changed([w2, w3], 2).state == "applied"
        report = changed([w0, w2, w1, w3], 4)
        assert report.state == "conflict" and "single workers join and leave such a group" in report.reason
        for pair in ([w0, w1], [w2, w3]):
            assert changed(pair, 1).state == "applied"
        assert changed(each, 4).state == "applied"
        report = changed(each, 2)
        assert report.state == "conflict" and "not groups of 2; go to degree 1 first" in report.reason


@SLOW
@pytest.mark.parametrize("layers", [0, 1, LAYERS])
def test_when_a_member_leaves_the_others_recompute_their_own_requests(
    folder: Path, model: Any, layers: int
) -> None:
    with workers(folder, 4) as members:
        *each, gone = members
        for i, worker in enumerate(each):
            worker.submit("a", prompt(i, 30), 300)
            worker.wait(lambda w=worker: len(w.tokens["a"]) > 0, "its first token")  # type: ignore[misc]
        morph = transform(members, 4)
        each[0].wait(
            lambda: any(r.id == morph and r.numbers.get("layers_done", 0) >= layers for r in each[0].reports),
            "so many layers",
        )
        gone.transport.close()
        for i, worker in enumerate(each):
            worker.wait_ends("a")
            assert_greedy(model, prompt(i, 30), 300, worker.tokens["a"])
            worker.wait_degree(1)


@SLOW
def test_a_group_that_shares_heads_resizes_and_converts_its_kv_as_others_do(folder: Path, model: Any) -> None:
    with workers(folder, 4) as each:
        leader = each[0]
        assert changed(each, 4).state == "applied"
        before = blocks(leader)
        for i, worker in enumerate(each):
            worker.submit("through", prompt(i, 21), 200)
        fewer = leader.end_of(resize(leader, before // 2))
        assert fewer.state == "applied" and before // 2 <= blocks(leader) < before, fewer
        more = leader.end_of(resize(leader, before))
        assert more.state == "applied" and blocks(leader) >= before - 1, more
        for i, worker in enumerate(each):
            worker.wait_ends("through")
            assert_greedy(model, prompt(i, 21), 200, worker.tokens["through"])
        there = converted(leader)
        assert there.state == "applied" and blocks(leader) > 2 * before, there
        leader.submit("rounded", prompt(9, 33), 40)
        leader.wait_ends("rounded")
        assert_greedy(model, prompt(9, 33), 40, leader.tokens["rounded"], RoundedCache)
        back = converted(leader, "full")
        assert back.state == "applied" and changed(each, 1).state == "applied"

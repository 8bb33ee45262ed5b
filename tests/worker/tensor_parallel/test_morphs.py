"""Morphs compose: swaps and resizes in a group, groups that form and part while layers are swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.messages import LayerShape
from bus.policy import Envelope, Policy
from tests.support.greedy import assert_greedy, generate
from tests.support.group_workers import GroupWorker, model_fixtures, resize, swap, transform, workers
from tests.worker.tensor_parallel.test_workers import Load, prompt

LAYERS = 3
N = 60


model, folder = model_fixtures(num_hidden_layers=LAYERS)


def applied(leader: GroupWorker, morph: str) -> dict[str, float]:
    report = leader.end_of(morph)
    assert report.state == "applied", report
    return report.numbers


def answer(worker: GroupWorker, name: str, n: int = N) -> list[int]:
    worker.submit(name, prompt(5, 21), n)
    worker.wait_ends(name)
    return worker.tokens[name]


def test_a_group_swaps_its_layers_on_all_ranks_in_the_same_step(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    with workers(folder, 3, host_dir=tmp_path) as each:
        w0, w1, alone = each
        applied(alone, swap(alone, "int4"))
        quantized = answer(alone, "quantized")
        assert quantized != generate(model, prompt(5, 21), N)

        applied(w0, transform([w0, w1], 2))
        for worker in (w0, w1):
            worker.submit("runs through", prompt(7, 30), 150)
        numbers = applied(w0, swap(w0, "int4"))
        assert numbers["halves_applied"] == 2 * LAYERS
        assert answer(w0, "in the group") == answer(w1, "at the other member") == quantized
        assert "tp2-int4x3" in w0.fingerprints and "tp2-int4x3" in w1.fingerprints

        # Apart with quantised layers, and together again; then full precision comes back in the group.
        applied(w0, transform([w0, w1], 1))
        w1.wait_degree(1)
        assert answer(w1, "alone again") == quantized
        applied(w0, transform([w0, w1], 2))
        applied(w0, swap(w0, "full"))
        assert_greedy(model, prompt(5, 21), N, answer(w1, "full again"))
        applied(w0, transform([w0, w1], 1))
        w1.wait_degree(1)
        assert_greedy(model, prompt(5, 21), N, answer(w0, "full, alone"))
        for worker in (w0, w1):
            worker.wait_ends("runs through")
            assert worker.instance.scheduler.num_recomputed == 0


@pytest.mark.slow
def test_a_group_grows_and_shrinks_its_cache_while_requests_run(folder: Path, model: Any) -> None:
    with workers(folder, 2) as each:
        load = Load(each, model)
        applied(each[0], transform(each, 2))
        most = each[0].instance.scheduler.blocks.capacity
        for blocks in (most // 2, most // 4, most // 2, most):
            report = load.during(each[0], resize(each[0], blocks))
            assert report.state == "applied", report
            assert blocks <= report.numbers["blocks_after"] <= blocks + most // 8
        refused = each[0].end_of(resize(each[0], 2))
        assert refused.state == "failed" and refused.numbers["min_blocks"] > 2, refused
        assert each[0].end_of(resize(each[0], 100 * most)).state == "deferred"
        follower = each[1].end_of(resize(each[1], most))
        assert follower.state == "conflict" and "w0 leads" in follower.reason
        assert load.during(each[0], transform(each, 1)).state == "applied"
        load.check()
        assert all(worker.instance.scheduler.num_recomputed == 0 for worker in each)


def test_swapped_layers_leave_their_pages_to_the_cache_when_the_group_has_parted(
    folder: Path, tmp_path: Path
) -> None:
    with workers(folder, 2, host_dir=tmp_path, megabytes=1.5) as each:
        before = each[0].instance.scheduler.blocks.capacity
        applied(each[0], transform(each, 2))
        in_group = each[0].instance.scheduler.blocks.capacity
        assert applied(each[0], swap(each[0], "int8"))["blocks_after"] > in_group
        applied(each[0], transform(each, 1))
        assert each[0].instance.scheduler.blocks.capacity > before
        applied(each[0], transform(each, 2))
        applied(each[0], swap(each[0], "full"))
        applied(each[0], transform(each, 1))
        assert each[0].instance.scheduler.blocks.capacity == before


def test_workers_whose_layers_differ_in_precision_become_no_group(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    """Requests at each have a right to the precision that they have there."""
    with workers(folder, 2, host_dir=tmp_path) as each:
        load = Load(each, model)
        applied(each[1], swap(each[1], "int8", count=1))
        report = each[0].end_of(transform(each, 2))
        assert (report.state, each[0].instance.tp) == ("conflict", 1)
        assert "its layer 0 is int8/int8 (attention/FFN) and full/full at w0" in report.reason, report
        applied(each[0], swap(each[0], "int8", count=1))
        applied(each[0], transform(each, 2))
        applied(each[0], transform(each, 1))
        for name, (worker, _, _) in load.asked.items():
            worker.wait_ends(name)
            assert worker.ends[name] == "length"


def test_a_group_grows_beyond_what_its_sequences_could_fill_where_it_is_ordered(folder: Path) -> None:
    with workers(folder, 2, max_num_seqs=1) as each:
        applied(each[0], transform(each, 2))
        before = each[0].instance.scheduler.blocks.capacity
        for blocks in (before * 3 // 4, before, before * 3 // 2):
            assert blocks <= applied(each[0], resize(each[0], blocks))["blocks_after"] <= blocks * 1.1


def test_a_size_that_a_group_was_ordered_to_have_stays_when_it_parts(folder: Path) -> None:
    with workers(folder, 2) as each:
        before = each[0].instance.scheduler.blocks.capacity
        applied(each[0], transform(each, 2))
        in_group = each[0].instance.scheduler.blocks.capacity
        taken = in_group - applied(each[0], resize(each[0], in_group * 3 // 4))["blocks_after"]
        applied(each[0], transform(each, 1))
        each[1].wait_degree(1)
        for worker in each:
            after = worker.instance.scheduler.blocks.capacity
            assert abs(before - taken / 2 - after) <= 0.02 * before, (before, taken, after)


def test_a_swap_in_a_group_does_not_undo_a_resize(folder: Path, tmp_path: Path) -> None:
    with workers(folder, 2, host_dir=tmp_path) as each:
        applied(each[0], transform(each, 2))
        ordered = each[0].instance.scheduler.blocks.capacity // 2
        resized = applied(each[0], resize(each[0], ordered))["blocks_after"]
        gained = applied(each[0], swap(each[0], "int4"))["blocks_after"]
        assert resized < gained < resized * 1.6  # what the layers gave, not what the order took
        assert applied(each[0], swap(each[0], "full"))["blocks_after"] <= gained


def test_the_pages_of_each_half_become_blocks_before_the_next_ones_are_done(
    folder: Path, tmp_path: Path
) -> None:
    with workers(folder, 2, host_dir=tmp_path, megabytes=1.5) as each:
        applied(each[0], transform(each, 2))
        for worker in each:
            worker.submit("runs through", prompt(7, 30), 150)
        morph = swap(each[0], "int4")
        numbers = applied(each[0], morph)
        on_the_way = [one.numbers for one in each[0].reports if one.id == morph and one.state == "running"]
        grown = {
            int(one["halves_applied"]): int(one["blocks_after"])
            for one in on_the_way
            if one.get("blocks_after", 0) > numbers["blocks_before"]
        }
        assert min(grown) <= LAYERS and max(grown) < 2 * LAYERS, on_the_way
        assert len(set(grown.values())) > 1 and max(grown.values()) <= numbers["blocks_after"]
        for worker in each:
            worker.wait_ends("runs through")


@pytest.mark.slow
def test_the_leaders_reflex_acts_for_all_members_of_its_group(folder: Path, tmp_path: Path) -> None:
    with workers(folder, 2, host_dir=tmp_path, megabytes=1.5) as each:
        leader, follower = each
        applied(leader, transform(each, 2))
        before = leader.instance.scheduler.blocks.capacity
        pages = [worker.executor.targets[worker.instance.id].resizer.cache.pages_per_layer for worker in each]
        policy = Policy(mode="performance", loss_budget=1.0).in_force()
        assert policy
        leader.thread.grant(
            Envelope(
                id="e",
                epoch=leader.epoch,
                instance=leader.instance.id,
                policy=policy,
                precisions=["int8", "int4"],
            )
        )
        names = [str(i) for i in range(16)]
        for name in names:  # all at the follower: the leader sees them by its status alone
            follower.submit(name, prompt(int(name), 300), 60)
        leader.wait(lambda: bool(leader.events), "a decision")
        (decided, *_) = leader.events
        assert (decided.kind, decided.source, decided.subject) == ("morph_decided", "w0", leader.instance.id)
        assert decided.numbers["running"] + decided.numbers["waiting"] > 8
        assert decided.numbers["kv_needed"] > decided.numbers["kv_blocks"] == before
        assert applied(leader, decided.morph_id)["blocks_after"] > before
        shapes = [list(worker.instance.shape) for worker in each]
        assert shapes[0] == shapes[1] != [LayerShape()] * LAYERS
        for worker, had in zip(each, pages, strict=True):
            assert worker.executor.targets[worker.instance.id].resizer.cache.pages_per_layer > had
        follower.wait_ends(*names)
        assert {follower.ends[name] for name in names} == {"length"} and follower.events == []
        leader.wait(
            lambda: all(worker.instance.shape == [LayerShape()] * LAYERS for worker in each),
            "the way back",
        )
        assert leader.events[-1].cause == "ease"

"""A group holds its KV in 8 bits and in full precision again, at all members between the same two steps."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bench.common.oracles import RoundedCache
from bus.morphs import ConvertCache, MorphReport
from bus.policy import Envelope, Policy
from bus.precisions import KVPrecision
from tests.support.greedy import assert_greedy, generate
from tests.support.group_workers import GroupWorker, model_fixtures, transform, workers
from tests.support.kv_spans import KVSpans
from tests.worker.tensor_parallel.test_prefix_cache import BEGINNING, ask
from tests.worker.tensor_parallel.test_workers import prompt

LAYERS, NUM_NEW, LONG = 3, 40, 900
_ids = count()

model, folder = model_fixtures(num_hidden_layers=LAYERS)


def converted(leader: GroupWorker, kv_dtype: KVPrecision) -> MorphReport:
    name = f"kv-{next(_ids)}"
    command = ConvertCache(id=name, epoch=leader.epoch, instance=leader.instance.id, kv_dtype=kv_dtype)
    leader.thread.morph(command)
    return leader.end_of(name)


def applied(leader: GroupWorker, morph: str) -> None:
    report = leader.end_of(morph)
    assert report.state == "applied", report


def form(worker: GroupWorker) -> KVPrecision | None:
    return worker.grouping.local.cache.form


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_token_at_every_member_is_that_of_the_form_its_context_had(
    folder: Path, model: Any, size: int
) -> None:
    with workers(folder, size) as each:
        leader = each[0]
        applied(leader, transform(each, size))
        before = leader.instance.scheduler.blocks.capacity
        spans = [worker.call(partial(KVSpans, worker.grouping.local.target)) for worker in each]
        for i, worker in enumerate(each):
            worker.submit("through", prompt(i, 20), LONG)
        for worker in each:
            worker.wait(lambda w=worker: w.tokens["through"] != [], "its first token")  # type: ignore[misc]
        there = converted(leader, "int8")
        assert there.state == "applied" and there.numbers["layers_done"] == LAYERS, there
        assert there.numbers["blocks_after"] > 2 * before
        for i, worker in enumerate(each):
            worker.submit("late", prompt(10 + i, 33), NUM_NEW)
            worker.wait_ends("late")
            assert_greedy(model, prompt(10 + i, 33), NUM_NEW, worker.tokens["late"], RoundedCache)
        back = converted(leader, "full")
        assert back.state == "applied" and back.numbers["blocks_after"] == before, back
        for i, worker in enumerate(each):
            worker.submit("after", prompt(20 + i, 33), NUM_NEW)
            worker.wait_ends("after")
            assert_greedy(model, prompt(20 + i, 33), NUM_NEW, worker.tokens["after"])
        for i, (worker, noted) in enumerate(zip(each, spans, strict=True)):
            worker.thread.cancel(["through"])
            worker.check()
            assert noted.was_there("through"), "it is to outlast both conversions"
            tokens = list(worker.tokens["through"])
            cache = partial(RoundedCache, spans=noted.of("through"))
            assert_greedy(model, prompt(i, 20), len(tokens), tokens, cache)
            assert worker.instance.scheduler.num_recomputed == 0
            assert worker.fingerprints == {f"tp{size}-full", f"tp{size}-full-kv8"}
        applied(leader, transform(each, 1))


def test_what_the_prefix_cache_of_any_member_holds_is_converted_with_the_rest(folder: Path) -> None:
    """The third worker, alone, is the oracle: what it found was rounded in the same way."""
    with workers(folder, 3, prefix_cache=True) as each:
        leader, follower, alone = each
        applied(leader, transform([leader, follower], 2))
        for worker in (follower, alone):
            ask(worker, "first", BEGINNING)
        for worker in (leader, alone):
            assert converted(worker, "int8").state == "applied"
        found = ask(follower, "again", BEGINNING)
        assert found == ask(alone, "again", BEGINNING) and found[1] == len(BEGINNING)
        for worker in (leader, alone):
            assert converted(worker, "full").state == "applied"
        found = ask(follower, "in full", BEGINNING)
        assert found == ask(alone, "in full", BEGINNING) and found[1] == 0, "what was rounded is for nobody"


def test_a_group_parts_in_the_form_that_it_has_and_comes_together_in_it(folder: Path, model: Any) -> None:
    right = generate(model, prompt(5, 21), NUM_NEW, RoundedCache)
    with workers(folder, 2) as each:
        leader, follower = each
        applied(leader, transform(each, 2))
        assert converted(leader, "int8").state == "applied"
        already = converted(leader, "int8")
        assert already.state == "applied" and "already at a KV cache in int8" in already.reason
        for tp in (1, 2):
            applied(leader, transform(each, tp))
            follower.wait_degree(tp)
            for worker in each:
                assert form(worker) == "int8"
                worker.submit(f"tp{tp}", prompt(5, 21), NUM_NEW)
                worker.wait_ends(f"tp{tp}")
                assert worker.tokens[f"tp{tp}"] == right


def test_it_goes_back_only_where_the_blocks_in_use_of_all_members_fit(folder: Path) -> None:
    with workers(folder, 2, megabytes=1.2) as each:
        leader, follower = each
        applied(leader, transform(each, 2))
        blocks = leader.instance.scheduler.blocks.capacity
        assert converted(leader, "int8").state == "applied"
        for i in range(2):
            follower.submit(str(i), prompt(i, 4 * (blocks // 2)), 60)
        follower.wait(lambda: all(follower.tokens[str(i)] for i in range(2)), "the first tokens")
        refused = converted(leader, "full")
        assert refused.state == "deferred" and refused.numbers["blocks_asked"] == blocks, refused
        assert form(leader) == form(follower) == "int8"
        follower.wait_ends("0", "1")


def test_members_that_part_half_way_by_a_fault_serve_on_and_are_converted_again(
    folder: Path, model: Any
) -> None:
    with workers(folder, 2) as each:
        leader, follower = each
        applied(leader, transform(each, 2))
        cache: Any = follower.grouping.local.cache
        convert = cache.convert

        def failing(layer: int, *args: Any) -> None:
            if layer == 2:
                raise RuntimeError("no memory left")
            convert(layer, *args)

        for worker in each:
            worker.submit("through", prompt(1, 20), 200)
        cache.convert = failing
        report = converted(leader, "int8")
        assert report.state == "failed", report
        for worker in each:
            worker.wait(lambda w=worker: w.grouping.executor is None, "its group's end")  # type: ignore[misc]
        cache.convert = convert
        assert form(follower) is None
        report = leader.end_of(transform(each, 2))
        assert report.state == "conflict" and "half-way between two precisions" in report.reason, report
        for worker in each:
            worker.wait_ends("through")
            assert worker.ends["through"] == "length"
            assert converted(worker, "full").state == "applied"
        applied(leader, transform(each, 2))
        follower.submit("after", prompt(5, 21), NUM_NEW)
        follower.wait_ends("after")
        assert_greedy(model, prompt(5, 21), NUM_NEW, follower.tokens["after"])


@pytest.mark.slow
def test_the_leaders_reflex_converts_the_kv_of_all_members_under_their_pressure(folder: Path) -> None:
    with workers(folder, 2, megabytes=1.5) as each:
        leader, follower = each
        applied(leader, transform(each, 2))
        before = leader.instance.scheduler.blocks.capacity
        policy = Policy(cooldown_s=0.0).in_force()
        assert policy
        leader.call(lambda: setattr(leader.grouping.local.target, "kv_loss", 0.0001))
        leader.thread.grant(
            Envelope(
                id="e", epoch=leader.epoch, instance=leader.instance.id, policy=policy, kv_precisions=["int8"]
            )
        )
        names = [str(i) for i in range(16)]
        for name in names:  # all at the follower: the leader sees them by its status alone
            follower.submit(name, prompt(int(name), 300), 60)
        leader.wait(lambda: bool(leader.events), "a decision")
        decided = leader.events[0]
        assert decided.numbers["kv_blocks"] == before and "the KV cache to int8" in decided.reason
        report = leader.end_of(decided.morph_id)
        assert report.state == "applied" and report.numbers["blocks_after"] > 2 * before, report
        follower.wait_ends(*names)
        assert set(follower.ends.values()) == {"length"}
        for worker in each:
            worker.wait(lambda w=worker: form(w) == "full", "the way back")  # type: ignore[misc]
            assert worker.instance.scheduler.num_recomputed == 0

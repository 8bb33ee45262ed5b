"""KV caches that grow and shrink under live sequences, on a toy model over real pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from bus.morphs import MorphReport, Resize, Swap
from tests.support.engine_toys import Client, continuation, request, run
from tests.support.morph_toys import Rig
from worker.memory import MappingFailed
from worker.morph import resize as resizing
from worker.morph.run import NotApplied


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(resizing, "PAGES_AT_ONCE", 1)
    made = Rig(max_kv_pages=60, model_len=100)
    yield made
    made.check_integrity()
    made.close()


def resize(rig: Rig, blocks: int, name: str = "m", **fields: Any) -> None:
    rig.executor.begin(Resize(id=name, epoch=0, instance="toy@w0", blocks=blocks, **fields))


def ended(rig: Rig) -> MorphReport:
    (report,) = rig.settle()
    return report


def test_it_has_the_blocks_that_were_asked_for_as_whole_pages_allow(rig: Rig) -> None:
    assert (rig.cache.num_blocks, rig.pool.num_free) == (80, 24)
    resize(rig, 100)
    report = ended(rig)
    assert (report.kind, report.state) == ("resize", "applied")
    assert 100 <= rig.cache.num_blocks < 103, "a page more in each layer, at most"
    assert report.numbers["blocks_after"] == rig.cache.num_blocks
    resize(rig, 30, "down")
    assert ended(rig).state == "applied" and 30 <= rig.cache.num_blocks < 33
    resize(rig, 30, "again")
    assert ended(rig).state == "applied"


def test_a_shrink_moves_live_blocks_and_the_streams_go_on(rig: Rig) -> None:
    client = Client()
    prompts = {name: [ord(name) % 90 + i for i in range(20)] for name in "abcdef"}
    for name, prompt in prompts.items():
        rig.engine.submit("toy@w0", request(name, prompt, 40))
    for _ in range(14):
        client.take(rig.engine.step())
    rig.engine.cancel(["a", "c"])
    used = rig.cache.allocator.num_used
    resize(rig, used + 3)
    while rig.executor.num_running:
        rig.advance()
    assert rig.reports[-1].state == "applied" and rig.reports[-1].numbers["blocks_moved"] > 0
    rig.check_integrity()
    run(rig.engine, client)
    for name in "bdef":
        assert client.tokens[name] == continuation(prompts[name], 40)


def test_streams_run_through_resizes_up_and_down(rig: Rig) -> None:
    client = Client()
    prompts = {str(i): [(i * 11 + j) % 90 for j in range(2 + 6 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        rig.engine.submit("toy@w0", request(name, prompt, 30))
    turn = 0
    while rig.engine.has_work:
        resize(rig, 30 + turn * 37 % 80, f"m{turn}", wait_s=0.01)
        client.take(rig.engine.step())
        rig.advance()
        rig.check_integrity()
        turn += 1
    assert client.tokens == {name: continuation(prompt, 30) for name, prompt in prompts.items()}
    assert "applied" in {report.state for report in rig.settle() + rig.reports}


def test_below_the_blocks_in_use_it_is_deferred_with_both_numbers(rig: Rig) -> None:
    for name in "abcd":
        rig.engine.submit("toy@w0", request(name, list(range(50)), 40))
    for _ in range(20):
        rig.engine.step()
    used, blocks = rig.cache.allocator.num_used, rig.cache.num_blocks
    resize(rig, 30)
    report = ended(rig)
    assert (report.state, report.reason) == (
        "deferred",
        f"{used} KV blocks are in use, 30 were asked for",
    )
    assert (report.numbers["blocks_used"], report.numbers["blocks_asked"]) == (used, 30)
    assert rig.cache.num_blocks == blocks
    resize(rig, 30, "patient", wait_s=5.0)
    rig.advance()
    rig.engine.cancel("abcd")
    assert ended(rig).state == "applied"


def test_a_shrink_that_is_overtaken_by_new_blocks_goes_back(rig: Rig) -> None:
    blocks = rig.cache.num_blocks
    resize(rig, 40, wait_s=0.05)
    job = rig.executor._jobs["m"]
    for _ in range(3):
        job.step()
    assert rig.cache.num_blocks < blocks
    taken = rig.cache.allocator.allocate(rig.cache.allocator.num_free)
    with pytest.raises(NotApplied, match="are in use, 40 were asked for"):
        while True:
            job.step()
            time.sleep(0.001)
    assert rig.cache.num_blocks == blocks
    rig.cache.allocator.free(taken)


@pytest.mark.parametrize(
    ("blocks", "state", "says"),
    [
        (24, "failed", "this instance needs at least 25 KV blocks"),
        (
            107,
            "deferred",
            "at most 106 KV blocks: the device's budget less the weights; layers in fewer bits leave",
        ),
    ],
)
def test_sizes_that_can_never_be_are_refused_with_the_limits(
    rig: Rig, blocks: int, state: str, says: str
) -> None:
    resize(rig, blocks)
    report = ended(rig)
    assert report.state == state and says in report.reason
    assert (report.numbers["min_blocks"], report.numbers["max_blocks"]) == (25, 106)
    assert report.numbers["blocks_asked"] == blocks and str(blocks) not in report.reason  # the order says it
    assert rig.cache.num_blocks == 80


def test_growth_keeps_the_reserve_and_waits_for_pages(rig: Rig) -> None:
    other = rig.pool.reserve(10 * rig.pool.page_bytes, kind="kv", owner="another model's KV")
    other.map(0, 10)
    resize(rig, 106)
    report = ended(rig)
    assert report.state == "deferred" and "4 of them are kept for swaps; layers in" in report.reason
    assert (report.numbers["pages_needed"], report.numbers["pages_free"]) == (20, 14)
    assert rig.cache.num_blocks == 80
    resize(rig, 106, "patient", wait_s=5.0)
    rig.advance()
    other.release()
    assert ended(rig).state == "applied"
    assert rig.cache.num_blocks == 106 and rig.pool.num_free >= rig.reserve


def test_two_resizes_conflict_and_a_swap_beside_one_does_not(rig: Rig) -> None:
    resize(rig, 100, "first")
    resize(rig, 50, "second")
    rig.executor.begin(Swap(id="swap", epoch=0, instance="toy@w0", precision="int4", count=1))
    ends = {report.id: report for report in rig.settle()}
    assert ends["second"].state == "conflict"
    assert ends["second"].reason == "morph first is changing the size of its KV cache"
    assert (ends["first"].state, ends["swap"].state) == ("applied", "applied")


def test_a_growth_that_fails_half_way_goes_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    grown = 0
    grow = rig.cache.grow

    def refuse(pages: int) -> None:
        nonlocal grown
        grown += 1
        if grown == 4:
            raise MappingFailed("the driver says no")
        grow(pages)

    monkeypatch.setattr(rig.cache, "grow", refuse)
    resize(rig, 100)
    report = ended(rig)
    assert report.state == "failed" and "the driver says no" in report.reason
    assert rig.cache.num_blocks == 80


def test_a_cancelled_resize_goes_back(rig: Rig) -> None:
    resize(rig, 100)
    rig.executor._jobs["m"].step()
    assert rig.cache.num_blocks > 80
    rig.executor.cancel("m")
    assert ended(rig).state == "failed" and rig.cache.num_blocks == 80


def test_requests_that_waited_for_blocks_are_admitted_in_the_next_step() -> None:
    rig = Rig(num_pages=44, model_len=70, step_tokens=64)
    client, prompt = Client(), list(range(56))
    for name in "abcd":
        rig.engine.submit("toy@w0", request(name, prompt, 8))
    for _ in range(4):
        client.take(rig.engine.step())
    waiting, blocks = len(rig.instance.scheduler.waiting), rig.cache.num_blocks
    assert waiting == 2, "no more than two fit"
    rig.executor.begin(Swap(id="m", epoch=0, instance="toy@w0", precision="int3", count=2))
    while rig.cache.num_blocks < blocks + 16:
        rig.advance()
    client.take(rig.engine.step())
    assert len(rig.instance.scheduler.waiting) < waiting
    rig.settle()
    run(rig.engine, client)
    assert client.tokens == {name: continuation(prompt, 8) for name in "abcd"}
    rig.close()

"""KV pages go to who misses them: the rule, and two models on one worker."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.morphs import Resize
from tests.support.deploy_models import Place, settings_for, write_model
from worker.deploy.kv_sharing import KVHolder, fair_pages, gift, next_move

HAS = KVHolder(name="has", num_layers=2, pages=80, needed=20, useful=100)
WANTS = KVHolder(name="wants", num_layers=3, pages=21, needed=21, useful=120, missing=30, is_keen=True)


def test_nobody_gets_what_nobody_misses() -> None:
    assert next_move([HAS, replace(WANTS, missing=0)], 50) is None


def test_free_pages_go_first_then_those_that_lie_idle() -> None:
    moved = next_move([HAS, WANTS], 10)
    assert moved and (moved.lender, moved.borrower, moved.pages) == ("", "wants", 9)
    moved = next_move([HAS, WANTS], 1)
    assert moved and (moved.lender, moved.pages) == ("has", 30)


def test_what_a_model_needs_stays_with_it() -> None:
    assert next_move([replace(HAS, needed=79), WANTS], 0) is None
    moved = next_move([replace(HAS, needed=74), WANTS], 0)
    assert moved and moved.pages == 6


def test_who_wants_too_gives_nothing_of_its_fair_share() -> None:
    moved = next_move([replace(HAS, is_keen=True, missing=10), WANTS], 0)
    assert moved and moved.borrower == "wants" and moved.pages == 30  # to 51 each
    even = replace(HAS, pages=50, is_keen=True, missing=10), replace(WANTS, pages=51)
    assert next_move(even, 0) is None


holders = st.builds(
    KVHolder,
    name=st.just(""),
    num_layers=st.integers(1, 5),
    pages=st.integers(0, 40),
    needed=st.integers(0, 40),
    useful=st.integers(0, 80),
    missing=st.integers(0, 40),
    is_keen=st.booleans(),
)


@given(st.lists(holders, min_size=2, max_size=4), st.integers(0, 20))
def test_moves_end_and_take_nothing_that_is_needed(drawn: list[KVHolder], spare: int) -> None:
    """Whatever is missing at first: when it has been given, or cannot be, it is quiet."""
    state = {
        str(i): replace(
            one,
            name=str(i),
            pages=one.pages * one.num_layers,
            useful=max(one.useful, one.pages) * one.num_layers,
            is_keen=one.is_keen or one.missing > 0,
        )
        for i, one in enumerate(drawn)
    }
    total = spare + sum(one.pages for one in state.values())
    for _ in range(500):
        move = next_move(list(state.values()), spare)
        if move is None:
            return
        assert move.pages > 0
        if move.lender:
            lender = state[move.lender]
            assert move.pages <= gift(lender, fair_pages(list(state.values()), spare))
            state[move.lender] = replace(lender, pages=lender.pages - move.pages)
            spare += move.pages
        borrower = state[move.borrower]
        got = min(move.pages, spare) // borrower.num_layers * borrower.num_layers
        state[move.borrower] = replace(
            borrower, pages=borrower.pages + got, missing=max(0, borrower.missing - got)
        )
        spare -= got
        assert spare >= 0 and total == spare + sum(one.pages for one in state.values())
    raise AssertionError("pages go back and forth")


# --------------------------------------------------------------------------- two models


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_model(folder / "first", 1), write_model(folder / "second", 2, num_hidden_layers=3)]


@pytest.fixture
def place(folders: list[Path], tmp_path: Path) -> Iterator[Place]:
    """Two models, and KV for no more than some of the sequences that they may have."""
    settings = settings_for(
        folders[0], tmp_path, memory_mb=2, variants=[], max_num_seqs=48, max_num_batched_tokens=64
    )
    made = Place(settings)
    assert made.end_of(made.deploy("second", folders[1])).state == "applied"
    yield made
    made.check()
    made.close()


def kv_of(place: Place, model: str) -> int:
    return place.model_host.models[f"{model}@w0"].kv_pages


def least_of(place: Place, model: str) -> int:
    resizer = place.model_host.models[f"{model}@w0"].target.resizer
    return resizer.pages_for(resizer.min_blocks) * resizer.num_layers


def submit_many(place: Place, model: str, first: int, count: int) -> None:
    for i in range(first, first + count):
        place.submit(f"{model}{i}", model, [1 + i % 90, 2, 3], 50)


def test_a_busy_model_gets_the_idle_ones_kv_and_gives_its_share_back_when_that_one_comes(
    place: Place,
) -> None:
    fair = {model: kv_of(place, model) for model in ("first", "second")}
    total = sum(fair.values())
    submit_many(place, "first", 0, 100)
    most = 0
    while place.engine.instances["first@w0"].scheduler.waiting:
        place.step()
        most = max(most, kv_of(place, "first"))
    assert most > fair["first"]
    assert kv_of(place, "second") <= least_of(place, "second") + 2 * 3, "the idle one keeps what it needs"
    assert most >= 0.97 * (total - least_of(place, "second"))
    submit_many(place, "first", 100, 200)  # blocks come free only as sequences end: none is preempted
    submit_many(place, "second", 0, 120)
    got = 0
    while place.engine.has_work:
        place.step()
        if place.engine.instances["first@w0"].scheduler.waiting:
            got = max(got, kv_of(place, "second"))
    assert got >= 0.9 * fair["second"], (got, fair)
    assert not place.client.errors
    assert set(place.client.ends.values()) == {"length"}


def test_answers_do_not_change_while_pages_move(place: Place, folders: list[Path], tmp_path: Path) -> None:
    submit_many(place, "first", 0, 40)
    place.step(30)
    submit_many(place, "second", 0, 40)
    place.run()
    assert place.model_host.models["first@w0"].target.resizer.num_lent
    for model, folder in zip(("first", "second"), folders, strict=True):
        alone = Place(settings_for(folder, tmp_path, variants=[]))
        submit_many(alone, "first", 0, 40)
        alone.run()
        for i in range(40):
            assert place.client.tokens[f"{model}{i}"] == alone.client.tokens[f"first{i}"]
        alone.close()


def test_what_was_lent_is_back_when_the_other_is_gone(folders: list[Path], tmp_path: Path) -> None:
    place = Place(settings_for(folders[0], tmp_path, memory_mb=2, variants=[], max_num_seqs=24))
    before = place.counts()
    place.end_of(place.deploy("second", folders[1]))
    for busy in ("second", "first"):
        submit_many(place, busy, 0, 30)
        place.run()
    assert place.end_of(place.retire("second")).state == "applied"
    assert place.counts() == before
    place.check()
    place.close()


def test_an_order_without_pages_says_whose_kv_lies_idle_and_how_to_have_it(place: Place) -> None:
    first, second = (place.model_host.models[f"{model}@w0"] for model in ("first", "second"))
    wanted = first.target.resizer.cache.num_blocks + second.target.resizer.cache.num_blocks // 2
    end = place.end_of(place.begin(Resize, epoch=0, instance="first@w0", blocks=wanted))
    assert end.state == "deferred" and second.idle_pages
    told = f"second@w0 has {second.kv_pages} pages of KV, {second.idle_pages} idle; an order calls none of it"
    assert told in end.reason
    (blocks,) = re.findall(r"`instar morph resize second@w0 (\d+)`", end.reason)
    assert int(blocks) > second.target.resizer.needed_blocks()
    for name, size in (("second", int(blocks)), ("first", wanted)):
        end = place.end_of(place.begin(Resize, epoch=0, instance=f"{name}@w0", blocks=size))
        assert end.state == "applied", end.reason


def test_pages_do_not_flap_between_two_who_want_by_turns(place: Place, monkeypatch: Any) -> None:
    """Both have requests all the time: shares become fair, and stay."""
    host = place.model_host
    for _ in range(4):
        submit_many(place, "first", len(place.client.ends) * 2, 20)
        submit_many(place, "second", len(place.client.ends) * 2, 20)
        began, before = time.monotonic(), host.num_kv_moves
        place.run()
        took_s = time.monotonic() - began
    assert host.num_kv_moves - before <= 4 + 20 * took_s


def test_a_resize_by_order_is_left_alone_while_it_runs_and_its_size_is_the_models_own_then(
    place: Place,
) -> None:
    resizer = place.model_host.models["first@w0"].target.resizer
    submit_many(place, "second", 0, 60)
    place.step(20)
    order = place.begin(Resize, epoch=0, instance="first@w0", blocks=resizer.min_blocks, wait_s=1.0)
    assert place.end_of(order).state == "applied"
    assert resizer.num_lent == 0 or place.engine.has_work
    place.run()

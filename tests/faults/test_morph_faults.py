"""Morphs that find no memory, damaged weights, or each other: faults 12, 14 and 15 of docs/faults.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.common.service import Service, wait_for
from bus.precisions import QUANTIZED
from tests.faults.morphs import (
    FULL,
    NUM_LAYERS,
    SMALL_BUDGET,
    Hand,
    ShapedStream,
    assert_complete,
    assert_exact_while_full,
    settings,
    stream,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One worker, with little room beside its weights. Each test leaves it idle, at full, and as large as
    it was."""
    host_dir = tmp_path_factory.mktemp("host")
    with Service(settings=settings(host_dir, SMALL_BUDGET)) as service:
        Hand(service).manual()
        yield service


@pytest.fixture
def hand(small: Service) -> Iterator[Hand]:
    hand = Hand(small)
    before, blocks = hand.pages(), hand.look()["kv"]["blocks"]
    yield hand
    with small.explained():
        hand.wait_idle()
        assert hand.swap("full", count=NUM_LAYERS, wait_s=10)["state"] == "applied"
        assert hand.resize(blocks)["state"] == "applied"
        wait_for("the same pages as before", lambda: hand.pages() == before)


@pytest.fixture(scope="module")
def oracle(small: Service) -> list[str]:
    """The tokens of an undisturbed stream at full precision."""
    undisturbed = stream(small, 400).finished()
    assert_complete(undisturbed, 400)
    return undisturbed.tokens


def fill(hand: Hand, count: int, max_tokens: int, blocks: int) -> list[ShapedStream]:
    """Streams that have `blocks` blocks in use and want more."""
    streams = [stream(hand.service, max_tokens) for _ in range(count)]
    wait_for(f"{blocks} blocks to be used", lambda: hand.service.blocks_used() >= blocks)
    return streams


def all_complete(streams: list[ShapedStream], max_tokens: int) -> None:
    for one in streams:
        assert_complete(one.finished(), max_tokens)


# --------------------------------------------------------------------------- 12 and 15: no memory


@pytest.mark.slow
def test_layers_find_no_pages_for_the_way_back_and_say_so_while_all_streams_go_on(hand: Hand) -> None:
    most = hand.swap("int4", count=NUM_LAYERS)["numbers"]["blocks_after"]
    streams = fill(hand, 20, 430, 90)  # more than fit: the blocks stay in use

    def answer() -> dict[str, Any] | None:  # the reflex may be changing layers itself
        end = hand.swap("full", count=NUM_LAYERS)
        return end if end["state"] != "conflict" else None

    refused = wait_for("no other morph to run", answer)
    with hand.service.explained():
        assert refused["state"] == "deferred", refused
        numbers = refused["numbers"]
        assert numbers["pages_needed"] > numbers["pages_free"]
        assert numbers["blocks_used"] <= numbers["blocks_needed"] and numbers["blocks"] < most
        all_complete(streams, 430)


@pytest.mark.slow
def test_layers_that_may_wait_for_their_pages_come_back_when_the_streams_end(hand: Hand) -> None:
    assert hand.swap("int4", count=NUM_LAYERS)["state"] == "applied"
    streams = fill(hand, 8, 430, 130)
    waiting = hand.swap("full", count=NUM_LAYERS, wait_s=60, wait=False)
    assert waiting["state"] == "running"
    all_complete(streams, 430)
    with hand.service.explained():
        assert hand.ended(waiting["id"], 10)["state"] == "applied"
        wait_for("full precision", hand.is_full)


@pytest.mark.slow
def test_a_cache_cannot_grow_beyond_the_budget_and_serves_on(hand: Hand, oracle: list[str]) -> None:
    running = stream(hand.service, 400)
    kv, most = hand.look()["kv"], hand.look()["max_blocks"]
    impossible, refused = hand.resize(most + 1), hand.resize(most)
    with hand.service.explained():
        assert f"could hold at most {most} KV blocks" in impossible["error"]["message"], impossible
        assert refused["state"] == "deferred", refused
        assert kv["blocks"] <= refused["numbers"]["max_blocks"] < most
        assert running.finished().tokens == oracle
        assert hand.look()["kv"]["blocks"] == kv["blocks"]


def test_a_cache_is_not_shrunk_below_its_use_and_drops_nothing(hand: Hand, oracle: list[str]) -> None:
    least = hand.look()["min_blocks"]
    streams, preempted = fill(hand, 2, 400, least + 3), hand.preemptions()
    refused = hand.resize(least)
    with hand.service.explained():
        assert refused["state"] == "deferred", refused
        assert refused["numbers"]["blocks_used"] > refused["numbers"]["blocks_asked"] == least
        all_complete(streams, 400)
        assert [one.tokens for one in streams] == [oracle] * 2
        assert hand.preemptions() == preempted


@pytest.mark.slow
def test_a_shrink_that_may_wait_happens_when_the_blocks_are_free(hand: Hand, oracle: list[str]) -> None:
    least = hand.look()["min_blocks"]
    streams = fill(hand, 2, 400, least + 3)
    waiting = hand.resize(least, wait_s=60, wait=False)
    all_complete(streams, 400)
    with hand.service.explained():
        assert [one.tokens for one in streams] == [oracle] * 2
        assert hand.ended(waiting["id"], 10)["state"] == "applied"


# --------------------------------------------------------------------------- 14: damaged weights


@contextmanager
def one_byte_of_every_page_flipped(host_dir: str) -> Iterator[None]:
    """Damage the images that all workers of the host share."""
    [path] = Path(host_dir).glob("*.images")
    _flip(path)
    try:
        yield
    finally:
        _flip(path)


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        for at in range(4096 + 1203, path.stat().st_size, 4096):  # behind the header
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0x40]))


def test_a_damaged_host_image_is_found_before_it_serves(hand: Hand, oracle: list[str]) -> None:
    host_dir = hand.service.settings["WORKER__HOST_DIR"]
    running = stream(hand.service, 400)
    with one_byte_of_every_page_flipped(host_dir):
        for precision in QUANTIZED:
            found = hand.swap(precision, layers=[3])
            assert found["state"] == "failed" and "layer 3" in found["reason"], found
            assert found["numbers"]["halves_applied"] == 0, found
    with hand.service.explained():
        assert running.finished().tokens == oracle
        assert hand.is_full()
        assert hand.swap("int4", layers=[3])["state"] == "applied"  # the image is whole again


@pytest.mark.slow
def test_a_damaged_image_of_full_precision_keeps_the_swapped_layer_serving(
    hand: Hand, oracle: list[str]
) -> None:
    assert hand.swap("int4", layers=[2], parts=["ffn"])["state"] == "applied"
    with one_byte_of_every_page_flipped(hand.service.settings["WORKER__HOST_DIR"]):
        found = hand.swap("full", count=1)
        assert found["state"] == "failed", found
    during = stream(hand.service, 40).finished()
    with hand.service.explained():
        assert_complete(during, 40)
        assert during.num_exact == 0
        assert hand.swap("full", count=1)["state"] == "applied"
        assert stream(hand.service, 400).finished().tokens == oracle


# --------------------------------------------------------------------------- two hands, and floors


def at_once(orders: list[Any]) -> list[dict[str, Any]]:
    """Each in a thread of its own, let go together; their ends."""
    start, ends = threading.Barrier(len(orders)), [dict[str, Any]() for _ in orders]

    def give(i: int) -> None:
        start.wait(10)
        ends[i] = orders[i]()

    threads = [threading.Thread(target=give, args=(i,), daemon=True) for i in range(len(orders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


def test_of_two_swaps_of_the_same_layers_at_once_one_happens_and_the_other_is_told(hand: Hand) -> None:
    running = stream(hand.service, 440, extra_body={"min_precision": "full"})  # holds the first one back
    running.wait_chunks(3)
    chosen = [1, 4, 6]
    ends = at_once(
        [lambda p=precision: hand.swap(p, layers=chosen, wait_s=60) for precision in ("int4", "int8")]
    )
    with hand.service.explained():
        assert sorted(end["state"] for end in ends) == ["applied", "conflict"], ends
        [applied] = [i for i, end in enumerate(ends) if end["state"] == "applied"]
        assert ends[applied]["id"] in ends[1 - applied]["reason"]
        precision = ("int4", "int8")[applied]
        wanted = [
            {"attention": precision, "ffn": precision} if i in chosen else FULL for i in range(NUM_LAYERS)
        ]
        wait_for("the shape of one of them", lambda: hand.look()["layers"] == wanted, 5)
        assert_complete(running.finished(), 440)
        assert running.num_exact == 440


@pytest.mark.slow
def test_of_two_resizes_at_once_one_happens_and_a_swap_beside_it_too(hand: Hand, oracle: list[str]) -> None:
    blocks, least = hand.look()["kv"]["blocks"], hand.look()["min_blocks"]
    running = stream(hand.service, 440).wait_chunks(3)
    ends = at_once(
        [
            lambda: hand.resize(least + 4, wait_s=20),
            lambda: hand.resize(blocks - 4, wait_s=20),
            lambda: hand.swap("int4", layers=[0], wait_s=20),
        ]
    )
    with hand.service.explained():
        states = [end["state"] for end in ends]
        assert sorted(states[:2]) in (["applied", "conflict"], ["applied", "applied"]), ends
        assert states[2] == "applied"
        assert_complete(running.finished(), 440)
        assert_exact_while_full(running, oracle)


@pytest.mark.slow
def test_a_stream_that_must_be_full_holds_all_swaps_back_until_it_ends(hand: Hand, oracle: list[str]) -> None:
    held = stream(hand.service, 400, extra_body={"min_precision": "full"})
    held.wait_chunks(5)
    refused = hand.swap("int3", count=NUM_LAYERS)
    waiting = hand.swap("int4", layers=[5], wait_s=60, wait=False)
    with hand.service.explained():
        assert refused["state"] == "deferred" and refused["numbers"]["requests_holding"] == 1, refused
        assert waiting["state"] == "running"
        assert held.finished().tokens == oracle and held.num_exact == 400
        assert hand.ended(waiting["id"], 10)["state"] == "applied"  # at once, not when its patience ends

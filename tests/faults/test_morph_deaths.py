"""Processes that die in the middle of a morph, and a load that swings: faults 1, 9 and 16 of docs/faults.md
where morphs are concerned."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.common.service import Service, wait_for
from bus.messages import Event
from bus.morphs import MorphReport
from tests.faults.conftest import heal
from tests.faults.load import Load
from tests.faults.morphs import (
    FULL,
    NUM_LAYERS,
    SMALL_BUDGET,
    Hand,
    assert_complete,
    assert_exact_while_full,
    decisions,
    settings,
    stream,
    told,
)

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(240)]
Report = Callable[[dict[str, Any]], None]

LEASE_S = 2.0
# A swap costs a fiftieth of what a stream does: at this share its layers come one by one as long as the
# stream runs. With less none comes before its end, and then, at rest, all come at once.
SLOW_MORPHS = {"WORKER__LEASE_S": str(LEASE_S), "WORKER__MORPH_SHARE": "0.02"}
COOLDOWN_S = 3.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two workers of one host behind two gateways. Morphs take so small a share that they can be met."""
    host_dir = tmp_path_factory.mktemp("host")
    with Service(num_workers=2, num_gateways=2, settings=settings(host_dir, SLOW_MORPHS)) as service:
        Hand(service).manual()
        yield service


@pytest.fixture
def service(pair: Service) -> Iterator[Service]:
    yield pair
    heal(pair)
    for worker in ("w0", "w1"):
        hand = Hand(pair, f"demo@{worker}")
        hand.wait_idle()
        assert hand.swap("full", count=NUM_LAYERS, wait_s=10)["state"] == "applied"


@pytest.fixture(scope="module")
def oracle(pair: Service) -> list[str]:
    undisturbed = stream(pair, 600).finished()
    assert_complete(undisturbed, 600)
    return undisturbed.tokens


def images(service: Service) -> list[Path]:
    return sorted(Path(service.settings["WORKER__HOST_DIR"]).glob("*.images"))


def half_way(hand: Hand) -> bool:
    """Some layers are swapped, and some are not."""
    layers = hand.look()["layers"]
    return any(layer != FULL for layer in layers) and FULL in layers


def test_a_worker_killed_in_mid_swap_loses_no_request_and_comes_back_at_full(
    service: Service, oracle: list[str], report: Report
) -> None:
    hand, [shared] = Hand(service, "demo@w1"), images(service)
    before, inode = hand.pages(), shared.stat().st_ino
    with service.explained():
        with Load(service, clients=2) as load:
            load.warm()
            streams = [stream(service, 600) for _ in range(4)]
            morph = hand.swap("int4", count=NUM_LAYERS, wait=False)
            wait_for("the swap to be half-way", lambda: half_way(hand), 20, every_s=0.01)
            load.mark()
            service.processes["w1"].kill()
            load.recover(20)
        for one in streams:
            assert_complete(one.finished(), 600)
            assert_exact_while_full(one, oracle)
        assert load.failed == []
        end = hand.ended(morph["id"])
        assert end["state"] == "failed" and "w1" in end["reason"], end
        assert [path.stat().st_ino for path in images(service)] == [inode]  # w0 has it
        heal(service)
        wait_for("w1 at full precision", hand.is_full)
        wait_for("the pages of a fresh worker", lambda: hand.pages() == before)
        assert [path.stat().st_ino for path in images(service)] == [inode]  # and w1 has it again
        hand.wait_idle()
    report(load.row("kill -9 worker in mid-swap"))


def test_the_only_worker_killed_in_mid_swap_finds_its_host_images_again(
    tmp_path: Path, oracle: list[str]
) -> None:
    with Service(settings=settings(tmp_path, SLOW_MORPHS)) as alone, alone.explained():
        hand = Hand(alone).manual()
        before, inode = hand.pages(), images(alone)[0].stat().st_ino
        running = stream(alone, 600)
        running.wait_chunks(5)
        hand.swap("int3", count=NUM_LAYERS, wait=False)
        wait_for("the swap to be half-way", lambda: half_way(hand), 20, every_s=0.01)
        alone.processes["w0"].kill()
        alone.processes["w0"].start()
        assert_complete(running.finished(), 600)
        assert_exact_while_full(running, oracle)
        alone.wait_ready()
        wait_for("full precision", hand.is_full)
        wait_for("the pages of a fresh worker", lambda: hand.pages() == before)
        assert [path.stat().st_ino for path in images(alone)] == [inode]
        assert alone.processes["w0"].terminate() == 0
        assert images(alone) == [], "the last one removes what nobody needs"


def test_a_gateway_killed_while_it_waits_for_a_morph_leaves_the_morph_and_the_others_alone(
    service: Service, oracle: list[str], report: Report
) -> None:
    here, there = Hand(service, "demo@w0"), Hand(service, "demo@w0", gateway=1)
    with service.explained():
        with Load(service, clients=2) as load:
            load.warm()
            mine, lost = stream(service, 600), stream(service, 600, gateway=1)
            lost.wait_chunks(3)
            morph = there.swap("int8", count=NUM_LAYERS, wait=False)
            wait_for("the other gateway to hear of it", lambda: known(here, morph["id"]))
            load.mark()
            service.processes["gateway1"].kill()
            load.recover(20)
        assert_complete(mine.finished(), 600)
        assert_exact_while_full(mine, oracle)
        assert lost.finished().error is not None
        assert load.failed == []
        assert here.ended(morph["id"])["state"] == "applied"
        here.wait_idle()  # what the dead one had is cancelled
    report(load.row("kill -9 gateway that ordered a morph"))


def known(hand: Hand, morph_id: str) -> bool:
    return any(morph["id"] == morph_id for morph in hand.service.state(hand.gateway)["morphs"])


# --------------------------------------------------------------------------- the reflex's own morphs

SWING_S = 6.0


@pytest.fixture
def bursty(tmp_path: Path) -> Iterator[Service]:
    with Service(settings=settings(tmp_path, SMALL_BUDGET)) as service:
        Hand(service).policy(mode="performance", cooldown_s=COOLDOWN_S, windows=2, kv_usage_low=0.4)
        yield service


def swing(service: Service, times: int) -> list[Any]:
    """Bursts of more streams than full precision has blocks for, and silence, by turns."""
    streams: list[Any] = []
    for _ in range(times):
        for _ in range(3):
            streams += [stream(service, 300) for _ in range(6)]
            time.sleep(SWING_S / 6)
        time.sleep(SWING_S / 2)
    return streams


def turns(found: list[Event]) -> int:
    """How often relief followed a return of layers, or a return relief."""
    goals = [event.cause == "ease" for event in found]
    return sum(one != other for one, other in pairwise(goals))


def assert_all_end(service: Service, found: list[Event]) -> None:
    """Each decision has its words, its numbers and an end."""
    assert found, "a burst beyond the blocks must have caused a morph"
    for event in found:
        assert event.reason and {"kv_usage", "predicted_wait_s", "steps"} <= event.numbers.keys()
    wanted = {event.morph_id for event in found}

    def ended() -> set[str]:
        reports = [one for _, one in told(service) if isinstance(one, MorphReport)]
        return {one.id for one in reports if one.state != "running"}

    wait_for("the morphs to end", lambda: wanted <= ended())


def test_a_load_that_swings_turns_the_shape_no_more_often_than_itself(bursty: Service) -> None:
    streams = swing(bursty, 5)
    with bursty.explained():
        for one in streams:
            assert_complete(one.finished(), 300)
        Hand(bursty).wait_idle()
        found = decisions(bursty)
        assert_all_end(bursty, found)
        assert turns(found) <= 2 * 5


def test_without_a_controller_the_reflex_goes_on_and_gives_all_layers_back(bursty: Service) -> None:
    streams: list[Any] = []
    load = threading.Thread(target=lambda: streams.extend(swing(bursty, 4)), daemon=True)
    load.start()
    with bursty.explained():
        wait_for("a decision", lambda: decisions(bursty))
        controller = bursty.processes["controller"]
        controller.kill()
        before = len(decisions(bursty))
        load.join()
        for one in streams:
            assert_complete(one.finished(), 300)
        hand = Hand(bursty)
        wait_for("all layers in full precision", hand.is_full, within_s=30)
        found = decisions(bursty)
        assert len(found) > before
        assert_all_end(bursty, found)
        controller.start()
        hand.wait_idle()

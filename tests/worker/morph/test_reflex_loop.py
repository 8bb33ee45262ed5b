"""The reflex on a real engine: what envelopes allow is done between steps, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from bus.messages import Event, LayerShape
from bus.morphs import Swap
from bus.policy import MOVES_S, NEWS_S, Envelope, Mode, Policy
from bus.precisions import PRECISIONS, Precision
from tests.support.engine_toys import continuation, request
from tests.support.morph_toys import Rig
from worker.distributed.messages import MemberLoad
from worker.morph.reflex import UP, Lever
from worker.morph.reflex_loop import AGAIN_S, MemberRoom, ReflexLoop

FULL = LayerShape()


class Clocked:
    """A rig whose reflex is asked at every boundary, on a clock of its own: a step takes 10 ms."""

    def __init__(self, precisions: Sequence[Precision] = PRECISIONS) -> None:
        self.at_s = 1000.0
        self.rig = Rig(
            num_layers=4, num_pages=60, model_len=40, precisions=precisions, clock=lambda: self.at_s
        )
        self.loop = ReflexLoop(self.rig.executor, lambda: self.at_s)
        self.events: list[Event] = []
        self.tokens: dict[str, list[int]] = {}

    def grant(self, mode: Mode = "performance", **fields: Any) -> None:
        policy = Policy(mode=mode, loss_budget=1.0)
        envelope = Envelope(
            id="e",
            epoch=0,
            instance="toy@w0",
            policy=policy.in_force() or policy,
            precisions=["int8", "int4"],
        )
        self.loop.grant(replace(envelope, **fields))

    def boundary(self, seconds: float = 0.01) -> None:
        self.at_s += seconds
        self.events += self.loop.act()
        reports = self.rig.advance()
        self.loop.hear(reports)

    def step(self, times: int = 1) -> None:
        """Steps with their boundaries, and boundaries until no morph runs."""
        for _ in range(times):
            self.boundary()
            for result in self.rig.engine.step():
                for output in result.outputs:
                    self.tokens.setdefault(output.delta.request_id, []).extend(output.delta.token_ids)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if not self.rig.executor.num_running:
                return
            time.sleep(0.0005)  # for the thread that copies
            self.boundary(0.0)
        raise AssertionError("a morph does not come to an end")

    def flood(self, count: int = 8, max_tokens: int = 20) -> None:
        for i in range(count):
            self.rig.engine.submit("toy@w0", request(f"r{i}", list(range(1, 17)), max_tokens))

    def finish(self) -> None:
        for _ in range(500):
            if not self.rig.engine.has_work:
                return
            self.step()
        raise AssertionError("requests do not end")

    @property
    def shape(self) -> list[LayerShape]:
        return self.rig.instance.shape


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked()
    yield made
    made.rig.check_integrity()
    made.rig.close()


def test_a_flood_is_met_within_steps_and_afterwards_all_is_as_before(clocked: Clocked) -> None:
    blocks = clocked.rig.cache.num_blocks
    clocked.grant()
    clocked.flood()
    clocked.step(14)
    (event, *_) = clocked.events
    assert (event.kind, event.subject, event.source) == ("morph_decided", "toy@w0", "w0")
    assert event.cause in ("kv_usage", "queue_delay")
    assert event.at_ms and event.numbers["kv_needed"] > event.numbers["kv_blocks"]
    assert clocked.rig.cache.num_blocks > blocks and clocked.shape != [FULL] * 4
    (begun, *_) = (one for one in clocked.rig.reports if one.state == "running")
    assert begun.id == event.morph_id and begun.reason == event.reason
    clocked.finish()
    for i in range(8):
        assert clocked.tokens[f"r{i}"] == continuation(list(range(1, 17)), 20)
    clocked.at_s += 10
    clocked.step(2)
    assert clocked.shape == [FULL] * 4 and clocked.rig.cache.num_blocks == blocks
    assert clocked.events[-1].cause == "ease"


@pytest.mark.parametrize("apart_s", [0.01, 2.0], ids=["burst", "trickle"])
def test_a_burst_that_goes_on_gets_blocks_for_what_comes_next(clocked: Clocked, apart_s: float) -> None:
    clocked.grant()
    clocked.flood(count=3, max_tokens=20)
    for number in range(3, 8):
        clocked.step()
        clocked.at_s += apart_s
        clocked.rig.engine.submit("toy@w0", request(f"r{number}", list(range(1, 17)), 20))
        if clocked.events:
            break
    clocked.step(4)
    numbers = clocked.events[0].numbers
    assert numbers["kv_needed"] > 0 and (numbers["blocks_coming"] > 0) == (apart_s < 1.0)
    clocked.finish()


@pytest.mark.parametrize("envelope", ["none", "manual", "of another epoch", "of nothing"])
def test_without_leave_nothing_is_done(clocked: Clocked, envelope: str) -> None:
    if envelope == "manual":
        clocked.grant("manual")
    if envelope == "of another epoch":
        clocked.grant(epoch=7)
    if envelope == "of nothing":
        clocked.grant(precisions=[])
    clocked.flood()
    clocked.finish()
    assert clocked.rig.reports == []
    if envelope != "of nothing":
        assert clocked.events == []
        return
    (event,) = clocked.events  # once, however many steps
    assert (event.kind, event.subject, event.cause) == ("relief_withheld", "toy@w0", "")
    there = ", ".join(PRECISIONS)
    assert event.reason.endswith(f": layers may be in {there} here, and by the policy down to int4")
    assert event.numbers["kv_needed"] > event.numbers["kv_blocks"]


def test_a_budget_that_is_used_up_is_told_once_in_a_burst(clocked: Clocked) -> None:
    clocked.grant(policy=replace(Policy(), loss_budget=0.0002))
    for burst in (1, 2):
        clocked.flood(count=8)
        clocked.finish()
        told = [one.reason for one in clocked.events if one.kind == "relief_withheld"]
        assert len(told) == burst and "% of at most 0.020%, and no half is left" in told[-1]
        clocked.at_s += 20.0
        clocked.tokens.clear()


def test_a_queue_for_compute_is_told_once_and_no_layer_pays_for_it(clocked: Clocked) -> None:
    clocked.grant()
    clocked.rig.instance.load.prompt_rate.add(10, 1.0)  # as measured: 10 tokens in a second
    clocked.flood(count=2, max_tokens=2)
    clocked.boundary()
    clocked.boundary()
    (event,) = clocked.events
    assert event.kind == "relief_withheld" and event.numbers["predicted_compute_s"] == 3.2
    assert event.reason.startswith("requests wait for compute, not for KV blocks: 32 prompt tokens are due")
    assert max(clocked.rig.executor.urgencies.values()) == 0.0
    clocked.finish()
    assert clocked.rig.reports == []


def test_relief_in_a_group_that_would_only_delay_the_prompts_is_withheld_and_told_once(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = clocked.rig.target.loads
    monkeypatch.setattr(clocked.rig.target, "loads", lambda: [*own(), MemberLoad()])  # and one that idles
    clocked.grant()
    clocked.rig.instance.load.prompt_rate.add(200, 1.0)  # as measured: 200 tokens in a second
    clocked.rig.instance.load.residence.add(0.05)
    clocked.flood()
    clocked.step(3)
    (event,) = clocked.events
    assert event.kind == "relief_withheld" and event.numbers["kv_needed"] > event.numbers["kv_blocks"]
    assert "the requests that wait would have their first tokens after" in event.reason
    assert clocked.rig.reports == []


def test_a_stale_envelope_allows_the_way_back_alone(clocked: Clocked) -> None:
    clocked.grant(valid_s=60.0)
    clocked.flood()
    clocked.step(14)
    assert clocked.shape != [FULL] * 4
    clocked.finish()
    num_events = len(clocked.events)
    clocked.at_s += 61
    clocked.step(2)
    assert clocked.shape == [FULL] * 4
    clocked.rig.reports.clear()
    clocked.flood()
    clocked.finish()
    (withheld,) = (one for one in clocked.events[num_events:] if one.cause != "ease")
    assert withheld.kind == "relief_withheld" and "silent for 60 s: no more loss" in withheld.reason
    assert clocked.shape == [FULL] * 4


def test_a_swap_by_hand_goes_first_and_stands_until_something_has_run(clocked: Clocked) -> None:
    clocked.grant()
    clocked.rig.executor.begin(Swap(id="hand", epoch=0, instance="toy@w0", precision="int4", layers=[2]))
    clocked.step()
    clocked.at_s += 3600
    clocked.step(5)
    assert clocked.shape[2] == LayerShape(attention="int4", ffn="int4") and clocked.events == []
    assert clocked.loop.patience_s is None  # an idle engine sleeps
    clocked.flood(count=1, max_tokens=2)
    clocked.finish()
    clocked.step()
    assert clocked.shape == [FULL] * 4 and clocked.events[-1].cause == "ease"


@pytest.mark.parametrize("runs", [False, True], ids=["idle", "at work"])
def test_a_swap_for_what_does_not_come_goes_back_after_its_time_and_not_before(
    clocked: Clocked, runs: bool
) -> None:
    clocked.grant()
    order = Swap(id="long", epoch=0, instance="toy@w0", precision="int4", layers=[2], stands_s=10.0)
    clocked.rig.executor.begin(order)
    clocked.step()
    if runs:
        clocked.flood(count=1, max_tokens=2)
        clocked.finish()
    assert clocked.loop.patience_s == pytest.approx(10.0, abs=1.0)  # an idle engine wakes for it
    clocked.at_s += 9.0
    clocked.step(5)
    assert clocked.shape[2] == LayerShape(attention="int4", ffn="int4") and clocked.events == []
    clocked.at_s += 1.5
    clocked.step()
    assert clocked.shape == [FULL] * 4 and clocked.events[-1].cause == "ease"


@pytest.mark.parametrize("layer", [0, 9])
def test_an_order_that_changes_nothing_or_is_refused_holds_no_return(clocked: Clocked, layer: int) -> None:
    clocked.grant()
    clocked.flood()
    clocked.step(14)
    for _ in range(500):  # until all is idle, without a boundary
        clocked.rig.engine.step()
    there = clocked.shape[0].ffn
    clocked.rig.executor.begin(
        Swap(id="hand", epoch=0, instance="toy@w0", precision=there, layers=[layer], parts=["ffn"])
    )
    assert clocked.shape != [FULL] * 4
    clocked.at_s += 2.0  # ten times what the relief took
    clocked.step(2)
    assert clocked.shape == [FULL] * 4 and clocked.events[-1].cause == "ease"


def test_what_waits_for_a_precision_brings_the_layers_up_to_it(clocked: Clocked) -> None:
    clocked.grant()
    clocked.rig.executor.begin(Swap(id="hand", epoch=0, instance="toy@w0", precision="int4", count=4))
    clocked.step()
    clocked.grant(floor="int8")  # no cool-down after the order holds it
    clocked.step()
    assert clocked.shape == [LayerShape(attention="int8", ffn="int8")] * 4
    assert clocked.events[-1].cause == "precision_floor"
    clocked.step(3)
    assert len(clocked.events) == 1


def test_a_floor_that_the_controller_repeats_no_more_is_over(clocked: Clocked) -> None:
    clocked.grant(floor="int8")
    clocked.at_s += NEWS_S - 0.1
    clocked.flood()
    clocked.step(8)
    assert {half for one in clocked.shape for half in (one.attention, one.ffn)} <= {"full", "int8"}
    clocked.at_s += 0.1
    clocked.step(6)
    assert {one.ffn for one in clocked.shape} == {"int4"}
    clocked.finish()


def test_an_instance_without_int8_goes_down_and_back_and_up_to_a_floor() -> None:
    made = Clocked(["full", "int4"])
    try:
        made.grant(precisions=["int8", "int4"])
        made.flood()
        made.step(14)
        assert made.shape != [FULL] * 4
        made.finish()
        made.at_s += 10
        made.step(2)
        assert made.shape == [FULL] * 4 and made.events[-1].cause == "ease"
        made.rig.executor.begin(Swap(id="hand", epoch=0, instance="toy@w0", precision="int4", count=4))
        made.step()
        made.grant(floor="int8")
        made.step(2)
        assert made.shape == [FULL] * 4 and made.events[-1].cause == "precision_floor"
        made.rig.check_integrity()
    finally:
        made.rig.close()


def test_no_loss_is_taken_for_what_moves_elsewhere_unless_it_is_still_here_soon(clocked: Clocked) -> None:
    clocked.grant()
    clocked.flood()
    clocked.rig.engine.step()
    needed = clocked.loop.load(clocked.loop._morphs.targets["toy@w0"], clocked.loop.of("toy@w0")).kv_needed
    blocks = clocked.rig.cache.num_blocks
    clocked.grant(moved_blocks=needed - blocks // 2)
    assert needed > blocks
    clocked.step(4)
    assert clocked.shape == [FULL] * 4 and not clocked.events
    clocked.at_s += MOVES_S
    clocked.step(4)
    assert clocked.events[0].numbers["kv_needed"] > blocks and clocked.shape != [FULL] * 4
    clocked.finish()


def test_a_forecast_brings_blocks_ahead_and_is_over_unless_it_is_repeated(clocked: Clocked) -> None:
    blocks = clocked.rig.cache.num_blocks
    clocked.flood(count=1, max_tokens=20)
    clocked.grant(expected_blocks=2 * blocks)
    clocked.step(6)
    assert clocked.events and {one.cause for one in clocked.events} == {"forecast"}
    assert clocked.rig.cache.num_blocks > blocks and clocked.shape != [FULL] * 4
    clocked.finish()
    clocked.at_s += 3.0
    clocked.step(2)
    assert clocked.events[-1].cause == "ease" and clocked.shape == [FULL] * 4


def test_pressure_cancels_a_return(clocked: Clocked) -> None:
    clocked.grant()
    clocked.rig.executor.begin(Swap(id="hand", epoch=0, instance="toy@w0", precision="int8", count=4))
    clocked.step()
    clocked.rig.variants.hold.clear()  # its copies do not end
    clocked.flood(count=1, max_tokens=2)
    clocked.rig.engine.step()
    clocked.boundary()
    assert clocked.events[-1].cause == "ease" and clocked.rig.executor.num_running
    ordered = clocked.events[-1].morph_id
    clocked.rig.engine.step()
    clocked.flood()
    for _ in range(8):
        clocked.rig.engine.step()
    clocked.at_s += 0.2
    clocked.boundary()
    clocked.boundary()
    assert [one.id for one in clocked.rig.reports if one.reason == "cancelled"] == [ordered]
    clocked.rig.variants.hold.set()
    clocked.finish()


@pytest.mark.parametrize("lever", ["swap_up", "kv_up", "kv_down", "resize"])
def test_pressure_cancels_what_gives_bits_back_and_nothing_else(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch, lever: Lever
) -> None:
    cancelled: list[str] = []
    clocked.grant()
    found = clocked.loop.of("toy@w0")
    assert found
    found.morph_id, found.lever = "under way", lever
    with monkeypatch.context() as patch:
        patch.setattr(clocked.rig.executor, "is_morphing", lambda instance: True)
        patch.setattr(clocked.rig.executor, "cancel", cancelled.append)
        clocked.flood()
        for _ in range(3):
            clocked.rig.engine.step()
            clocked.boundary(0.1)
    found.morph_id = ""
    assert set(cancelled) == ({"under way"} if lever in UP else set())


def test_an_instance_that_is_gone_is_forgotten(clocked: Clocked) -> None:
    clocked.grant(instance="other@w0")
    assert clocked.loop.act() == []
    assert clocked.loop.patience_s is None


def test_morphs_take_more_of_the_time_the_longer_a_request_misses_blocks(clocked: Clocked) -> None:
    clocked.loop.act()
    assert max(clocked.rig.executor.urgencies.values()) == 0.0
    clocked.flood()
    clocked.step(10)
    clocked.at_s += 0.2  # of 0.5: a quarter of the objective
    clocked.loop.act()
    assert 0.5 <= max(clocked.rig.executor.urgencies.values()) < 1.0
    clocked.at_s += 1.0
    clocked.loop.act()
    assert max(clocked.rig.executor.urgencies.values()) == 1.0
    clocked.finish()


@pytest.mark.parametrize("loss_budget", [1.0, 0.0], ids=["at rest", "under pressure, without a budget"])
def test_what_cannot_be_done_is_not_looked_for_at_every_step(
    clocked: Clocked, monkeypatch: pytest.MonkeyPatch, loss_budget: float
) -> None:
    room, target = clocked.rig.target.room, clocked.rig.target
    looks = list[float]()

    def counted() -> MemberRoom:
        looks.append(clocked.at_s)
        return room()

    monkeypatch.setattr(target, "room", counted)
    policy = replace(Policy(), loss_budget=loss_budget, kv_usage_low=0.8, kv_usage_high=0.9)
    clocked.grant(policy=policy)
    clocked.flood(count=1 if loss_budget else 8, max_tokens=20)
    clocked.finish()
    assert looks
    by_cause = 1 if loss_budget else 2
    assert len(looks) <= by_cause * (1 + (looks[-1] - looks[0]) / AGAIN_S)

"""How long a simulated swap takes, and how much of that the steps wait for, calculated by hand."""

from __future__ import annotations

import msgspec
import pytest

from bus.morphs import ConvertCache, MorphReport, Swap
from bus.precisions import KVPrecision
from controller.planning.lever_costs import LeverCosts, observe_cost
from instar.replay.outcomes import RequestOutcome
from instar.replay.schemas import Arrival
from instar.simulate.engine import SimulatedInstance, Tally
from instar.simulate.morphs import SimulatedMorph, Turn
from tests.support.simulations import SMALL, cluster, evenly
from worker.morph.losses import losses_of

HALF_S = SMALL.morph.half_s
COPY_S = [pages * SMALL.memory.page_bytes * SMALL.morph.byte_s for pages in (7, 19)]  # attention, FFN in int4


class Swapping:
    """An instance whose first two layers are swapped to int4, and its boundaries."""

    def __init__(self, *, is_busy: bool) -> None:
        self.now_s = 10.0
        losses = losses_of(SMALL.num_layers, SMALL.variants, {})
        self.instance = SimulatedInstance(0, "small@w0", SMALL, Tally(), losses)
        if is_busy:
            self.instance.submit(RequestOutcome(0, 10.0, 10, 100), 10.0)
            self.instance.take_in()
        command = Swap(id="s", epoch=1, instance="small@w0", count=2, precision="int4", wait_s=1.0)
        self.morph = SimulatedMorph(command, "", 10.0, SMALL.memory.page_bytes, SMALL.morph)
        self.turn = Turn(SMALL.morph.share, lambda: self.now_s)
        self.is_begun = False

    @property
    def num_done(self) -> int:
        return 4 - len(self.morph.pending)

    def boundary(self, urgency: float) -> MorphReport | None:
        self.turn.begin(self.instance.has_work, urgency)
        carry_on = self.morph.advance if self.is_begun else self.morph.begin
        self.is_begun = True
        return carry_on(self.instance, self.turn)


def test_an_urgent_swap_takes_halves_between_two_steps_as_long_as_it_may_run_up_a_debt() -> None:
    """A quarter of 50 ms lets the third half begin, since the two before it take less."""
    swap = Swapping(is_busy=True)
    assert swap.boundary(0.25) is None
    took_s = 3 * HALF_S + 2 * COPY_S[0] + COPY_S[1]
    assert swap.num_done == 3 and swap.turn.spent_s == pytest.approx(took_s)
    assert took_s - HALF_S / 2 < 0.0125 < took_s
    swap.now_s += took_s + 0.002  # a short step pays for the beginning of the fourth alone
    assert swap.boundary(0.25) is None and swap.turn.spent_s > 0 and swap.num_done == 3
    swap.now_s += 0.1
    report = swap.boundary(0.25)
    assert report and report.state == "applied" and report.numbers["halves_applied"] == 4
    assert (
        report.numbers["awaited_seconds"] <= report.numbers["copy_seconds"] == pytest.approx(2 * sum(COPY_S))
    )
    assert report.numbers["blocks_seconds"] == pytest.approx(HALF_S + COPY_S[0])


def test_a_swap_at_leisure_takes_its_share_between_the_steps_and_copies_beside_them() -> None:
    """Each boundary has time for half of a half, and the steps after it pay for it."""
    swap = Swapping(is_busy=True)
    for _ in range(8):
        assert swap.boundary(0.0) is None or swap.num_done == 4
        assert swap.turn.spent_s == pytest.approx(HALF_S / 2)
        assert swap.boundary(0.0) is None or swap.num_done == 4
        assert swap.turn.spent_s == 0.0
        swap.now_s += HALF_S / 2 / SMALL.morph.share + 0.01
    assert swap.num_done == 4


def test_an_idle_worker_swaps_without_a_pause() -> None:
    swap = Swapping(is_busy=False)
    report = None
    while not report:
        report = swap.boundary(0.0)
        swap.now_s = swap.morph.due_s or 0.0
    assert report.ended_ms == pytest.approx(1e3 * (10.0 + 4 * HALF_S + 2 * sum(COPY_S)), abs=1)
    assert swap.instance.shape.num_below == 2


WITH_KV = msgspec.structs.replace(
    SMALL,
    memory=msgspec.structs.replace(SMALL.memory, kv_gain=2.0, kv_loss=0.0001),
    morph=msgspec.structs.replace(SMALL.morph, kv_layer_s=0.002),
)


def test_the_kv_cache_is_converted_layer_by_layer_there_and_back() -> None:
    losses = losses_of(SMALL.num_layers, SMALL.variants, {})
    instance = SimulatedInstance(0, "small@w0", WITH_KV, Tally(), losses)
    blocks, now_s = instance.blocks.capacity, 10.0
    turn = Turn(WITH_KV.morph.share, lambda: now_s)
    goals: list[tuple[KVPrecision, int, float]] = [("int8", 2 * blocks, 0.0001), ("full", blocks, 0.0)]
    for goal, after, loss in goals:
        command = ConvertCache(id=goal, epoch=1, instance="small@w0", kv_dtype=goal)
        morph = SimulatedMorph(command, "", now_s, SMALL.memory.page_bytes, WITH_KV.morph)
        turn.begin(is_busy=False, urgency=0.0)
        report = morph.begin(instance, turn)
        while report is None:
            now_s += turn.spent_s + 0.01
            turn.begin(is_busy=False, urgency=0.0)
            report = morph.advance(instance, turn)
        assert (report.kind, report.state) == ("kv", "applied"), report
        assert report.numbers["boundary_seconds"] == pytest.approx(SMALL.num_layers * 0.002)
        unlearned = LeverCosts()
        learned = observe_cost(unlearned, report).kinds["kv"]
        assert learned.duration_s != unlearned.kinds["kv"].duration_s, "the controller learns what it took"
        assert instance.blocks.capacity == after and instance.shape.loss == loss
        assert instance.shape.is_at_rest == (goal == "full")


def test_a_simulated_reflex_takes_8_bits_in_a_burst_and_gives_them_back() -> None:
    arrivals = [*evenly(3.0, 10.0), *(Arrival(10.0 + n / 25, 200, 100) for n in range(100))]
    arrivals += [Arrival(60.0 + n, 50, 5) for n in range(40)]
    found = cluster(calibration=WITH_KV)
    record = found.run(arrivals, drain_s=60.0)
    kv = [one for one in record.morphs if one.kind == "kv" and one.state == "applied"]
    assert "the KV cache to int8" in kv[0].reason and "the KV cache to full" in kv[-1].reason
    assert kv[0].numbers["blocks_after"] >= 2 * SMALL.memory.kv_blocks
    (one,) = found.instances.values()
    assert one.instance.shape.is_at_rest and one.instance.blocks.capacity == SMALL.memory.kv_blocks

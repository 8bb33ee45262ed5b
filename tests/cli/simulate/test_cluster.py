"""A simulated cluster: what it computes, and that nothing is lost in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bus.policy import Mode
from gateway.delivery.dispatch import Candidate, choose
from instar.replay.outcomes import UNFINISHED, RequestOutcome
from instar.replay.schemas import Arrival
from instar.simulate.calibration import EngineCalibration, StepCosts
from instar.simulate.cluster import TOO_LONG, Outage, SimulatedCluster, Unmeasured
from instar.simulate.relief import SimulatedMorphs
from instar.simulate.shortlist import Shortlist, key_of
from tests.support.simulations import SMALL, burst, cluster, evenly, with_limits

MODES: tuple[Mode, ...] = ("manual", "accuracy", "default", "performance")


def plain(
    fixed_s: float, prompt_token_s: float, decode_s: float, kv_token_s: float = 0.0
) -> EngineCalibration:
    costs = StepCosts(fixed_s, prompt_token_s, decode_s, kv_token_s)
    return msgspec.structs.replace(SMALL, step=costs, transit_s=0.0)


def settled(found: SimulatedCluster) -> None:
    """Checks that no block and no request is left anywhere."""
    for one in found.instances.values():
        one.instance.scheduler.check_integrity()
        one.instance.blocks.check_integrity()
        assert one.instance.blocks.num_used == 0
        assert not one.instance.has_work
        assert one.num_own == 0


def test_two_requests_take_what_a_calculation_by_hand_says() -> None:
    """The second comes during the first step. Its prompt runs with a decode of the first."""
    found = cluster(calibration=plain(1.0, 0.01, 0.1), mode="manual")
    arrivals = [Arrival(0.0, 10, 3), Arrival(0.5, 20, 2)]
    first, second = found.run(arrivals, drain_s=60.0).outcomes
    prefill = 1.0 + 10 * 0.01
    both = 1.0 + 20 * 0.01 + 0.1
    decodes = 1.0 + 2 * 0.1
    assert (first.first_s, second.first_s) == pytest.approx((prefill, prefill + both))
    assert (first.last_s, second.last_s) == pytest.approx([prefill + both + decodes] * 2)
    assert (first.ttft_s, second.ttft_s) == pytest.approx((1.1, 1.9))
    assert first.tpot_s == pytest.approx((both + decodes) / 2)
    assert found.record.tally.steps == 3


def test_a_step_costs_what_it_reads_of_the_cache() -> None:
    found = cluster(calibration=plain(0.0, 0.0, 0.0, kv_token_s=0.001), mode="manual")
    (one,) = found.run([Arrival(0.0, 100, 4)], drain_s=60.0).outcomes
    assert one.first_s == pytest.approx(0.1)
    assert one.last_s == pytest.approx(0.1 + 0.101 + 0.102 + 0.103)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_workers", [1, 3])
def test_every_request_ends_exactly_once_with_all_its_tokens(mode: Mode, num_workers: int) -> None:
    ends: list[int] = []

    class Counting(SimulatedCluster):
        def _ended(self, instance: object, outcome: RequestOutcome) -> None:
            ends.append(outcome.number)
            super()._ended(instance, outcome)  # type: ignore[arg-type]

    made = cluster(num_workers, mode)
    made.__class__ = Counting
    arrivals = burst(12.0 * num_workers)
    record = made.run(arrivals, drain_s=600.0)
    assert sorted(ends) == list(range(len(arrivals)))
    assert all(one.is_served and one.events == one.output_asked for one in record.outcomes)
    assert all(sum(tokens for tokens, _ in one.spans) == one.events for one in record.outcomes)
    assert record.events_in.total() == sum(one.output_tokens for one in arrivals) == record.tally.tokens
    settled(made)


def test_what_does_not_fit_is_refused_and_what_does_not_end_is_unfinished() -> None:
    found = cluster(mode="manual", calibration=plain(1.0, 0.0, 0.0))
    long, endless, short = found.run(
        [Arrival(0.0, 500, 100), Arrival(0.0, 10, 400), Arrival(0.0, 10, 2)], drain_s=60.0
    ).outcomes
    assert (long.error, long.status) == (TOO_LONG, 400)
    assert (endless.error, endless.ended_s) == (UNFINISHED, 60.0)
    assert short.is_served


def outcomes_of(record_of: SimulatedCluster, arrivals: Sequence[Arrival]) -> list[RequestOutcome]:
    return record_of.run(arrivals, drain_s=600.0).outcomes


def test_the_same_input_gives_the_same_result() -> None:
    first, second = cluster(2), cluster(2)
    arrivals = burst(20.0)
    assert outcomes_of(first, arrivals) == outcomes_of(second, arrivals)
    assert first.record == second.record


@settings(max_examples=8, deadline=None)
@example(143, 16.0, 1, "accuracy", 8, 32, None)  # a row of ease ends between two events
@given(
    seed=st.integers(0, 1000),
    rate=st.floats(1.0, 25.0),
    num_workers=st.sampled_from([1, 3, 10]),
    mode=st.sampled_from(MODES),
    max_num_seqs=st.sampled_from([2, 8, 64]),
    num_tokens=st.sampled_from([32, 128]),  # 32: prompts take many steps
    outage=st.sampled_from([None, (2.0, 5.0)]),
)
def test_steps_and_reports_that_are_taken_together_are_the_same_as_one_by_one(
    seed: int,
    rate: float,
    num_workers: int,
    mode: Mode,
    max_num_seqs: int,
    num_tokens: int,
    outage: Outage | None,
) -> None:
    calibration = with_limits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens)
    arrivals = burst(rate, seconds=6.0, seed=seed)
    fast = cluster(num_workers, mode, calibration, outage=outage)
    plain = cluster(num_workers, mode, calibration, outage=outage, is_plain=True)
    assert outcomes_of(fast, arrivals) == outcomes_of(plain, arrivals)
    assert fast.record.tally.scheduled <= plain.record.tally.scheduled
    plain.record.tally.scheduled = fast.record.tally.scheduled
    plain.record.tally.lost_quality = pytest.approx(fast.record.tally.lost_quality)  # type: ignore[assignment]
    assert fast.record == plain.record
    for one, other in zip(fast.instances.values(), plain.instances.values(), strict=True):
        assert one.forecast == other.forecast


few_at_a_time = st.lists(
    st.tuples(st.floats(0.0, 0.6), st.sampled_from([1, 15, 33, 64, 100, 200]), st.integers(1, 60)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(
    requests=few_at_a_time,
    num_workers=st.sampled_from([1, 2]),
    mode=st.sampled_from(MODES),
    num_tokens=st.sampled_from([1, 32, 512]),
    drain_s=st.sampled_from([0.0, 0.01, 60.0]),
)
@example([(0.0, 33, 30), (0.2, 33, 30)], 1, "default", 32, 60.0)  # the last step of a prompt has one token
@example([(0.0, 200, 1), (0.01, 1, 1)], 1, "default", 32, 60.0)  # one comes while the other's prompt runs
@example([(0.0, 200, 60), (0.0, 200, 60)], 1, "default", 512, 60.0)  # they come together
@example([(0.0, 1, 17), (0.0, 15, 32), (0.0625, 1, 1)], 1, "manual", 32, 0.0)  # two take blocks by turns
def test_a_request_that_runs_alone_leaves_what_the_scheduler_would_whoever_comes_meanwhile(
    requests: list[tuple[float, int, int]], num_workers: int, mode: Mode, num_tokens: int, drain_s: float
) -> None:
    due_s = accumulate(gap_s for gap_s, _, _ in requests)
    arrivals = [
        Arrival(at_s, prompt, output) for at_s, (_, prompt, output) in zip(due_s, requests, strict=True)
    ]
    calibration = with_limits(max_num_batched_tokens=num_tokens)
    fast, plain = (cluster(num_workers, mode, calibration, is_plain=is_plain) for is_plain in (False, True))
    fast.run(arrivals, drain_s)
    plain.run(arrivals, drain_s)
    assert fast.record.tally.scheduled <= plain.record.tally.scheduled
    plain.record.tally.scheduled = fast.record.tally.scheduled
    plain.record.tally.lost_quality = pytest.approx(fast.record.tally.lost_quality)  # type: ignore[assignment]
    assert fast.record == plain.record
    for one, other in zip(fast.instances.values(), plain.instances.values(), strict=True):
        one.instance.scheduler.check_integrity()
        assert one.forecast == other.forecast
        assert one.instance.prompt_rate.per_s == other.instance.prompt_rate.per_s
        assert one.instance.residence.mean_s == other.instance.residence.mean_s
        # Steps taken together give a sequence all of its blocks at once: their numbers may differ.
        assert len(one.instance.used_blocks) == len(other.instance.used_blocks)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), rate=st.floats(3.0, 25.0), mode=st.sampled_from(MODES[1:]))
@example(seed=81, rate=6.0, mode="accuracy")  # a return in vain before the relief held up the one after it
def test_a_reflex_that_is_not_asked_at_ease_does_the_same(seed: int, rate: float, mode: Mode) -> None:
    arrivals = burst(rate, seconds=6.0, seed=seed)
    seldom, always = cluster(mode=mode), cluster(mode=mode)
    first = outcomes_of(seldom, arrivals)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedMorphs, "_is_at_ease", lambda self, found, num_used: False)
        assert outcomes_of(always, arrivals) == first
    always.record.tally.scheduled = seldom.record.tally.scheduled
    assert always.record == seldom.record


def test_the_work_for_a_request_is_bounded_however_many_tokens_it_has() -> None:
    """The count is of the schedulers' work, without which nothing else is done."""
    calibration = with_limits(max_model_len=4096)
    memory = msgspec.structs.replace(calibration.memory, kv_blocks=1024, kv_pages=8192)
    calibration = msgspec.structs.replace(calibration, memory=memory)

    def scheduled(output: int) -> float:
        found = cluster(1000, calibration=calibration)
        record = found.run([Arrival(n / 50, 100, output) for n in range(500)], drain_s=60.0)
        assert all(one.events == output for one in record.outcomes)
        return record.tally.scheduled / 500

    assert scheduled(20) <= 6 and scheduled(2000) <= 6


def test_a_burst_is_relieved_and_afterwards_every_layer_is_back() -> None:
    found = cluster()
    arrivals = [*evenly(3.0, 10.0), *(Arrival(10.0 + n / 25, 200, 100) for n in range(100))]
    arrivals += [Arrival(60.0 + n, 50, 5) for n in range(40)]
    record = found.run(arrivals, drain_s=60.0)
    swaps = [one for one in record.morphs if one.kind == "swap" and one.state == "applied"]
    assert swaps and swaps[0].started_ms / 1e3 > 9.0
    blocks = [sample["instances"]["small@w0"]["kv_blocks"] for sample in record.samples]
    assert max(blocks) > SMALL.memory.kv_blocks * 1.3
    (one,) = found.instances.values()
    assert one.instance.shape.is_at_rest
    assert one.instance.blocks.capacity == SMALL.memory.kv_blocks
    assert 0.0 < record.below_s < 90.0
    settled(found)


def test_relief_lowers_the_wait_and_costs_quality() -> None:
    held, relieved = cluster(mode="manual"), cluster(mode="performance")
    arrivals = burst(11.0)
    waits = [sum(one.ttft_s or 0.0 for one in outcomes_of(found, arrivals)) for found in (held, relieved)]
    assert waits[1] < 0.8 * waits[0]
    assert held.record.tally.lost_quality == 0.0 < relieved.record.tally.lost_quality
    assert held.record.morphs == []


def test_an_envelope_that_nobody_renews_allows_no_loss_once_it_is_stale() -> None:
    """An envelope is valid for 60 s after the controller is down; what was taken before goes back."""
    bursts = [
        Arrival(begin_s + n / 25, 200, 100) for begin_s in (10.0, 40.0, 120.0, 250.0) for n in range(100)
    ]
    found = cluster(mode="performance", outage=(20.0, 200.0))
    record = found.run([*bursts, *(Arrival(300.0 + n, 50, 5) for n in range(40))], drain_s=60.0)
    starts = [one.started_ms / 1e3 for one in record.morphs if "halves to int" in one.reason]
    assert {at_s // 10 for at_s in starts if at_s < 20} and [at_s for at_s in starts if 40 <= at_s < 80]
    assert not [at_s for at_s in starts if 80 <= at_s < 250]
    assert [at_s for at_s in starts if at_s >= 250]
    (one,) = found.instances.values()
    assert one.instance.shape.is_at_rest


@pytest.mark.slow
def test_bursts_that_swell_are_forecast_by_the_controllers_method() -> None:
    arrivals = [Arrival(30.0 * n + 6 * (k / 120) ** 0.5, 120, 60) for n in range(12) for k in range(120)]
    found, plain = (cluster(mode="performance", is_plain=is_plain) for is_plain in (False, True))
    record = found.run(arrivals, drain_s=60.0)
    (one,) = found.instances.values()
    assert one.forecast.right > one.forecast.wrong
    assert any("are expected to be needed" in each.reason for each in record.morphs)
    again = plain.run(arrivals, drain_s=60.0)
    assert (again.outcomes, again.morphs, again.samples) == (record.outcomes, record.morphs, record.samples)


def test_a_calm_load_changes_nothing() -> None:
    found = cluster()
    record = found.run(evenly(2.0, 30.0, output=20), drain_s=60.0)
    assert record.morphs == [] and record.preemptions == 0 and record.below_s == 0.0


def test_requests_are_spread_over_the_workers() -> None:
    found = cluster(4, mode="manual")
    found.run(burst(40.0), drain_s=600.0)
    counts = {number: one.instance.scheduler.num_recomputed for number, one in found.instances.items()}
    assert sorted(counts) == [0, 1, 2, 3]


def test_ten_thousand_workers_cost_what_the_busy_ones_do() -> None:
    few, many = cluster(100), cluster(10_000)
    arrivals = burst(30.0, seconds=30.0)
    assert outcomes_of(few, arrivals) == outcomes_of(many, arrivals)
    assert few.record.tally == many.record.tally
    assert len(many.instances) == len(few.instances) < 100
    assert many.record.samples[0]["instances"]["all"]["kv_blocks"] >= 10_000 * SMALL.memory.kv_blocks


def test_more_sequences_than_were_measured_end_the_simulation() -> None:
    found = cluster(mode="manual", most_running=3)
    with pytest.raises(Unmeasured, match="sequences at once"):
        found.run(burst(40.0), drain_s=60.0)


# ------------------------------------------------------------------------------------- the choice

tokens = st.integers(0, 40).map(lambda n: n * 16)
candidates = st.builds(
    Candidate,
    instance=st.integers(0, 30).map(lambda n: f"m@w{n:02}"),
    worker=st.just("w"),
    epoch=st.just(1),
    num_measured=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    num_own=st.integers(0, 3),
    num_own_since=st.integers(0, 2),
    max_tokens=st.sampled_from([256, 512]),
    kv_usage=st.sampled_from([0.0, 0.5, 1.0]),
    free_tokens=tokens.map(lambda n: float(n - 64)),
    can_split=st.just(False),
)


@settings(max_examples=300, deadline=None)
@given(
    busy=st.lists(candidates, max_size=12, unique_by=lambda one: one.instance),
    idle=st.lists(st.integers(31, 60), max_size=5, unique=True),
    num_tokens=st.integers(1, 600),
)
def test_the_choice_from_the_shortlist_is_the_choice_from_all(
    busy: list[Candidate], idle: list[int], num_tokens: int
) -> None:
    resting = [
        Candidate(f"m@w{n:02}", "w", 1, 0.0, 0, 0, max_tokens=512, free_tokens=640.0, can_split=False)
        for n in sorted(idle)
    ]
    shortlist = Shortlist()
    for one in busy:
        shortlist.put(one)
    wanted = choose([*busy, *resting], num_tokens)
    found = choose(shortlist.of(num_tokens, resting[0] if resting else None), num_tokens)
    assert found == wanted


def test_the_shortlist_forgets_what_is_put_again_or_removed() -> None:
    one = Candidate("m@w0", "w0", 1, 0.0, 0, 0, max_tokens=64, can_split=False)
    busier = Candidate("m@w0", "w0", 1, 5.0, 0, 0, max_tokens=64, can_split=False)
    shortlist = Shortlist()
    shortlist.put(one)
    shortlist.put(busier)
    assert [key_of(each) for each in shortlist.of(1, None)] == [key_of(busier)]
    shortlist.remove("m@w0")
    shortlist.remove("m@w1")
    assert len(shortlist) == 0

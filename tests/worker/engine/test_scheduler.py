"""The scheduler alone, on a pool of numbers: order, fairness, blocks, progress."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import SamplingParams
from tests.support.engine_toys import expect_no_growth
from tests.support.scheduler_steps import step
from worker.engine.scheduler import BURST_S, Scheduler, SchedulerOutput
from worker.engine.sequence import Limits, Sequence, own_request
from worker.memory import BlockAllocator


def make(capacity: int, num_seqs: int = 4, tokens: int = 16, block_tokens: int = 4) -> Scheduler:
    return Scheduler(Limits(num_seqs, tokens, 1000, block_tokens), BlockAllocator(capacity, range(capacity)))


def sequence(name: str, prompt: int, max_tokens: int = 8) -> Sequence:
    sampling = SamplingParams(max_tokens=max_tokens, seed=0)
    return Sequence(own_request(name, list(range(prompt)), sampling))


def names(plan: SchedulerOutput) -> dict[str, int]:
    return {chunk.seq.request.request_id: chunk.num_tokens for chunk in plan.chunks}


def test_planners_that_share_a_step_let_their_sequences_decode_in_turn() -> None:
    scheduler = make(capacity=100)
    for name in "abc":
        scheduler.add(sequence(name, 3))
    step(scheduler)
    ran = []
    for _ in range(3):
        plan = scheduler.schedule(2)
        scheduler.commit(plan.chunks)
        for chunk in plan.chunks:
            chunk.seq.token_ids.append(1)
        ran.append("".join(names(plan)))
    assert ran == ["ab", "ca", "bc"]


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    scheduler = make(capacity=100)
    scheduler.add(sequence("short", 3))
    step(scheduler)
    scheduler.add(sequence("long", 40))
    assert [names(step(scheduler)[0]) for _ in range(4)] == [
        {"short": 1, "long": 15},
        {"short": 1, "long": 15},
        {"short": 1, "long": 10},
        {"short": 1, "long": 1},
    ]


def test_the_prompt_tokens_that_are_due_are_those_before_a_new_prompts_turn() -> None:
    scheduler = make(capacity=100)
    scheduler.add(sequence("long", 40))
    scheduler.add(sequence("next", 10))
    due = [scheduler.num_prompt_tokens_due]
    for _ in range(5):
        step(scheduler)
        due.append(scheduler.num_prompt_tokens_due)
    assert due == [50, 34, 18, 2, 0, 0]  # 16 tokens a step; decodes come first


def test_the_rate_of_arrivals_is_that_of_the_last_second() -> None:
    scheduler = make(capacity=8, num_seqs=2)
    assert scheduler.arrivals_per_s(100.0) == 0.0
    for at_s in (90.0, 100.0, 100.1, 100.2, 100.5):
        scheduler.add(Sequence(sequence(f"s{at_s}", 4).request, at_s))
    step(scheduler)
    assert scheduler.running and scheduler.waiting
    assert scheduler.arrivals_per_s(100.6) == pytest.approx(3 / 0.6)  # after the first of the last four
    assert scheduler.arrivals_per_s(101.15) == pytest.approx(1 / 0.95)
    assert scheduler.arrivals_per_s(101.3) == scheduler.arrivals_per_s(109.0) == 0.0  # one is no rate
    at_once = make(capacity=8)
    for name in "abc":
        at_once.add(Sequence(sequence(name, 4).request, 50.0))
    assert at_once.arrivals_per_s(50.0) == 2 / BURST_S


def test_nobody_overtakes_a_head_that_does_not_fit() -> None:
    scheduler = make(capacity=8)
    for seq in (sequence("first", 15), sequence("big", 20), sequence("small", 1)):
        scheduler.add(seq)
    plan, _ = step(scheduler)
    assert names(plan) == {"first": 15}
    assert [seq.request.request_id for seq in scheduler.waiting] == ["big", "small"]


def test_the_youngest_is_preempted_and_recomputed_first_when_blocks_run_out() -> None:
    scheduler = make(capacity=6, block_tokens=2)
    expect_no_growth(scheduler)
    for name in ("a", "b"):
        scheduler.add(sequence(name, 3, max_tokens=6))
    scheduler.add(sequence("c", 1))
    seen: list[str] = []
    for _ in range(40):
        plan, done = step(scheduler)
        seen += [seq.request.request_id for seq in done]
        assert all(seq.request.request_id != "a" for seq in plan.preempted), "the oldest is never preempted"
    assert seen == ["a", "b", "c"]
    assert scheduler.num_preemptions > 0


def test_a_sequence_that_outgrows_the_short_frequencies_keeps_its_place() -> None:
    """The first one begins again at 7 tokens, while the second fills the cache; so does the second later."""
    scheduler = make(capacity=7, block_tokens=2)
    expect_no_growth(scheduler)
    scheduler.limits = replace(scheduler.limits, short_context=6)
    first, second = sequence("first", 5), sequence("second", 3)
    for seq in (first, second):
        scheduler.add(seq)
    ended: list[Sequence] = []
    for _ in range(40):
        ended += step(scheduler)[1]
        assert first in ended or scheduler.running[0] is first
    assert ended == [first, second]
    assert scheduler.num_recomputed == 6 + 6, "each what it had when it began again"
    assert scheduler.num_preemptions == 1, "the second could not begin again beside the first"


def work_off(scheduler: Scheduler, seqs: list[Sequence]) -> list[Sequence]:
    """Run `seqs` to their ends; return them in the order of their first admission."""
    admitted: list[Sequence] = []
    num_left = len(seqs)
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(20_000):
        plan, done = step(scheduler)
        admitted += [seq for seq in plan.admitted if seq not in admitted]
        num_left -= len(done)
        if not num_left:
            return admitted
    raise AssertionError("the load does not come to an end")


def mixed_load() -> list[Sequence]:
    rng = random.Random(0)
    return [sequence(str(i), rng.randint(1, 30), rng.choice([5, 20, 60])) for i in range(60)]


def test_a_load_that_would_preempt_does_not_where_growth_is_reserved() -> None:
    """Without the reserve this load gives up blocks 16 times or more."""
    reserving, careless = make(60, num_seqs=16), make(60, num_seqs=16)
    expect_no_growth(careless)
    work_off(careless, mixed_load())
    work_off(reserving, mixed_load())
    assert careless.num_preemptions > 15
    assert reserving.num_preemptions <= careless.num_preemptions // 3


def test_sequences_of_known_length_are_never_preempted_and_fill_the_cache() -> None:
    scheduler = make(capacity=40, num_seqs=16)
    for seq in (sequence(str(i), 8, 24) for i in range(40)):  # 8 blocks each in the end
        scheduler.add(seq)
    used = []
    while scheduler.waiting:
        step(scheduler)
        used.append(scheduler.blocks.num_used)
    assert scheduler.num_preemptions == 0
    assert sum(used[20:]) / len(used[20:]) > 0.6 * 40, "the reserve must not empty the cache"


def test_a_head_that_wants_much_is_admitted_before_those_behind_it() -> None:
    """Small requests never pass it, however little of the cache they would take."""
    scheduler = make(capacity=40, num_seqs=16)
    seqs = [sequence(str(i), 4, 12) for i in range(60)]
    seqs[5] = sequence("most of the cache", 100, 60)
    assert work_off(scheduler, seqs) == seqs


def test_alone_a_sequence_runs_whatever_is_expected_of_it() -> None:
    scheduler = make(capacity=5)
    scheduler.lengths.add(900)
    scheduler.add(sequence("alone", 15, max_tokens=900))
    assert names(step(scheduler)[0]) == {"alone": 15}


def test_where_output_may_be_long_more_than_one_runs_before_the_first_end() -> None:
    scheduler = make(capacity=300, num_seqs=8, tokens=64)
    for i in range(8):
        scheduler.add(sequence(str(i), 4, max_tokens=900))
    step(scheduler)
    assert len(scheduler.running) == 4  # 65 blocks each are expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=2, max_size=10),
    st.lists(st.integers(1, 40), max_size=5),
    st.integers(10, 40),
)
def test_the_blocks_that_are_wanted_admit_the_head_and_one_less_does_not(
    seqs: list[tuple[int, int]], ended: list[int], capacity: int
) -> None:
    def waits_with(more: int) -> tuple[int, bool]:
        scheduler = make(capacity, num_seqs=20, tokens=1000)
        for length in ended:
            scheduler.lengths.add(length)
        for i, (prompt, max_tokens) in enumerate(seqs):
            scheduler.add(sequence(str(i), prompt, max_tokens))
        scheduler.schedule()
        if not scheduler.waiting:
            return 0, False
        wanted, head = scheduler.num_blocks_wanted, scheduler.waiting.head
        assert wanted > 0
        grow(scheduler, more)
        return wanted, head in scheduler.schedule().admitted

    wanted, _ = waits_with(0)
    if wanted:
        assert waits_with(wanted)[1]
        assert not waits_with(wanted - 1)[1]


def test_a_sequence_that_runs_and_misses_its_next_block_has_not_waited_for_blocks() -> None:
    scheduler = make(capacity=6, num_seqs=8, tokens=64)
    for name, arrived in (("runs", 2.0), ("late", 5.0)):
        seq = sequence(name, 8, max_tokens=40)
        seq.arrived = arrived
        scheduler.add(seq)
        while not scheduler.num_blocks_wanted:
            step(scheduler)
        assert scheduler.wanting_s(10.0) == 8.0, "the one that runs"
        assert scheduler.waited_for_blocks_s(10.0) == (5.0 if name == "late" else 0.0)


def grow(scheduler: Scheduler, num_blocks: int) -> None:
    scheduler.blocks.extend(scheduler.blocks.capacity + num_blocks)


def test_the_spare_blocks_may_go_without_a_preemption() -> None:
    scheduler = make(capacity=100, num_seqs=8, tokens=64)
    for i in range(6):
        scheduler.add(sequence(str(i), 5 + i, max_tokens=10 * (i + 1)))
    step(scheduler)
    spare = scheduler.num_blocks_spare
    assert 0 < spare < scheduler.blocks.num_free - len(scheduler.running)
    scheduler.num_blocks_aside += len(scheduler.blocks.allocate(spare))
    while scheduler.running:
        step(scheduler)
    assert scheduler.num_preemptions == 0


def test_all_free_blocks_are_spare_where_nothing_runs() -> None:
    scheduler = make(capacity=7)
    scheduler.add(sequence("too long for now", 20))
    assert scheduler.num_blocks_spare == 7


def test_a_sequence_too_long_for_the_cache_even_alone_leaves_with_the_numbers() -> None:
    scheduler = make(capacity=3)
    scheduler.add(sequence("prompt", 13))
    ((_, reason),) = scheduler.schedule().rejected
    assert "13 tokens need 4 KV blocks of 4 tokens and this instance has 3" in reason
    scheduler.add(sequence("grows", 11, max_tokens=100))
    rejected = [item for _ in range(5) for item in step(scheduler)[0].rejected]
    assert [seq.request.request_id for seq, _ in rejected] == ["grows"]
    assert rejected[0][0].num_output == 2
    scheduler.check_integrity()


def test_a_step_has_few_rows_for_the_log_probabilities_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.scheduler.MOST_PROMPT_LOGITS", 6)
    scheduler = make(capacity=100, tokens=32)
    wanted = [sequence("first", 9), sequence("second", 4)]
    for seq in wanted:
        seq.score([None])
    for seq in (*wanted, sequence("plain", 20)):
        scheduler.add(seq)
    steps = []
    for _ in range(4):
        plan = scheduler.schedule()
        steps.append(names(plan))
        for chunk in plan.chunks:
            chunk.seq.score([None] * chunk.num_tokens * bool(chunk.seq.num_prompt_scored))
        scheduler.commit(plan.chunks)
    assert steps == [
        {"first": 6},
        {"first": 3, "second": 3, "plain": 20},
        {"second": 1},
        {},
    ]


def test_limits_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        Limits(0, 1, 1, 1)


def test_more_sequences_than_batched_tokens_still_leave_no_decode_out() -> None:
    scheduler = make(capacity=100, num_seqs=8, tokens=3)
    for i in range(8):
        scheduler.add(sequence(str(i), 1, max_tokens=4))
    finished = [seq.request.request_id for _ in range(30) for seq in step(scheduler)[1]]
    assert finished == [str(i) for i in range(8)]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(actions, st.integers(3, 12), st.integers(1, 5), st.integers(1, 12))
def test_any_history_leaks_no_block_keeps_fifo_and_ends(
    history: list[tuple[str, int, int]], capacity: int, num_seqs: int, tokens: int
) -> None:
    scheduler = make(capacity, num_seqs, tokens)
    alive: list[Sequence] = []
    order: list[Sequence] = []
    first_admissions: list[Sequence] = []

    def one_step() -> None:
        decoding = [seq for seq in scheduler.running if seq.num_uncomputed_tokens == 1]
        plan, done = step(scheduler)
        for seq in plan.admitted:
            if seq not in first_admissions:
                first_admissions.append(seq)
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks) <= tokens
        left_out = set(decoding) - {chunk.seq for chunk in plan.chunks} - set(plan.preempted)
        assert left_out <= {seq for seq, _ in plan.rejected}, "a decode runs in every step"
        for seq in [*done, *(seq for seq, _ in plan.rejected)]:
            alive.remove(seq)
        for seq in done:
            assert seq.token_ids[seq.num_prompt :] == [1000 + i for i in range(seq.num_output)]

    for kind, number, max_tokens in history:
        if kind == "submit":
            seq = sequence(str(len(order)), number, max_tokens)
            scheduler.add(seq)
            alive.append(seq)
            order.append(seq)
        elif kind == "cancel" and alive:
            scheduler.remove(alive.pop(number % len(alive)))
            scheduler.check_integrity()
        else:
            for _ in range(number):
                one_step()
    bound = 50 + sum(len(seq.token_ids) + seq.request.sampling.max_tokens for seq in alive) * 20
    while alive and bound:
        one_step()
        bound -= 1
    assert not alive, "the scheduler must come to an end"
    assert scheduler.blocks.num_free == capacity
    ranks = [order.index(seq) for seq in first_admissions]
    assert ranks == sorted(ranks), "first admissions follow the order of arrival"

"""What is kept from keys above their shares: rows, KV blocks and tokens of steps. From one key: nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages import SamplingParams
from worker.engine.key_shares import ACTIVE_S, NOTHING, KeyLoad, KeyShares, reserve_of
from worker.engine.scheduler import Scheduler, SchedulerOutput
from worker.engine.sequence import Limits, Sequence, own_request
from worker.memory import BlockAllocator

ROWS, TOKENS, BLOCK = 16, 64, 4


def sequence(name: str, key: str, prompt: int = 8, output: int = 8, arrived: float = 0.0) -> Sequence:
    request = own_request(name, list(range(prompt)), SamplingParams(max_tokens=output, seed=0))
    return Sequence(replace(request, key=key), arrived)


def scheduler(blocks: int = 400) -> Scheduler:
    return Scheduler(Limits(ROWS, TOKENS, 1000, BLOCK), BlockAllocator(blocks, range(blocks)))


def step(planner: Scheduler) -> SchedulerOutput:
    """Run one step as the engine does."""
    plan = planner.schedule()
    sampling = [chunk.seq for chunk in plan.chunks if chunk.samples]
    planner.commit(plan.chunks)
    for seq in sampling:
        seq.token_ids.append(1)
        if seq.num_output == seq.request.sampling.max_tokens:
            planner.remove(seq)
            planner.lengths.add(seq.num_output)
    planner.check_integrity()
    return plan


def tokens_of(plan: SchedulerOutput, key: str) -> list[int]:
    """Return the tokens of the chunks of prompts of a key."""
    return [
        chunk.num_tokens for chunk in plan.chunks if chunk.seq.request.key == key and chunk.num_tokens > 1
    ]


def busy(prompt: int = 8, output: int = 8, blocks: int = 400, num_waiting: int = 200) -> Scheduler:
    """Return a scheduler where a key was served so much that it is above its share, and another a little."""
    planner = scheduler(blocks)
    planner.add(sequence("first", "light"))
    while planner.running or planner.waiting:
        step(planner)
    for number in range(num_waiting):
        planner.add(sequence(f"h{number}", "heavy", prompt, output))
    for _ in range(400):
        step(planner)
        if planner.reserve.above == {"heavy"}:
            return planner
    raise AssertionError("the heavy key is not above its share")


# --------------------------------------------------------------------------- the decision


HEAVY = KeyLoad(1.0, 0.9, 500, 6, 60)


def test_what_the_light_key_needed_lately_is_kept_from_the_heavy_one() -> None:
    kept = reserve_of({"heavy": HEAVY, "light": KeyLoad(1.0, 0.02, 3, 7, 1)}, 64, 1000)
    assert kept.above == {"heavy"} and kept.below == {"light"}
    assert (kept.num_seqs, kept.num_blocks) == (2, 14), "of three, one runs"


def test_one_key_has_the_whole_as_its_share() -> None:
    assert reserve_of({"only": replace(HEAVY, tokens=1.0)}, 64, 1000) == NOTHING


def test_keys_that_all_use_much_are_left_to_the_queue() -> None:
    both = {"a": replace(HEAVY, tokens=0.55), "b": replace(HEAVY, tokens=0.4)}
    assert reserve_of(both, 64, 1000) == NOTHING


def test_a_key_of_more_weight_may_use_more() -> None:
    light = KeyLoad(1.0, 0.1, 1, 1, 0)
    assert reserve_of({"heavy": replace(HEAVY, weight=9.0, tokens=0.85), "light": light}, 64, 1000) == NOTHING
    assert (
        reserve_of({"heavy": replace(HEAVY, weight=2.0, tokens=0.85), "light": light}, 64, 1000).num_seqs == 1
    )


use = st.builds(
    KeyLoad,
    st.sampled_from([0.25, 1.0, 4.0]),
    st.floats(0, 1),
    st.integers(0, 600),
    st.integers(1, 5000),
    st.integers(0, 64),
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abcdefgh"), use), st.integers(1, 256), st.integers(1, 10_000))
def test_never_more_than_an_eighth_is_kept_and_never_from_all(
    uses: dict[str, KeyLoad], max_seqs: int, max_blocks: int
) -> None:
    kept = reserve_of(uses, max_seqs, max_blocks)
    assert 8 * kept.num_seqs <= max_seqs and 8 * kept.num_blocks <= max_blocks
    assert not kept.above & kept.below
    assert bool(kept.above) == bool(kept.below)


def test_what_was_computed_long_ago_and_keys_that_left_count_no_more() -> None:
    shares = KeyShares(1000)
    a, b = sequence("a", "a"), sequence("b", "b")
    for seq in (a, b):
        shares.enter(seq, 3)
    shares.charge(a, 2000)
    shares.charge(b, 1000)
    uses = shares.uses([a])
    recent = 2000 * math.exp(-1)
    assert uses["a"].tokens == pytest.approx(recent / (recent + 1000))
    assert uses["b"].tokens == pytest.approx(1000 / (recent + 1000))
    assert replace(uses["a"], tokens=0.0) == KeyLoad(1.0, 0.0, 1, 3, 1)
    shares.leave(a)
    shares.enter(sequence("c", "b", arrived=ACTIVE_S), 2)
    assert shares.uses([]).keys() == {"a", "b"}
    shares.enter(sequence("d", "b", arrived=ACTIVE_S + 1), 2)
    assert shares.uses([]) == {}, "one key is left"


def test_a_burst_of_a_key_is_forgotten() -> None:
    shares = KeyShares(1000)
    shares.enter(sequence("other", "b"), 1)
    for number in range(5):
        shares.enter(burst := sequence(f"{number}", "a"), 9)
        if number:
            shares.leave(burst)
    assert (shares.uses([])["a"].num_needed, shares.uses([])["a"].num_blocks) == (2, 9)
    shares.enter(late := sequence("late", "a", arrived=ACTIVE_S + 1), 4)
    shares.leave(late)
    shares.enter(sequence("later", "b", arrived=ACTIVE_S + 1), 1)
    assert (shares.uses([])["a"].num_needed, shares.uses([])["a"].num_blocks) == (2, 4)


# --------------------------------------------------------------------------- the scheduler with it


def test_a_request_of_the_light_key_runs_in_the_next_step_whatever_the_heavy_one_has() -> None:
    planner = busy(prompt=4, output=40, blocks=1000)
    for _ in range(100):
        step(planner)
    for _ in range(10):
        step(planner)
        assert len(planner.running) == ROWS - 1, "one row is free, with a queue of many"
    light = sequence("light", "light", arrived=1.0)
    planner.add(light)
    assert planner.can_admit
    assert light in step(planner).admitted


def test_blocks_are_kept_as_rows_are() -> None:
    planner = busy(prompt=40, output=8, blocks=90)
    for _ in range(200):
        step(planner)
        needed = sequence("light", "light", 8, 8).num_blocks_needed(BLOCK)
        assert planner.reserve.num_blocks == 0 or planner.blocks.num_free >= needed
        assert len(planner.running) < ROWS - 1, "blocks are what is missing"
    light = sequence("light", "light", arrived=1.0)
    planner.add(light)
    assert light in step(planner).admitted


def test_a_long_prompt_of_the_heavy_key_waits_for_one_of_the_light_key() -> None:
    planner = busy(prompt=300, output=4, num_waiting=20)
    for _ in range(3):
        assert sum(tokens_of(step(planner), "heavy")) <= TOKENS // 8, "so that the steps are short"
    planner.add(light := sequence("light", "light", 40, arrived=1.0))
    plan = step(planner)
    assert light in plan.admitted
    assert tokens_of(plan, "light") == [40] and not tokens_of(plan, "heavy")
    assert all(chunk.seq is light for chunk in plan.chunks), "nor does the heavy key decode in it"
    after = step(planner)
    decoding = [seq for seq in planner.running if seq.num_uncomputed_tokens == 1]
    assert tokens_of(after, "heavy") and len(decoding) > 0


def test_a_light_key_that_uses_much_loses_its_privilege() -> None:
    planner = busy(prompt=300, output=4, num_waiting=100)
    for number in range(40):
        planner.add(sequence(f"l{number}", "light", 300, 4, arrived=1.0))
    tokens = [0, 0]
    for _ in range(1000):
        plan = step(planner)
        tokens[0] += sum(tokens_of(plan, "light"))
        tokens[1] += sum(tokens_of(plan, "heavy"))
        if not any(seq.request.key == "light" for seq in planner.waiting):
            break
    assert tokens[0] == pytest.approx(sum(tokens) / 2, rel=0.15), "both wait, so both get half"


def test_without_the_other_key_for_a_while_the_heavy_one_gets_everything() -> None:
    planner = busy(prompt=4, output=40)
    planner.add(sequence("later", "heavy", 4, 40, arrived=ACTIVE_S + 1))
    for _ in range(10):
        plan = step(planner)
    assert len(planner.running) == ROWS and planner.reserve == NOTHING and plan.chunks


loads = st.lists(
    st.tuples(st.integers(1, 100), st.integers(1, 20), st.integers(0, 5)), min_size=1, max_size=40
)


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(30, 200))
def test_with_one_key_every_step_is_that_without_keys(
    load: list[tuple[int, int, int]], num_blocks: int
) -> None:
    """The plain twin: a scheduler whose requests have no key decides nothing by keys."""

    def plans(key: str) -> list[list[tuple[str, int]]]:
        planner, found = scheduler(num_blocks), []
        for number, (prompt, output, steps) in enumerate(load):
            planner.add(sequence(str(number), key, prompt, output, arrived=float(number)))
            for _ in range(steps):
                found.append([(one.seq.request.request_id, one.num_tokens) for one in step(planner).chunks])
        while planner.running or planner.waiting:
            found.append([(one.seq.request.request_id, one.num_tokens) for one in step(planner).chunks])
        return found

    assert plans("one") == plans("")


keyed = st.lists(
    st.tuples(st.sampled_from("aaaaaabc"), st.integers(1, 100), st.integers(1, 30), st.integers(0, 4)),
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(keyed, st.integers(30, 200))
def test_whatever_keys_send_all_of_it_is_served(
    load: list[tuple[str, int, int, int]], num_blocks: int
) -> None:
    planner = scheduler(num_blocks)
    for number, (key, prompt, output, steps) in enumerate(load):
        planner.add(sequence(str(number), key, prompt, output, arrived=float(number)))
        for _ in range(steps):
            step(planner)
    for _ in range(10_000):
        if not (planner.running or planner.waiting):
            break
        plan = step(planner)
        assert plan.chunks or plan.rejected, "as long as something is here, something runs"
    assert not (planner.running or planner.waiting)
    assert planner.blocks.num_free == num_blocks

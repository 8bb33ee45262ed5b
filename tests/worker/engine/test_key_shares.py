"""The use that keys made of an instance, and a scheduler that keeps a part from those above their shares."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduler_steps import keyed, step
from worker.engine.key_shares import ACTIVE_S, KeyShares
from worker.engine.reserve import NOTHING, KeyLoad
from worker.engine.scheduler import Scheduler, SchedulerOutput
from worker.engine.sequence import Limits
from worker.memory import BlockAllocator

ROWS, TOKENS, BLOCK = 16, 64, 4


def scheduler(blocks: int = 400) -> Scheduler:
    return Scheduler(Limits(ROWS, TOKENS, 1000, BLOCK), BlockAllocator(blocks, range(blocks)))


def tokens_of(plan: SchedulerOutput, key: str) -> list[int]:
    """Return the tokens of the chunks of prompts of a key."""
    return [
        chunk.num_tokens for chunk in plan.chunks if chunk.seq.request.key == key and chunk.num_tokens > 1
    ]


def busy(prompt: int = 8, output: int = 8, blocks: int = 400, num_waiting: int = 200) -> Scheduler:
    """Return a scheduler where a key was served so much that it is above its share, and another a little."""
    planner = scheduler(blocks)
    planner.add(keyed("first", "light"))
    while planner.running or planner.waiting:
        step(planner)
    for number in range(num_waiting):
        planner.add(keyed(f"h{number}", "heavy", prompt, output))
    for _ in range(400):
        step(planner)
        if planner.reserve.above == {"heavy"}:
            return planner
    raise AssertionError("the heavy key is not above its share")


# --------------------------------------------------------------------------- the counts


def test_what_was_computed_long_ago_and_keys_that_left_count_no_more() -> None:
    shares = KeyShares(1000)
    a, b = keyed("a", "a"), keyed("b", "b")
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
    shares.enter(keyed("c", "b", arrived=ACTIVE_S), 2)
    assert shares.uses([]).keys() == {"a", "b"}
    shares.enter(keyed("d", "b", arrived=ACTIVE_S + 1), 2)
    assert shares.uses([]) == {}, "one key is left"


def test_a_burst_of_a_key_is_forgotten() -> None:
    shares = KeyShares(1000)
    shares.enter(keyed("other", "b"), 1)
    for number in range(5):
        shares.enter(burst := keyed(f"{number}", "a"), 9)
        if number:
            shares.leave(burst)
    assert (shares.uses([])["a"].num_needed, shares.uses([])["a"].num_blocks) == (2, 9)
    shares.enter(late := keyed("late", "a", arrived=ACTIVE_S + 1), 4)
    shares.leave(late)
    shares.enter(keyed("later", "b", arrived=ACTIVE_S + 1), 1)
    assert (shares.uses([])["a"].num_needed, shares.uses([])["a"].num_blocks) == (2, 4)


# --------------------------------------------------------------------------- the scheduler with it


def test_a_request_of_the_light_key_runs_in_the_next_step_whatever_the_heavy_one_has() -> None:
    planner = busy(prompt=4, output=40, blocks=1000)
    for _ in range(100):
        step(planner)
    for _ in range(10):
        step(planner)
        assert len(planner.running) == ROWS - 1, "one row is free, with a queue of many"
    light = keyed("light", "light", arrived=1.0)
    planner.add(light)
    assert planner.can_admit
    assert light in step(planner).plan.admitted


def test_blocks_are_kept_as_rows_are() -> None:
    planner = busy(prompt=40, output=8, blocks=90)
    for _ in range(200):
        step(planner)
        needed = keyed("light", "light", 8, 8).num_blocks_needed(BLOCK)
        assert planner.reserve.num_blocks == 0 or planner.blocks.num_free >= needed
        assert len(planner.running) < ROWS - 1, "blocks are what is missing"
    light = keyed("light", "light", arrived=1.0)
    planner.add(light)
    assert light in step(planner).plan.admitted


def test_a_long_prompt_of_the_heavy_key_waits_for_one_of_the_light_key() -> None:
    planner = busy(prompt=300, output=4, num_waiting=20)
    for _ in range(3):
        assert sum(tokens_of(step(planner).plan, "heavy")) <= TOKENS // 8, "so that the steps are short"
    planner.add(light := keyed("light", "light", 40, arrived=1.0))
    plan = step(planner).plan
    assert light in plan.admitted
    assert tokens_of(plan, "light") == [40] and not tokens_of(plan, "heavy")
    assert all(chunk.seq is light for chunk in plan.chunks), "nor does the heavy key decode in it"
    after = step(planner).plan
    decoding = [seq for seq in planner.running if seq.num_uncomputed_tokens == 1]
    assert tokens_of(after, "heavy") and len(decoding) > 0


def test_a_light_key_that_uses_much_loses_its_privilege() -> None:
    planner = busy(prompt=300, output=4, num_waiting=100)
    for number in range(40):
        planner.add(keyed(f"l{number}", "light", 300, 4, arrived=1.0))
    tokens = [0, 0]
    for _ in range(1000):
        plan = step(planner).plan
        tokens[0] += sum(tokens_of(plan, "light"))
        tokens[1] += sum(tokens_of(plan, "heavy"))
        if not any(seq.request.key == "light" for seq in planner.waiting):
            break
    assert tokens[0] == pytest.approx(sum(tokens) / 2, rel=0.15), "both wait, so both get half"


def test_without_the_other_key_for_a_while_the_heavy_one_gets_everything() -> None:
    planner = busy(prompt=4, output=40)
    planner.add(keyed("later", "heavy", 4, 40, arrived=ACTIVE_S + 1))
    for _ in range(10):
        plan = step(planner).plan
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
        planner, found = scheduler(num_blocks), list[list[tuple[str, int]]]()

        def note_step() -> None:
            chunks = step(planner).plan.chunks
            found.append([(chunk.seq.request.request_id, chunk.num_tokens) for chunk in chunks])

        for number, (prompt, output, steps) in enumerate(load):
            planner.add(keyed(str(number), key, prompt, output, arrived=float(number)))
            for _ in range(steps):
                note_step()
        while planner.running or planner.waiting:
            note_step()
        return found

    assert plans("one") == plans("")


keyed_loads = st.lists(
    st.tuples(st.sampled_from("aaaaaabc"), st.integers(1, 100), st.integers(1, 30), st.integers(0, 4)),
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(keyed_loads, st.integers(30, 200))
def test_whatever_keys_send_all_of_it_is_served(
    load: list[tuple[str, int, int, int]], num_blocks: int
) -> None:
    planner = scheduler(num_blocks)
    for number, (key, prompt, output, steps) in enumerate(load):
        planner.add(keyed(str(number), key, prompt, output, arrived=float(number)))
        for _ in range(steps):
            step(planner)
    for _ in range(10_000):
        if not (planner.running or planner.waiting):
            break
        plan = step(planner).plan
        assert plan.chunks or plan.rejected, "as long as something is here, something runs"
    assert not (planner.running or planner.waiting)
    assert planner.blocks.num_free == num_blocks

"""The order between API keys: fair by tokens, within a key first come, first served."""

from __future__ import annotations

import random
import timeit
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scheduler_steps import keyed, step
from worker.engine.fair_queue import MOST_IDLE_KEYS, FairQueue
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Limits, Sequence
from worker.memory import BlockAllocator


def names(queue: FairQueue) -> list[str]:
    return [seq.request.request_id for seq in queue]


def scheduler(num_seqs: int = 4, tokens: int = 64, blocks: int = 400) -> Scheduler:
    return Scheduler(Limits(num_seqs, tokens, 1000, 4), BlockAllocator(blocks, range(blocks)))


def steps_until_begun(num_heavy: int) -> list[int]:
    """Return how many steps each of 20 requests of a light key waits beside a heavy key's queue."""
    planner, chance, waits = scheduler(), random.Random(0), []
    for number in range(num_heavy):
        planner.add(keyed(f"h{number}", "heavy", chance.randint(1, 60), chance.randint(1, 30)))
    chance = random.Random(1)
    for number in range(20):
        for _ in range(chance.randint(0, 10)):
            step(planner)
        light = keyed(f"l{number}", "light", 8, 4)
        planner.add(light)
        waits.append(next(count for count in range(10_000) if light in step(planner).plan.admitted))
    return waits


def test_the_wait_of_a_key_does_not_grow_with_the_queue_of_another() -> None:
    assert max(steps_until_begun(100)) <= 30, "until the shortest of four running answers ends"
    assert steps_until_begun(400) == steps_until_begun(200), "and no matter how many wait behind"


def test_in_one_line_the_same_requests_would_wait_for_the_whole_queue() -> None:
    """Hold what the test before stands for: with one key for all, the light requests come last."""
    planner = scheduler()
    for number in range(100):
        planner.add(keyed(f"h{number}", prompt=30, output=15))
    light = keyed("light")
    planner.add(light)
    assert next(count for count in range(10_000) if light in step(planner).plan.admitted) > 300


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.integers(1, 20)), max_size=60))
def test_within_a_key_and_without_keys_the_first_to_come_is_the_first_to_begin(
    requests: list[tuple[str, int, int]],
) -> None:
    planner, order = scheduler(), list[Sequence]()
    for number, (key, prompt, output) in enumerate(requests):
        planner.add(keyed(f"{key}{number}", key, prompt, output))
    for _ in range(10_000):
        if not (planner.waiting or planner.running):
            break
        order += step(planner).plan.admitted
    assert len(order) == len(requests), "each begins once"
    for key in "abc":
        begun = [int(seq.request.request_id[1:]) for seq in order if seq.request.key == key]
        assert begun == sorted(begun)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 50), min_size=80, max_size=80),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]),
    st.integers(1, 40),
)
def test_keys_that_wait_get_tokens_by_their_weights(sizes: list[int], weight: float, num_served: int) -> None:
    """The served tokens by weight differ by one request of each at most, as in fair queuing by packets."""
    queue, served = FairQueue(), Counter[str]()
    weights = {"a": 1.0, "b": weight}
    for number, size in enumerate(sizes):
        key = "ab"[number % 2]
        queue.add(keyed(f"{number}", key, size, weight=weights[key]))
    for _ in range(num_served):
        seq = queue.pop()
        queue.charge(seq, seq.num_prompt)
        served[seq.request.key] += seq.num_prompt
        queue.check_integrity()
        if {one.request.key for one in queue} == {"a", "b"}:
            gap = abs(served["a"] / weights["a"] - served["b"] / weights["b"])
            assert gap <= max(sizes) / min(weights.values())


def test_a_key_saves_nothing_up_while_it_is_away() -> None:
    queue = FairQueue()
    for number in range(40):
        queue.add(keyed(f"a{number}", "a", 10))
    for _ in range(20):
        queue.charge(queue.pop(), 10)
    for number in range(20):
        queue.add(keyed(f"b{number}", "b", 10))
    order = []
    for _ in range(20):
        seq = queue.pop()
        queue.charge(seq, 10)
        order.append(seq.request.key)
    assert order[0] == "b", "it is the next, since it was served longest ago"
    assert Counter(order) == {"a": 10, "b": 10}, "but it does not get the 200 tokens that it left out"


def test_what_ran_before_goes_first_and_is_not_charged_again() -> None:
    queue = FairQueue()
    first, second, other = keyed("first", "a"), keyed("second", "a"), keyed("other", "b")
    queue.add(first)
    queue.add(second)
    assert queue.pop() is first
    queue.charge(first, 100)
    queue.add(other)
    queue.put_back(first)
    assert queue.head is first and len(queue) == 3
    assert [queue.pop().request.request_id for _ in range(3)] == ["first", "other", "second"]
    with pytest.raises(IndexError, match="empty"):
        queue.pop()
    with pytest.raises(ValueError):
        queue.remove(first)


def test_a_recomputed_prompt_is_charged_once() -> None:
    planner = Scheduler(Limits(4, 64, 1000, 4), BlockAllocator(8, range(8)))
    seq = keyed("one", "a", prompt=20)
    planner.add(seq)
    step(planner)
    planner.restart(BlockAllocator(8, range(8)))
    while planner.waiting or planner.running:
        step(planner)
    late = keyed("late", "b")
    planner.waiting.add(keyed("again", "a"))
    planner.waiting.add(late)
    assert planner.waiting.head is late
    planner.waiting.charge(late, 25)  # 20 tokens of the prompt and 4 of the output, and one more
    assert planner.waiting.head is not late


def test_the_queue_is_read_by_arrival_and_a_request_leaves_from_its_middle() -> None:
    queue = FairQueue()
    for number in range(6):
        queue.add(keyed(f"{number}", "ab"[number % 2], arrived=float(number)))
    assert names(queue) == list("012345")
    assert [seq.request.request_id for seq in reversed(queue)] == list("543210")
    queue.remove(next(seq for seq in queue if seq.request.request_id == "3"))
    assert names(queue) == list("01245") and len(queue) == 5
    alone = FairQueue()
    for number in range(3):
        alone.add(keyed(f"{number}"))
    alone.put_back(keyed("back"))
    assert [seq.request.request_id for seq in reversed(alone)] == ["2", "1", "0", "back"]


def test_keys_that_wait_for_nothing_are_forgotten() -> None:
    queue = FairQueue()
    queue.add(keyed("stays", "stays"))
    for number in range(MOST_IDLE_KEYS + 1):
        queue.add(keyed("x", f"key{number}"))
        queue.remove(next(seq for seq in reversed(queue) if seq.request.request_id == "x"))
    queue.add(keyed("last", "last"))
    queue.pop()
    assert len(queue._lines) <= 2


def test_a_step_costs_by_the_keys_that_wait_and_not_by_those_that_are_known() -> None:
    def seconds(num_idle: int) -> float:
        queue = FairQueue()
        for number in range(num_idle):
            queue.add(keyed("x", f"key{number}"))
            queue.pop()
        for number in range(4):
            queue.add(keyed("busy", f"busy{number}"))

        def step() -> None:
            for _ in range(5):
                queue.charge(queue.head, 1)
            queue.add(queue.pop())

        return min(timeit.repeat(step, number=100, repeat=5))

    assert seconds(MOST_IDLE_KEYS) < 5 * seconds(1), "a scan of the known keys takes 200 times as long"


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3)), max_size=40), st.randoms())
def test_within_a_key_the_lowest_priority_goes_first_and_the_first_of_equal_ones(
    requests: list[tuple[str, int]], chance: random.Random
) -> None:
    queue, waiting = FairQueue(), list[Sequence]()
    for number, (key, priority) in enumerate(requests):
        waiting.append(keyed(f"{number}", key, priority=priority, arrived=number))
        queue.add(waiting[-1])
        if chance.random() < 0.2:
            waiting.remove(gone := chance.choice(waiting))
            queue.remove(gone)
        queue.check_integrity()
    assert list(queue) == waiting and list(reversed(queue)) == waiting[::-1], "in order of arrival"
    popped = [queue.pop() for _ in range(len(queue))]
    for key in "abc":
        of_key = [seq for seq in popped if seq.request.key == key]
        expected = [seq for seq in waiting if seq.request.key == key]
        assert of_key == sorted(expected, key=lambda seq: (seq.request.priority, seq.arrived))


def test_a_priority_takes_nothing_from_another_key() -> None:
    queue = FairQueue()
    for number in range(10):
        queue.add(keyed(f"urgent{number}", "heavy", prompt=100, priority=-1000))
    queue.add(keyed("light", "light", prompt=100))
    first = queue.pop()
    queue.charge(first, 100)
    second = queue.pop()
    assert {first.request.key, second.request.key} == {"heavy", "light"}

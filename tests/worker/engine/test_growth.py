"""The peak of KV blocks, against a simulation of every step; and what is expected of a sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.growth import UNKNOWN_TOKENS, OutputLengths, peak_blocks

BLOCK = 16


def array(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def simulated(tokens: list[int], remaining: list[int], block_tokens: int) -> int:
    """Each adds a token in each step and leaves after its last."""
    most = 0
    for step in range(max(remaining) + 1):
        there = [have + step for have, left in zip(tokens, remaining, strict=True) if left >= step]
        most = max(most, sum(-(-have // block_tokens) for have in there))
    return most


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=12),
    st.sampled_from([1, 2, 7, 16, 64]),
)
def test_the_peak_is_that_of_a_simulation(sequences: list[tuple[int, int]], block_tokens: int) -> None:
    tokens, remaining = map(list, zip(*sequences, strict=True))
    expected = simulated(tokens, remaining, block_tokens)
    assert peak_blocks(array(*tokens), array(*remaining), block_tokens) == expected


def test_nobody_needs_nothing() -> None:
    assert peak_blocks(array(), array(), BLOCK) == 0


def test_sequences_that_end_one_after_the_other_need_less_than_the_sum_of_their_ends() -> None:
    # 80 tokens each in the end: one has 64 to go, one 32, one is about to end.
    assert peak_blocks(array(16, 48, 79), array(64, 32, 1), BLOCK) == 2 + 4 + 5
    assert peak_blocks(array(16, 16, 16), array(64, 64, 64), BLOCK) == 3 * 5


def test_without_a_history_a_small_limit_is_expected_and_of_a_large_one_some_tokens() -> None:
    expected = OutputLengths().remaining(array(0, 5, 0), array(100, 1, 30_000))
    assert expected.tolist() == [100, 1, UNKNOWN_TOKENS]


def test_what_outlasts_all_answers_is_expected_to_make_as_much_again() -> None:
    lengths = OutputLengths()
    for length in (10, 20):
        lengths.add(length)
    expected = lengths.remaining(array(30, 1000, 1000), array(30_000, 30_000, 71))
    assert expected.tolist() == [UNKNOWN_TOKENS, 1000, 71]


@pytest.mark.parametrize(("made", "expected"), [(0, 20), (10, 15), (15, 10), (20, 10), (29, 1)])
def test_the_mean_of_longer_answers_is_expected(made: int, expected: int) -> None:
    lengths = OutputLengths()
    for length in (10, 20, 30):
        lengths.add(length)
    assert lengths.remaining(array(made), array(1000)).tolist() == [expected]


def test_never_more_than_the_limits_leave_and_at_least_one_token() -> None:
    lengths = OutputLengths()
    lengths.add(500)
    assert lengths.remaining(array(0, 499, 0), array(3, 9, 0)).tolist() == [3, 1, 0]


def test_the_last_answers_count() -> None:
    lengths = OutputLengths()
    for _ in range(1000):
        lengths.add(10)
    for _ in range(256):
        lengths.add(100)
    assert lengths.remaining(array(0), array(1000)).tolist() == [100]

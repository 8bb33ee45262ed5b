"""Histograms: merging and differences lose nothing, quantiles lie in the right bucket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import histogram
from bus.histogram import Accumulator, HistogramMismatch
from bus.messages import Histogram

BOUNDS = (0.5, 1.0, 2.0, 8.0)
values = st.lists(st.floats(0, 20), max_size=40)


def filled(observed: list[float]) -> Histogram:
    accumulator = Accumulator(BOUNDS)
    for value in observed:
        accumulator.observe(value)
    return accumulator.snapshot()


@given(values)
def test_every_value_is_counted_once_in_the_bucket_whose_bound_it_does_not_exceed(
    observed: list[float],
) -> None:
    snapshot = filled(observed)
    for index, bound in enumerate(BOUNDS):
        assert sum(snapshot.counts[: index + 1]) == sum(value <= bound for value in observed)
    assert histogram.count(snapshot) == len(observed)
    assert snapshot.total == pytest.approx(sum(observed))


@given(values, values)
def test_merging_equals_observing_all(one: list[float], other: list[float]) -> None:
    merged = histogram.merge([filled(one), filled(other)])
    assert merged.counts == filled(one + other).counts
    assert merged.total == pytest.approx(sum(one) + sum(other))


@given(values, values)
def test_the_difference_is_what_came_in_between(before: list[float], after: list[float]) -> None:
    window = histogram.difference(filled(before + after), filled(before))
    assert window.counts == filled(after).counts
    assert window.total == pytest.approx(sum(after), abs=1e-9)


@given(st.lists(st.floats(0, 8), min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_and_stay_within_the_buckets_that_were_hit(
    observed: list[float], one: float, other: float
) -> None:
    snapshot = filled(observed)
    low, high = (histogram.quantile(snapshot, q) for q in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert low <= high
    assert high <= min(bound for bound in BOUNDS if bound >= max(observed))


def test_a_quantile_is_interpolated_within_its_bucket() -> None:
    snapshot = filled([1.5] * 10)  # ten values in (1, 2]
    assert histogram.quantile(snapshot, 0.5) == pytest.approx(1.5)
    assert histogram.quantile(snapshot, 0.9) == pytest.approx(1.9)


def test_nothing_observed_has_no_quantile_and_no_mean() -> None:
    assert histogram.quantile(histogram.new(BOUNDS), 0.95) is None
    assert histogram.mean(histogram.new(BOUNDS)) is None


def test_values_above_every_bound_count_as_the_last_bound() -> None:
    assert histogram.quantile(filled([100.0, 200.0]), 0.95) == 8.0


def test_a_snapshot_does_not_change_when_more_is_observed() -> None:
    accumulator = Accumulator(BOUNDS)
    before = accumulator.snapshot()
    accumulator.observe(1.0, times=3)
    assert histogram.count(before) == 0
    assert histogram.count(accumulator.snapshot()) == 3
    assert histogram.mean(accumulator.snapshot()) == 1.0


def test_histograms_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(HistogramMismatch, match="bounds differ"):
        histogram.merge([histogram.new(BOUNDS), histogram.new((1.0,))])
    with pytest.raises(HistogramMismatch, match="went down"):
        histogram.difference(filled([]), filled([1.0]))
    with pytest.raises(HistogramMismatch, match="must rise"):
        histogram.new((1.0, 1.0))
    with pytest.raises(HistogramMismatch, match="need 5 counts"):
        histogram.difference(Histogram(bounds=BOUNDS, counts=[1]), filled([]))
    with pytest.raises(ValueError, match="nothing to merge"):
        histogram.merge([])
    with pytest.raises(ValueError, match="between 0 and 1"):
        histogram.quantile(filled([]), 95)


def test_token_buckets_are_the_1_2_5_series_up_to_the_longest_prompt() -> None:
    assert histogram.token_count_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert histogram.token_count_bounds(2048)[-1] == 2000


def test_the_bounds_of_vllm_rise() -> None:
    for bounds in (
        histogram.TIME_TO_FIRST_TOKEN_BOUNDS,
        histogram.TIME_PER_TOKEN_BOUNDS,
        histogram.REQUEST_LATENCY_BOUNDS,
    ):
        assert histogram.new(bounds).bounds == bounds

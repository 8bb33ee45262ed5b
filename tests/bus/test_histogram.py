"""Histograms: merging and differences lose nothing, quantiles keep to their relative error."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import histogram
from bus.codec import decode, encode
from bus.histogram import RELATIVE_ERROR, SMALLEST, Accumulator, HistogramMismatch
from bus.messages import Histogram, WorkerTelemetry
from instar.replay.statistics import percentile
from tests.support.bus_samples import telemetry

values = st.lists(st.floats(0, 1e4), max_size=40)
SHARES = (0.0, 0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0)


def filled(observed: Sequence[float]) -> Histogram:
    accumulator = Accumulator()
    for value in observed:
        accumulator.observe(value)
    return accumulator.snapshot()


def off_by(observed: Sequence[float], q: float) -> float:
    """Relative error of a quantile against that of the values themselves, as a client computes it."""
    exact, found = percentile(sorted(observed), 100 * q), histogram.quantile(filled(observed), q)
    assert found is not None
    return abs(found - exact) / exact


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_values", [1, 2, 7, 100, 5000])
def test_quantiles_are_within_one_per_cent_of_those_of_the_values(seed: int, num_values: int) -> None:
    rng = random.Random(seed)
    samples = {
        "steps of an engine": [rng.uniform(0.01, 0.04) for _ in range(num_values)],
        "a burst": [rng.lognormvariate(0, 2) for _ in range(num_values)],
        "a long tail": [0.02 * rng.paretovariate(1.1) for _ in range(num_values)],
        "two kinds": [rng.choice((0.018, 12.8)) * rng.uniform(0.9, 1.1) for _ in range(num_values)],
        "all alike": [0.018] * num_values,
    }
    for name, observed in samples.items():
        for q in SHARES:
            assert off_by(observed, q) <= RELATIVE_ERROR * (1 + 1e-9), (name, q)


@given(st.lists(st.floats(1.01 * SMALLEST, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_no_values_and_no_share_exceed_the_error(observed: list[float], q: float) -> None:
    assert off_by(observed, q) <= RELATIVE_ERROR * (1 + 1e-9)


def test_what_newcomers_saw_as_bucket_edges_is_told_as_it_was() -> None:
    first_tokens = [12.8 * (n + 1) / 20 for n in range(20)]
    assert histogram.quantile(filled(first_tokens), 0.95) == pytest.approx(12.19, rel=0.01)  # not 19.4
    assert histogram.quantile(filled([0.018] * 60), 0.95) == pytest.approx(0.018, rel=0.01)  # not 0.039


@given(values)
def test_every_value_is_counted_once(observed: list[float]) -> None:
    snapshot = filled(observed)
    assert histogram.count(snapshot) == len(observed)
    assert snapshot.total == pytest.approx(sum(observed))


@given(values, values, values)
def test_merging_equals_observing_all(one: list[float], other: list[float], third: list[float]) -> None:
    union = filled(one + other + third)
    merged = histogram.merge([filled(one), filled(other), filled(third)])
    assert merged.counts == union.counts
    assert merged.total == pytest.approx(union.total)
    assert [histogram.quantile(merged, q) for q in SHARES] == [histogram.quantile(union, q) for q in SHARES]


@given(values, values)
def test_the_difference_is_what_came_in_between(before: list[float], after: list[float]) -> None:
    window = histogram.difference(filled(before + after), filled(before))
    assert window.counts == filled(after).counts
    assert window.total == pytest.approx(sum(after), abs=1e-6)


@given(st.lists(st.floats(0, 8), min_size=1, max_size=40), st.floats(0, 1), st.floats(0, 1))
def test_quantiles_rise_and_stay_near_the_values_that_were_observed(
    observed: list[float], one: float, other: float
) -> None:
    snapshot = filled(observed)
    low, high = (histogram.quantile(snapshot, q) for q in sorted((one, other)))
    assert low is not None
    assert high is not None
    assert low <= high <= max(observed) * (1 + 1.001 * RELATIVE_ERROR)


def test_what_is_below_a_microsecond_counts_as_zero() -> None:
    assert histogram.quantile(filled([0.0, SMALLEST / 2, SMALLEST]), 1.0) == 0.0


def test_nothing_observed_has_no_quantile_and_no_mean() -> None:
    assert histogram.quantile(Histogram(), 0.95) is None
    assert histogram.mean(Histogram()) is None
    assert histogram.merge([]) == Histogram()


def test_a_snapshot_does_not_change_when_more_is_observed() -> None:
    accumulator = Accumulator()
    before = accumulator.snapshot()
    accumulator.observe(1.0, times=3)
    assert histogram.count(before) == 0
    assert histogram.count(accumulator.snapshot()) == 3
    assert histogram.mean(accumulator.snapshot()) == 1.0


def test_snapshots_of_different_epochs_and_shares_beyond_one_are_refused() -> None:
    with pytest.raises(HistogramMismatch, match="went down"):
        histogram.difference(filled([]), filled([1.0]))
    with pytest.raises(HistogramMismatch, match="went down"):
        histogram.difference(filled([1.0]), filled([2.0]))
    with pytest.raises(ValueError, match="between 0 and 1"):
        histogram.quantile(filled([]), 95)


def test_a_report_carries_its_histograms_over_the_bus() -> None:
    report = telemetry(ttft=(0.0, 0.002, 0.5, 12.8, 12.8))
    assert decode(encode(report), WorkerTelemetry) == report


def test_a_worker_that_served_for_long_still_reports_little() -> None:
    rng = random.Random(1)
    long_ago = filled([rng.lognormvariate(-2, 2) for _ in range(50_000)])
    assert len(long_ago.counts) < 1000

"""Histograms that merge: pure helpers on `messages.Histogram`.

A worker observes into an `Accumulator` and reports snapshots, which count since its epoch began. A reader
takes the difference of two snapshots for a window, merges windows of several workers, and asks for
quantiles. Percentiles themselves are never sent: they do not merge.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from bus.messages import Histogram

# Upper bounds in seconds of vLLM's histograms (vllm/v1/metrics/loggers.py), so that dashboards carry over.
TIME_TO_FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TIME_PER_TOKEN_BOUNDS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY_BOUNDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class HistogramMismatch(ValueError):
    """Two histograms cannot be put together: other bounds, or counts that do not belong to the bounds."""


def token_count_bounds(max_model_len: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `max_model_len` (vLLM's buckets of prompt and generation lengths)."""
    bounds: list[float] = []
    decade = 1
    while True:
        for step in (1, 2, 5):
            if step * decade > max_model_len:
                return tuple(bounds)
            bounds.append(float(step * decade))
        decade *= 10


def new(bounds: Sequence[float]) -> Histogram:
    """An empty histogram. Raises HistogramMismatch unless the bounds rise."""
    if any(low >= high for low, high in pairwise(bounds)):
        raise HistogramMismatch(f"bounds must rise, got {list(bounds)}")
    return Histogram(bounds=tuple(bounds), counts=[0] * (len(bounds) + 1))


class Accumulator:
    """A histogram that is being filled. Not shared between threads."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        empty = new(bounds)
        self._bounds = empty.bounds
        self._counts = empty.counts
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts `value` once, or `times` over."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Histogram:
        """What was observed so far; later observations do not change it."""
        return Histogram(bounds=self._bounds, counts=list(self._counts), total=self._total)


def count(histogram: Histogram) -> int:
    """Number of values observed."""
    return sum(histogram.counts)


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """All values of all of them. Raises HistogramMismatch; ValueError for none."""
    parts = list(histograms)
    if not parts:
        raise ValueError("nothing to merge: without a histogram the bounds are unknown")
    for part in parts:
        _check(parts[0], part)
    counts = [sum(column) for column in zip(*(part.counts for part in parts), strict=True)]
    return Histogram(bounds=parts[0].bounds, counts=counts, total=sum(part.total for part in parts))


def difference(newer: Histogram, older: Histogram) -> Histogram:
    """What was observed between two snapshots of one accumulator. Raises HistogramMismatch, also where a
    count went down: then the two are of different epochs."""
    _check(newer, older)
    counts = [now - before for now, before in zip(newer.counts, older.counts, strict=True)]
    if min(counts) < 0:
        raise HistogramMismatch("a count went down: the snapshots are of different epochs, or swapped")
    return Histogram(bounds=newer.bounds, counts=counts, total=newer.total - older.total)


def quantile(histogram: Histogram, q: float) -> float | None:
    """The value below which a share `q` of the values lies, interpolated within its bucket (as Prometheus'
    histogram_quantile does). None when nothing was observed: absent is not zero. Values above the last
    bound count as that bound."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile lies between 0 and 1, got {q}")
    rank = q * count(histogram)
    below = 0
    last_filled: float | None = None
    for index, amount in enumerate(histogram.counts):
        if amount == 0:
            continue
        low, high = _edges(histogram.bounds, index)
        last_filled = high
        if below + amount >= rank:
            return low + (high - low) * max(0.0, rank - below) / amount
        below += amount
    return last_filled


def mean(histogram: Histogram) -> float | None:
    """None when nothing was observed."""
    observed = count(histogram)
    return histogram.total / observed if observed else None


def _edges(bounds: Sequence[float], index: int) -> tuple[float, float]:
    """The first bucket begins at 0 (all we measure is positive), the last one has no width."""
    if not bounds:
        return 0.0, 0.0
    low = bounds[index - 1] if index else min(0.0, bounds[0])
    high = bounds[index] if index < len(bounds) else bounds[-1]
    return low, high


def _check(one: Histogram, other: Histogram) -> None:
    if one.bounds != other.bounds:
        raise HistogramMismatch(f"bounds differ: {list(one.bounds)} and {list(other.bounds)}")
    if not len(one.counts) == len(other.counts) == len(one.bounds) + 1:
        raise HistogramMismatch(
            f"{len(one.bounds)} bounds need {len(one.bounds) + 1} counts, "
            f"got {len(one.counts)} and {len(other.counts)}"
        )

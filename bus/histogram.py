"""Histograms that merge, with a bounded relative error: pure helpers on `messages.Histogram`.

Workers report snapshots of an `Accumulator`; readers take differences, merge them and ask for quantiles. The
buckets are those of DDSketch (Masson, Rim and Lee, VLDB 2019, section 2.1).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

from bus.messages import Histogram

RELATIVE_ERROR: Final = 0.01
SMALLEST: Final = 1e-6  # a microsecond; smaller values count as 0, or times near 0 would fill buckets
# Bucket i counts (gamma^(i-1), gamma^i]; 2 gamma^i / (gamma + 1) is within RELATIVE_ERROR of all of it.
_GAMMA: Final = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_LOG_GAMMA: Final = math.log(_GAMMA)
_ZERO: Final = math.floor(math.log(SMALLEST) / _LOG_GAMMA) - 1  # the bucket of what counts as 0


class HistogramMismatch(ValueError):
    """Two snapshots are not of one accumulator."""


class Accumulator:
    """A histogram that is being filled. Not shared between threads."""

    __slots__ = ("_counts", "_total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, which is not negative, once or `times` over."""
        bucket = bucket_of(value)
        self._counts[bucket] = self._counts.get(bucket, 0) + times
        self._total += value * times

    def snapshot(self) -> Histogram:
        """Return what was observed so far; later observations do not change it."""
        return Histogram(counts=dict(self._counts), total=self._total)


def bucket_of(value: float) -> int:
    """Return the bucket that counts a value, which is not negative. Raises OverflowError for infinity."""
    return math.ceil(math.log(value) / _LOG_GAMMA) if value > SMALLEST else _ZERO


def value_of(bucket: int) -> float:
    """Return what stands for the values of a bucket."""
    return 2 * _GAMMA**bucket / (_GAMMA + 1) if bucket != _ZERO else 0.0


def count(histogram: Histogram) -> int:
    """Return the number of values observed."""
    return sum(histogram.counts.values())


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Return the histogram of all values of all of them."""
    counts: Counter[int] = Counter()
    total = 0.0
    for one in histograms:
        counts.update(one.counts)
        total += one.total
    return Histogram(counts=dict(counts), total=total)


def difference(newer: Histogram, older: Histogram) -> Histogram:
    """Return what was observed between two snapshots. Raises HistogramMismatch if a count went down."""
    counts = {bucket: newer.counts.get(bucket, 0) - before for bucket, before in older.counts.items()}
    if min(counts.values(), default=0) < 0:
        raise HistogramMismatch("a count went down: the snapshots are of different epochs, or swapped")
    gained = {bucket: gain for bucket, now in newer.counts.items() if (gain := counts.get(bucket, now))}
    return Histogram(counts=gained, total=newer.total - older.total)


def quantile(histogram: Histogram, q: float) -> float | None:
    """Return the `q` quantile (0..1); None if nothing was observed. Raises ValueError for another `q`."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"a quantile lies between 0 and 1, got {q}")
    observed = count(histogram)
    if not observed:
        return None
    rank = q * (observed - 1)
    low, high = _value_at(histogram, math.floor(rank)), _value_at(histogram, math.ceil(rank))
    return low + (rank - math.floor(rank)) * (high - low)


def mean(histogram: Histogram) -> float | None:
    """Return the mean, which is exact; None if nothing was observed."""
    observed = count(histogram)
    return histogram.total / observed if observed else None


def _value_at(histogram: Histogram, rank: int) -> float:
    """Return what stands for the value of this rank, counted from 0 at the smallest."""
    above = 0
    for bucket in sorted(histogram.counts):
        above += histogram.counts[bucket]
        if rank < above:
            return value_of(bucket)
    raise IndexError(f"rank {rank} of {above} values")

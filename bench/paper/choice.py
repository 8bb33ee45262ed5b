"""The choice of windows of traces, before any run. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.paper.loads import busiest, thinned

SECONDS: Final = 60.0
SLIDE_S: Final = 30.0
PEAK_S: Final = 6.0
NUM_CODE, NUM_CONVERSATION = 7, 3
LEAST_REQUESTS: Final = 60  # of a window: fewer are no load for any way
HELD_S: Final = 1.0  # what static INT4 holds, by its rate
SATURATED_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """A window of a trace, named as in `code:792`."""

    trace: str  # "code" or "conv"
    start_s: float
    times: list[float] = field(repr=False)  # of its requests, from its beginning

    @property
    def name(self) -> str:
        return f"{self.trace}:{self.start_s:g}"

    @property
    def burstiness(self) -> float:
        """The rate of the busiest PEAK_S over the mean rate."""
        return busiest(self.times, PEAK_S) / PEAK_S / (len(self.times) / SECONDS) if self.times else 0.0


def windows_of(trace: str, times: Sequence[float]) -> list[TraceWindow]:
    """Return all windows of a trace, SLIDE_S apart, that have LEAST_REQUESTS; `times` ascend."""
    found, start_s = [], 0.0
    while times and start_s + SECONDS <= times[-1]:
        low, high = bisect_left(times, start_s), bisect_left(times, start_s + SECONDS)
        if high - low >= LEAST_REQUESTS:
            found.append(TraceWindow(trace, start_s, [at_s - start_s for at_s in times[low:high]]))
        start_s += SLIDE_S
    return found


def choose(code: Sequence[TraceWindow], conversation: Sequence[TraceWindow]) -> list[TraceWindow]:
    """Return the windows in the order of the rule, the spare ones last.

    First the seven burstiest of the code trace and the three fullest of the conversation trace, then the
    others, in the same order. Those that overlap with a better one are left out.
    """
    bursts = _apart(sorted(code, key=lambda one: (-one.burstiness, one.start_s)))
    full = _apart(sorted(conversation, key=lambda one: (-len(one.times), one.start_s)))
    return [
        *bursts[:NUM_CODE],
        *full[:NUM_CONVERSATION],
        *bursts[NUM_CODE:],
        *full[NUM_CONVERSATION:],
    ]


def _apart(ranked: Sequence[TraceWindow]) -> list[TraceWindow]:
    kept: list[TraceWindow] = []
    for one in ranked:
        if all(abs(one.start_s - other.start_s) >= SECONDS for other in kept):
            kept.append(one)
    return kept


def longest_wait(times: Sequence[float], rate: float) -> float:
    """Return the longest wait in a queue that serves `rate` requests a second, one after the other."""
    free_s = longest_s = 0.0
    for at_s in times:
        longest_s = max(longest_s, free_s - at_s)
        free_s = max(free_s, at_s) + 1 / rate
    return longest_s


def thinned_for(times: Sequence[float], rate: float) -> list[float]:
    """Return as many of the times, evenly by their number, as wait HELD_S at most at this rate."""
    low, high = 1, len(times)
    while low < high:
        middle = (low + high + 1) // 2
        if longest_wait(thinned(times, middle), rate) <= HELD_S:
            low = middle
        else:
            high = middle - 1
    return thinned(times, low)


def is_fit(times: Sequence[float], full: float) -> bool:
    """Return whether a load saturates full precision: a request waits SATURATED_S at least."""
    return longest_wait(times, full) >= SATURATED_S

"""The choice of windows of traces, before any run. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bench.paper.loads import BUSIEST_S, busiest, fitted

SECONDS: Final = 60.0
SLIDE_S: Final = 30.0
PEAK_S: Final = 6.0
NUM_CODE, NUM_CONVERSATION = 7, 3
LEAST_REQUESTS: Final = 60  # of a window: fewer are no load for any way


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


def can_saturate(window: TraceWindow, rate: float, full: float) -> bool:
    """Return whether the window, thinned for `rate`, asks in its busiest part for more than `full`."""
    return busiest(fitted(window.times, rate), BUSIEST_S) / BUSIEST_S >= 1.1 * full

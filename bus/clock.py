"""The wall clock of messages, and Redis' clock, estimated from the ids of stream entries."""

from __future__ import annotations

import time
from collections import deque

WINDOW_S = 60.0  # clocks drift and are set: older observations say nothing


def now_ms() -> int:
    """Return the wall clock in milliseconds since 1970, as messages carry it."""
    return time.time_ns() // 1_000_000


def seconds_of(entry_id: str) -> float:
    """Return when the entry was added, in seconds of Redis' clock."""
    return int(entry_id.partition("-")[0]) / 1000


class MessageClock:
    """Estimates how far Redis' clock is ahead of the local one.

    Entry ids carry Redis' time. An entry is never read before it was added, so the largest difference of the
    last WINDOW_S between its time and the local time is the best estimate.
    """

    def __init__(self) -> None:
        # (seen at, difference): falling differences, so that the first one is the largest of the window
        self._ahead: deque[tuple[float, float]] = deque()

    def observe(self, entry_id: str, local_s: float) -> float:
        """Record that an entry was read at `local_s` (monotonic). Returns the entry's own time in seconds."""
        at_s = seconds_of(entry_id)
        ahead_s = at_s - local_s
        while self._ahead and self._ahead[-1][1] <= ahead_s:
            self._ahead.pop()
        self._ahead.append((local_s, ahead_s))
        while self._ahead[0][0] < local_s - WINDOW_S:
            self._ahead.popleft()
        return at_s

    def now(self, local_s: float) -> float:
        """Return Redis' time at the local time `local_s`, in seconds; before any entry, `local_s` itself."""
        return local_s + (self._ahead[0][1] if self._ahead else 0.0)

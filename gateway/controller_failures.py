"""Failures that the leading controller tells of, while it goes on (`controller.failures`)."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final, get_args

from bus.messages import ControllerWork, Event

WORKS: Final[tuple[ControllerWork, ...]] = get_args(ControllerWork)
SHOWN_S: Final = 900.0  # the last failure is shown for so long


class ControllerFailures:
    """The owner of the counts by work, since this process listens, and of the last failure."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._last: Event | None = None

    def on_event(self, event: Event, *, is_history: bool = False) -> None:
        """Note a failure. What happened before this process listened is shown and not counted."""
        if event.kind != "controller_failed":
            return
        self._last = event
        if not is_history:
            self.counts[event.subject] += int(event.numbers.get("failures", 1))

    def last(self) -> dict[str, Any] | None:
        """Return work, reason and time of the last failure; None if that is SHOWN_S ago."""
        event = self._last
        if event is None or time.time() - event.at_ms / 1000 > SHOWN_S:
            return None
        return {"work": event.subject, "reason": event.reason, "at": event.at_ms / 1000}

"""The progress lines of an offline tool."""

from __future__ import annotations

import sys
import time

EVERY_S = 2.0


def say(text: str) -> None:
    """Print one line at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class ProgressLine:
    """The progress of a job, printed at most every EVERY_S seconds and at its end, with the time left."""

    def __init__(self, name: str, total: int, unit: str) -> None:
        self._name, self._total, self._unit = name, total, unit
        self._began = self._said = time.monotonic()
        self._done = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def advance(self, amount: int = 1) -> None:
        self._done = min(self._total, self._done + amount)
        now = time.monotonic()
        if not self._done or (now - self._said < EVERY_S and self._done < self._total):
            return
        self._said = now
        left = self.seconds / self._done * (self._total - self._done)
        tail = f", about {left:.0f} s left" if self._done < self._total else ""
        say(f"{self._name}: {self._done} of {self._total} {self._unit}, {self.seconds:.0f} s{tail}")

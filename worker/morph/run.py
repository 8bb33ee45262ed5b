"""What all morphs have in common while they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Protocol

from bus.messages import MorphOutcome, Number

Clock = Callable[[], float]  # monotonic seconds


class Run(Protocol):
    """A morph while it runs.

    `steps` yields at the end of every unit of work: True if it could go on at once, False if it waits for
    something. It ends when the morph is applied, and raises when it is not; closing it undoes what is half
    done. The manager makes one step after the other, at step boundaries, for as long as there is time.
    """

    def steps(self) -> Generator[bool, None, None]: ...

    def numbers(self) -> dict[str, Number]:
        """Return what the morph took so far."""

    @property
    def deadline(self) -> float | None:
        """When the morph gives up waiting; None: something else will wake it."""

    @property
    def progress(self) -> str:
        """How far the morph is, for people; empty where its end is enough."""

    @property
    def is_beyond_return(self) -> bool:
        """Return whether the morph goes on to its end even if it is cancelled.

        Half-way no request could be served.
        """


def halves_text(num_applied: int, num_halves: int) -> str:
    """Return the progress of a swap, in about ten steps, since every report is broadcast.

    The last step is left to the end's report.
    """
    step = max(1, num_halves // 10)
    told = min(num_applied, num_halves - 1) // step * step
    return f"{told} of {num_halves} halves of layers" if told > 0 else ""


class Patience:
    """The time that a morph has waited without advancing."""

    def __init__(self, wait_s: float, clock: Clock = time.monotonic) -> None:
        self._wait_s, self._clock = wait_s, clock
        self.total_s = 0.0
        self._since: float | None = None

    @property
    def deadline(self) -> float | None:
        return None if self._since is None else self._since + self._wait_s

    def wait(self) -> bool:
        """Note that the morph does not advance; return False when it has waited for as long as it may."""
        now = self._clock()
        if self._since is None:
            self._since = now
        return now < self._since + self._wait_s

    def get_on(self) -> None:
        if self._since is not None:
            self.total_s += self._clock() - self._since
            self._since = None


class NotApplied(Exception):
    """Raised to end a morph, with what its MorphReport will say.

    Whatever it had not finished is undone, and the old shape goes on serving.
    """

    def __init__(self, state: MorphOutcome, reason: str, **numbers: Number) -> None:
        self.state, self.reason, self.numbers = state, reason, numbers
        super().__init__(reason)

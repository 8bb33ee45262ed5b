"""The parts that all morphs have in common while they run."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Mapping
from typing import Any

from bus.messages import MorphOutcome, Number

Steps = Generator[bool, None, None]  # as `Run.steps`
Peers = Mapping[str, Any]  # by worker, how a group or a pipeline reaches it


class NotApplied(Exception):
    """Raised to end a morph, with what its MorphReport will say; the old shape goes on serving."""

    def __init__(self, state: MorphOutcome, reason: str, **numbers: Number) -> None:
        self.state, self.reason, self.numbers = state, reason, numbers
        super().__init__(reason)


class Run:
    """A morph while it runs; its constructor raises NotApplied for what can never be applied.

    The manager makes one of its steps after the other, at step boundaries, for as long as there is time.
    """

    is_beyond_return = False  # goes on to its end even if cancelled: half-way no request could be served
    touches: frozenset[Hashable] = frozenset()  # parts of the instance that no other morph may change now
    already = ""  # the shape, where the morph found what it was to make

    def __init__(self, wait_s: float) -> None:
        """Allow the morph to wait `wait_s` without advancing."""
        self._patience = Patience(wait_s)

    def steps(self) -> Steps:
        """Yield at the end of every unit of work: True if it could go on at once, False if it waits.

        Ends when the morph is applied, and raises when it is not; closing it undoes what is half done.
        """
        raise NotImplementedError

    def numbers(self) -> dict[str, Number]:
        """Return what the morph took so far."""
        raise NotImplementedError

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds when the morph gives up waiting; None: something else will wake it."""
        return self._patience.deadline

    @property
    def progress(self) -> str:
        """The progress of the morph, for people; empty where its end is enough."""
        return ""

    def _pause(self, obstacle: NotApplied) -> Steps:
        """Let the others go on. Raises `obstacle` when the morph has waited for as long as it may."""
        if not self._patience.wait():
            raise obstacle
        yield False


class Patience:
    """The time that a morph has waited without advancing."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.total_s = 0.0
        self._since: float | None = None

    @property
    def deadline(self) -> float | None:
        return None if self._since is None else self._since + self._wait_s

    def wait(self) -> bool:
        """Note that the morph does not advance; return False when it has waited for as long as it may."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now < self._since + self._wait_s

    def get_on(self) -> None:
        if self._since is not None:
            self.total_s += time.monotonic() - self._since
            self._since = None

"""Signs of life: who has nothing to say for long is heard of all the same.

A prefill of many chunks and a preempted sequence are silent, and a gateway that hears nothing for long takes
a request for lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from worker.engine.sequence import Sequence

SIGN_OF_LIFE_S: Final = 5.0  # a silence longer than this is broken


class SignsOfLife:
    """Finds the silent sequences of an instance. It looks at them now and then, not at every step."""

    def __init__(self) -> None:
        self._looked_at = 0.0

    def due(self, seqs: Iterable[Sequence], now: float) -> list[Sequence]:
        """Return those that have started and were silent for long."""
        if now - self._looked_at < SIGN_OF_LIFE_S:
            return []
        self._looked_at, since = now, now - SIGN_OF_LIFE_S
        return [seq for seq in seqs if seq.started_at and max(seq.started_at, seq.last_token_at) <= since]

"""How much of the engine's time morphs may take at step boundaries."""

from __future__ import annotations

import time
from collections.abc import Callable

# An idle engine can spend all its time on morphs, but must look for new requests now and then.
IDLE_TURN_S = 0.005


class Pace:
    """Morphs work in small units. A unit begins while the units before have taken less than `share` of the
    time that passed; one that takes longer is paid for by the steps after it. So steps lose `share` of their
    speed at most, on a fast device and on a slow one.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """`share`: of the time, above 0 and at most 1."""
        if not 0 < share <= 1:
            raise ValueError(f"a share of {share}; it must be above 0 and at most 1")
        self._share, self._clock = share, clock
        self._credit_s = 0.0
        self._began = self._since = clock()

    def begin(self, is_busy: bool) -> None:
        """A boundary. What an idle engine spent or saved is forgotten."""
        now = self._clock()
        earned = (now - self._began) * self._share
        self._credit_s = min(self._credit_s + earned, 0.0) if is_busy else IDLE_TURN_S
        self._began = self._since = now

    @property
    def has_time(self) -> bool:
        return self._credit_s >= 0

    def spent(self) -> float:
        """A unit ended. Returns the seconds it took: those since the last call of this or of `begin`."""
        now = self._clock()
        took_s = now - self._since
        self._credit_s -= took_s
        self._since = now
        return took_s

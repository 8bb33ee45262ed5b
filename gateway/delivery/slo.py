"""Did requests get their tokens in time? Counted as they end, against the SLOs of the settings."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from bus.settings import SloSettings
from gateway.delivery.inflight import Flight
from gateway.stats import Stats

SERVED: Final = ("stop", "length")
LEFT: Final = "abort"


class Slos:
    """A request that failed kept neither. One whose client left counts where its first token was late
    already, or it had waited for that longer than it should; else nobody knows what it would have got."""

    def __init__(self, slo: SloSettings, stats: Stats, clock: Callable[[], float] = time.monotonic) -> None:
        self._slo = slo
        self._stats = stats
        self._clock = clock

    def count(self, flight: Flight, how: str) -> None:
        """One sequence ended: stop, length, abort, or the code of its error."""
        has_failed = how != LEFT and how not in SERVED
        is_late = has_failed or self._waited_s(flight) > self._slo.ttft_s
        is_slow = has_failed or (flight.tpot_s() or 0.0) > self._slo.tpot_s
        if how == LEFT and not (is_late or is_slow):
            return
        stats = self._stats.of(flight.model)
        stats.slo_requests += 1
        stats.slo_ttft_violations += is_late
        stats.slo_tpot_violations += is_slow
        stats.within_slo += not (is_late or is_slow)

    def _waited_s(self, flight: Flight) -> float:
        return (flight.first_token or self._clock()) - flight.arrived

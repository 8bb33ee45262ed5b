"""How flights end, each exactly once: the table forgets them, the sink hears of it, the numbers are kept."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.delivery.inflight import Flight, InFlight, Sink
from gateway.delivery.outbox import Outbox
from gateway.errors import ApiError
from gateway.stats import Stats


class Endings:
    """Sinks that were called are flushed together, when the batch that brought it all is through."""

    def __init__(
        self, table: InFlight, outbox: Outbox, stats: Stats, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._outbox = outbox
        self._stats = stats
        self._clock = clock
        # Called with how it ended: stop, length, abort or the code of an error.
        self.on_ended: list[Callable[[Flight, str], None]] = []
        self._touched: dict[Sink, None] = {}

    def touch(self, sink: Sink) -> None:
        self._touched[sink] = None

    def flush(self) -> None:
        """Writes out what a batch brought, once per sink."""
        touched, self._touched = self._touched, {}
        for sink in touched:
            sink.flush()

    def tell_worker(self, flight: Flight) -> None:
        """Where it runs, it is to end."""
        if flight.target is not None:
            self._outbox.cancel(flight.target.worker, flight.target.epoch, [flight.request_id])

    def cancel(self, flight: Flight) -> None:
        """Nobody wants the rest of it (the client left)."""
        if self._table.has(flight):
            self.tell_worker(flight)
            self._remove(flight, "abort")
            self._stats.of(flight.model).finished["abort"] += 1

    def end(self, flight: Flight, reason: str) -> None:
        """Properly."""
        self._remove(flight, reason)
        self._stats.of(flight.model).finished[reason] += 1
        flight.sink.on_end()

    def fail(self, flight: Flight, error: ApiError) -> None:
        """No worker runs it any more."""
        code = error.code or "other"
        self._remove(flight, code)
        self._stats.of(flight.model).failures[code] += 1
        self.touch(flight.sink)
        flight.sink.on_error(error)

    def _remove(self, flight: Flight, how: str) -> None:
        self._table.remove(flight)
        flight.ended = how
        if flight.journey is not None:
            flight.journey.end(self._clock())
        self._stats.of(flight.model).ended(
            num_prompt_tokens=len(flight.prompt_token_ids),
            num_generated_tokens=len(flight.received),
            max_tokens=flight.sampling.max_tokens,
            seconds=self._clock() - flight.arrived,
        )
        for listener in self.on_ended:
            listener(flight, how)

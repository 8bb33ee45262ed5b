"""The ends of requests, each exactly once: out of the table, to the sink, into the counts."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from bus.settings import SloSettings
from gateway.delivery.outbox import RequestOutbox
from gateway.delivery.request import RequestState, Sink
from gateway.delivery.table import RequestTable
from gateway.errors import ApiError
from gateway.stats import GatewayStats

SERVED: Final = ("stop", "length")
ABORTED: Final = "abort"


class Endings:
    """Ends requests. Sinks that were called are flushed together, after the batch that called them."""

    def __init__(self, table: RequestTable, outbox: RequestOutbox, stats: GatewayStats) -> None:
        self.table, self.outbox, self.stats = table, outbox, stats
        self._clock = time.monotonic
        # Called with how the request ended: stop, length, abort or the code of an error.
        self.on_ended: list[Callable[[RequestState, str], None]] = []
        self._touched: dict[Sink, None] = {}

    def touch(self, sink: Sink) -> None:
        self._touched[sink] = None

    def flush(self) -> None:
        """Flush each sink that was called since the last time."""
        touched, self._touched = self._touched, {}
        for sink in touched:
            sink.flush()

    def cancel_at_worker(self, state: RequestState) -> None:
        if state.target is not None:
            self.outbox.cancel(state.target.worker, state.target.epoch, [state.id])

    def cancel(self, state: RequestState) -> None:
        """End a request whose client left."""
        if self.table.has(state):
            self.cancel_at_worker(state)
            self._remove(state, ABORTED)
            self.stats.models[state.request.model].request_success[ABORTED] += 1

    def end(self, state: RequestState, reason: str) -> None:
        """End a request that has all its tokens."""
        self._remove(state, reason)
        self.stats.models[state.request.model].request_success[reason] += 1
        state.sink.on_end()

    def fail(self, state: RequestState, error: ApiError) -> None:
        """End a request that no worker runs any more."""
        code = error.code or "other"
        self._remove(state, code)
        self.stats.models[state.request.model].request_failures[code] += 1
        self.touch(state.sink)
        state.sink.fail(error)

    def _remove(self, state: RequestState, how: str) -> None:
        self.table.remove(state)
        state.ended = how
        if state.journey is not None:
            state.journey.end(self._clock())
        stats, num_prompt_tokens = self.stats.models[state.request.model], len(state.request.prompt_token_ids)
        stats.prompt_tokens += num_prompt_tokens
        stats.e2e_request_latency_seconds.observe(self._clock() - state.request.arrived)
        stats.request_prompt_tokens.observe(num_prompt_tokens)
        stats.request_generation_tokens.observe(len(state.received))
        stats.request_params_max_tokens.observe(state.request.sampling.max_tokens)
        for listener in self.on_ended:
            listener(state, how)


class SloCounter:
    """Counts requests that met the latency targets; one that failed met neither."""

    def __init__(
        self, slo: SloSettings, stats: GatewayStats, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._slo, self._stats, self._clock = slo, stats, clock

    def count(self, state: RequestState, how: str) -> None:
        """Count one request that ended: stop, length, abort or the code of an error."""
        has_failed = how != ABORTED and how not in SERVED
        ttft_s = (state.first_token or self._clock()) - state.request.arrived
        is_late = has_failed or ttft_s > self._slo.ttft_s
        is_slow = has_failed or (state.tpot_s() or 0.0) > self._slo.tpot_s
        if how == ABORTED and not (is_late or is_slow):
            return
        stats = self._stats.models[state.request.model]
        stats.slo_requests += 1
        stats.slo_ttft_violations += is_late
        stats.slo_tpot_violations += is_slow
        stats.requests_within_slo += not (is_late or is_slow)

"""Every accepted request gets every token once, in order, and exactly one end, whatever dies.

A synchronous core: it is told what happened (a step's output, a Submit that Redis took) and answers by
changing the in-flight table, calling sinks, and putting writes into the outbox. It never waits.
`gateway.delivery.watch` tells when a flight must be replayed, `gateway.delivery.attempts` does it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from bus.messages import Delta, RejectReason, StepOutput
from gateway import errors
from gateway.delivery.attempts import Attempts, OnEvent
from gateway.delivery.cluster import Cluster
from gateway.delivery.endings import Endings
from gateway.delivery.inflight import Flight, InFlight
from gateway.delivery.outbox import Outbox
from gateway.delivery.placement import Placement
from gateway.delivery.precision import lowest_named
from gateway.errors import ApiError
from gateway.stats import Stats

STRAY_CANCEL_S = 1.0


class Delivery:
    """Owner of the table."""

    def __init__(
        self,
        table: InFlight,
        cluster: Cluster,
        outbox: Outbox,
        placement: Placement,
        stats: Stats,
        *,
        queue_timeout_s: float,
        max_attempts: int,
        replay: bool,
        on_event: OnEvent,
        on_demand: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table
        self.outbox = outbox
        self.placement = placement
        self.stats = stats
        self.endings = Endings(table, outbox, stats, clock)
        self.attempts = Attempts(
            table,
            cluster,
            outbox,
            placement,
            self.endings,
            stats,
            queue_timeout_s=queue_timeout_s,
            max_attempts=max_attempts,
            replay=replay,
            on_event=on_event,
            on_demand=on_demand,
            clock=clock,
        )
        self._clock = clock
        self._strays: dict[str, float] = {}  # request id -> when its worker was told that nobody wants it

    # ------------------------------------------------------------------------------------- from the API

    def submit(self, flight: Flight) -> None:
        """Accepts it. Raises ApiError: 400 where no instance can hold it, 503 where there is none."""
        self.attempts.begin(flight)

    def cancel(self, flight: Flight) -> None:
        """Nobody wants the rest of it (the client left)."""
        self.endings.cancel(flight)

    def fail(self, flight: Flight, error: ApiError) -> None:
        """Ends it, at its worker, too. Nothing happens to one that has ended (its call failed with a
        sibling)."""
        if self.table.has(flight):
            self.endings.tell_worker(flight)
            self.endings.fail(flight, error)

    def fail_all(self, error: ApiError) -> None:
        """Ends everything: this gateway leaves."""
        for flight in list(self.table.flights.values()):
            self.fail(flight, error)
        self.flush()

    def flush(self) -> None:
        """Writes out what the steps of a batch brought, once per sink."""
        self.endings.flush()

    # ------------------------------------------------------------------------------------- from workers

    def on_step(self, step: StepOutput, deltas: Sequence[Delta]) -> None:
        """One engine step's deltas, or some of them. Call `flush` when the batch is through."""
        now = self._clock()
        flights = self.table.flights
        for delta in deltas:
            flight = flights.get(delta.request_id)
            if flight is None:
                self._stray(step, delta, now)
                continue
            target = flight.target
            if (
                target is None
                or delta.attempt != flight.attempt
                or target.epoch != step.epoch
                or target.worker != step.worker
            ):
                self.stats.late_deltas += 1
                continue
            self._accept(flight, delta, step, now)

    def _accept(self, flight: Flight, delta: Delta, step: StepOutput, now: float) -> None:
        received = flight.received
        skip = len(received) - delta.index
        if skip < 0:
            self.stats.gaps += 1
            missing = f"token {len(received)} is missing, {delta.index} came"
            self.attempts.replay(flight, "gap", missing, may_still_run=True)
            return
        flight.last_sign = now
        if delta.reject_reason is not None:
            self._rejected(flight, delta.reject_reason, delta.error or "")
            return
        if not flight.is_running:
            self._started(flight, max(now - step.step_s, flight.arrived))
        token_ids = delta.token_ids[skip:] if skip else delta.token_ids
        is_enough = False
        if token_ids:
            self._count(flight, len(token_ids), step, now)
            received.extend(token_ids)
            is_enough = flight.sink.on_tokens(token_ids, delta, skip, step)
        self.endings.touch(flight.sink)
        if is_enough:
            self.endings.tell_worker(flight)
            self.endings.end(flight, "stop")
        elif delta.finish_reason == "error":
            reason = delta.error or "no reason given"
            self.endings.fail(flight, errors.engine_error(f"the worker failed: {reason}"))
        elif delta.finish_reason is not None:
            if not token_ids:
                flight.sink.on_tokens([], delta, skip, step)
            self.endings.end(flight, delta.finish_reason)

    def _rejected(self, flight: Flight, reason: RejectReason, detail: str) -> None:
        """Send `flight` elsewhere, or here again later: its worker did not run it."""
        match reason:
            case RejectReason.PRECISION_FLOOR:
                self.attempts.below_floor(flight)
            case RejectReason.KV_CAPACITY:
                self.attempts.too_small(flight, detail)
            case RejectReason.RETIRED:
                self.attempts.retired(flight, detail)

    def _started(self, flight: Flight, began: float) -> None:
        flight.is_running = True
        if flight.journey is not None:
            flight.journey.began(began)
        if not flight.was_admitted:
            flight.was_admitted = True
            flight.began = began
            self.stats.of(flight.model).request_queue_time.observe(began - flight.arrived)
            flight.sink.on_admitted()

    def _count(self, flight: Flight, num_tokens: int, step: StepOutput, now: float) -> None:
        stats = self.stats.of(flight.model)
        if flight.received:
            stats.inter_token_latency.observe((now - flight.last_token) / num_tokens)
        else:
            stats.time_to_first_token.observe(now - flight.arrived)
            flight.first_token = now
        stats.generation_tokens += num_tokens
        stats.tokens_by_precision[lowest_named(step.fingerprint)] += num_tokens
        flight.last_token = now
        if flight.journey is not None:
            flight.journey.made(step, len(flight.received), num_tokens, now)

    def _stray(self, step: StepOutput, delta: Delta, now: float) -> None:
        """A worker still runs what has ended here: its Cancel was lost, or the request belonged to an
        earlier process with this gateway's id."""
        if delta.finish_reason is not None or now - self._strays.get(delta.request_id, -1e9) < STRAY_CANCEL_S:
            return
        if len(self._strays) > 4096:
            self._strays.clear()
        self._strays[delta.request_id] = now
        self.outbox.cancel(step.worker, step.epoch, [delta.request_id])

    # ------------------------------------------------------------------------------------- from the outbox

    def on_sent(self, flight: Flight) -> None:
        """Redis has its Submit."""
        flight.is_sent = True
        flight.last_sign = self._clock()

    def on_bus_full(self, flight: Flight) -> None:
        """Redis has no memory for the Submit: a refusal, or another try for what has begun."""
        if flight.received:
            if flight.journey is not None:
                flight.journey.void("bus_full", self._clock())
            self.table.unassign(flight)
        else:
            full = "the message bus is full (Redis is at maxmemory)"
            self.endings.fail(flight, errors.overloaded(full))
            self.flush()

    def on_unsendable(self, flight: Flight, _: Exception) -> None:
        """Its Submit is no message: nobody could run it."""
        self.endings.fail(flight, errors.internal())
        self.flush()

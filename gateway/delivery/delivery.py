"""Every accepted request gets every token once, in order, and exactly one end, whatever dies.

A synchronous core: it is told what happened (a step's output, a flight to replay) and answers by changing the
in-flight table, calling sinks, and putting writes into the outbox. It never waits. `gateway.delivery.watch`
tells when a flight must be replayed, that is submitted again with the tokens received so far and the next
attempt number. The late tokens of a void attempt are dropped here; a worker drops it for a newer one, and is
told where the newer one goes elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from bus.messages import Delta, FinishReason, StepOutput
from gateway import errors
from gateway.delivery.cluster import Cluster
from gateway.delivery.inflight import Flight, InFlight, Sink, Target
from gateway.delivery.outbox import Outbox
from gateway.delivery.placement import Placement
from gateway.errors import ApiError
from gateway.operations.stats import Stats

log = logging.getLogger("gateway")

# A model whose only worker died keeps its queue this long for a new one.
JOIN_GRACE_S = 10.0
STRAY_CANCEL_S = 1.0


class Delivery:
    """`on_event(kind, subject, reason, numbers)` publishes to the audit stream. Owner of the table."""

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
        on_event: Callable[[str, str, str, dict[str, float]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = table
        self.cluster = cluster
        self.outbox = outbox
        self.placement = placement
        self.stats = stats
        self._queue_timeout_s = queue_timeout_s
        self._max_attempts = max_attempts
        self._may_replay = replay
        self._on_event = on_event
        self._clock = clock
        self._strays: dict[str, float] = {}  # request id -> when its worker was told that nobody wants it
        self._touched: dict[Sink, None] = {}

    # ------------------------------------------------------------------------------------- from the API

    def submit(self, flight: Flight) -> None:
        """Sends it to an instance, or lets it wait for one that is joining. Raises ApiError: 400 where no
        instance can hold it, 503 where there is none."""
        found = self.placement.find(flight)
        if found is None and not self.cluster.is_joining(flight.model, self._clock(), JOIN_GRACE_S):
            raise errors.unavailable(f"no worker serves {flight.model!r} at the moment; try again", 2.0)
        self.table.add(flight)
        if found is not None:
            self.placement.send(flight, found)

    def cancel(self, flight: Flight) -> None:
        """Nobody wants the rest of it (the client left)."""
        if self.table.has(flight):
            self._tell_worker(flight)
            self._remove(flight)
            self.stats.of(flight.model).finished["abort"] += 1

    def fail_all(self, error: ApiError) -> None:
        """Ends everything: this gateway leaves."""
        for flight in list(self.table.flights.values()):
            self.fail(flight, error)
        self.flush()

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

    def flush(self) -> None:
        """Writes out what the steps of a batch brought, once per sink."""
        touched, self._touched = self._touched, {}
        for sink in touched:
            sink.flush()

    def _accept(self, flight: Flight, delta: Delta, step: StepOutput, now: float) -> None:
        received = flight.received
        skip = len(received) - delta.index
        if skip < 0:
            self.stats.gaps += 1
            missing = f"token {len(received)} is missing, {delta.index} came"
            self.replay(flight, "gap", missing, may_still_run=True)
            return
        flight.last_sign = now
        if not flight.is_running:
            self._started(flight, now)
        token_ids = delta.token_ids[skip:] if skip else delta.token_ids
        is_enough = False
        if token_ids:
            self._count(flight, len(token_ids), now)
            received.extend(token_ids)
            is_enough = flight.sink.on_tokens(token_ids, delta, skip, step.fingerprint)
        self._touched[flight.sink] = None
        if is_enough:
            self._tell_worker(flight)
            self._end(flight, "stop")
        elif delta.finish_reason == "error":
            self._fail(flight, errors.engine_error(f"the worker failed: {delta.error or 'no reason given'}"))
        elif delta.finish_reason is not None:
            if not token_ids:
                flight.sink.on_tokens([], delta, skip, step.fingerprint)
            self._end(flight, delta.finish_reason)

    def _started(self, flight: Flight, now: float) -> None:
        flight.is_running = True
        if not flight.was_admitted:
            flight.was_admitted = True
            self.stats.of(flight.model).request_queue_time.observe(now - flight.arrived)
            flight.sink.on_admitted()

    def _count(self, flight: Flight, num_tokens: int, now: float) -> None:
        stats = self.stats.of(flight.model)
        if flight.received:
            stats.inter_token_latency.observe((now - flight.last_token) / num_tokens)
        else:
            stats.time_to_first_token.observe(now - flight.arrived)
        stats.generation_tokens += num_tokens
        flight.last_token = now

    def _stray(self, step: StepOutput, delta: Delta, now: float) -> None:
        """A worker still runs what has ended here: its Cancel was lost, or the request belonged to an
        earlier process with this gateway's id."""
        if delta.finish_reason is not None or now - self._strays.get(delta.request_id, -1e9) < STRAY_CANCEL_S:
            return
        if len(self._strays) > 4096:
            self._strays.clear()
        self._strays[delta.request_id] = now
        self.outbox.cancel(step.worker, step.epoch, [delta.request_id])

    # ------------------------------------------------------------------------------------- what goes wrong

    def on_sent(self, flight: Flight) -> None:
        """Redis has its Submit."""
        flight.is_sent = True
        flight.last_sign = self._clock()

    def on_bus_full(self, flight: Flight) -> None:
        """Redis has no memory for the Submit: a refusal, or another try for what has begun."""
        if flight.received:
            self.table.unassign(flight)
        else:
            self._fail(flight, errors.overloaded("the message bus is full (Redis is at maxmemory)"))
            self.flush()

    def on_unsendable(self, flight: Flight, _: Exception) -> None:
        """Its Submit is no message: nobody could run it."""
        self._fail(flight, errors.internal())
        self.flush()

    def fail(self, flight: Flight, error: ApiError) -> None:
        """Ends it, at its worker, too. Nothing happens to one that has ended (its call failed with a
        sibling)."""
        if self.table.has(flight):
            self._tell_worker(flight)
            self._fail(flight, error)

    def place_waiting(self) -> None:
        """There may be new instances."""
        for flight in list(self.table.waiting.values()):
            if self.table.has(flight):
                self._place(flight)

    def replay(
        self,
        flight: Flight,
        reason: str,
        detail: str,
        *,
        is_strike: bool = True,
        may_still_run: bool = False,
    ) -> None:
        """Submits it again, unless it has had `max_attempts`. `is_strike`: its worker may have died of it.
        `may_still_run`: the old attempt may live and must then not go on beside the new one."""
        if not self.table.has(flight):
            return
        old, attempt = flight.target, flight.attempt
        self._replay(flight, reason, detail, is_strike)
        if may_still_run and old is not None and not _is_at(flight, old):
            self.outbox.cancel(old.worker, old.epoch, [flight.request_id], up_to_attempt=attempt)

    def _replay(self, flight: Flight, reason: str, detail: str, is_strike: bool) -> None:
        # One that had not begun counts, too: what kills a worker in its first step never begins.
        flight.strikes += is_strike and flight.is_sent
        names = f"{flight.request_id} ({flight.trace_id})"
        log.info("%s: attempt %d is void (%s): %s", names, flight.attempt, reason, detail)
        if (finish := flight.missed_finish()) is not None:
            self._finish(flight, finish)
            return
        if is_strike and not self._may_replay:
            message = f"the worker was lost ({reason}) and gateway.replay is off"
            self._fail(flight, errors.worker_lost(message))
            return
        if flight.strikes >= self._max_attempts:
            self._give_up(flight, detail)
            return
        numbers = {"attempt": float(flight.attempt), "received": float(len(flight.received))}
        self._on_event("request_replayed", flight.request_id, f"{reason}: {detail}", numbers)
        self.stats.of(flight.model).replays[reason] += 1
        self.table.unassign(flight)
        if flight.was_admitted:
            flight.deadline = self._clock() + self._queue_timeout_s
        self._place(flight)

    def _finish(self, flight: Flight, reason: FinishReason) -> None:
        """All tokens are here, only the word that it was over was lost."""
        last = Delta(
            request_id=flight.request_id,
            attempt=flight.attempt,
            index=len(flight.received),
            token_ids=[],
            finish_reason=reason,
        )
        flight.sink.on_tokens([], last, 0, "")
        self._touched[flight.sink] = None
        self._end(flight, reason)

    def _give_up(self, flight: Flight, detail: str) -> None:
        message = f"given up after {flight.strikes} attempts, each lost its worker; the last: {detail}"
        self._on_event("dead_letter", flight.request_id, message, {"attempt": float(flight.attempt)})
        self._fail(flight, errors.worker_lost(message))

    def _place(self, flight: Flight) -> None:
        try:
            found = self.placement.find(flight)
        except ApiError as error:
            self._fail(flight, error)
            return
        if found is not None:
            self.placement.send(flight, found)
        elif flight.was_admitted and self.cluster.ready(flight.model):  # it waits for its turn alone
            flight.deadline = self._clock() + self._queue_timeout_s

    # ------------------------------------------------------------------------------------- ends

    def _tell_worker(self, flight: Flight) -> None:
        if flight.target is not None:
            self.outbox.cancel(flight.target.worker, flight.target.epoch, [flight.request_id])

    def _end(self, flight: Flight, reason: str) -> None:
        self._remove(flight)
        self.stats.of(flight.model).finished[reason] += 1
        flight.sink.on_end()

    def _fail(self, flight: Flight, error: ApiError) -> None:
        self._remove(flight)
        self.stats.of(flight.model).failures[error.code or "other"] += 1
        self._touched[flight.sink] = None
        flight.sink.on_error(error)

    def _remove(self, flight: Flight) -> None:
        self.table.remove(flight)
        stats = self.stats.of(flight.model)
        stats.ended(
            num_prompt_tokens=len(flight.prompt_token_ids),
            num_generated_tokens=len(flight.received),
            max_tokens=flight.sampling.max_tokens,
            seconds=self._clock() - flight.arrived,
        )


def _is_at(flight: Flight, target: Target) -> bool:
    """There the new attempt takes the place of the old one by itself."""
    return flight.target is not None and flight.target[1:] == target[1:]

"""Every accepted request gets every token once, in order, and exactly one end, whatever dies.

A synchronous core: it is told what happened (a step's output, a lost worker, a new poll, time going by) and
answers by changing the in-flight table, calling sinks, and putting writes into the outbox. It never waits.

A flight is replayed, that is submitted again with the tokens received so far and the next attempt number,
when its worker is declared lost or left, when the worker has a newer epoch, when its lease is missing though
Redis answers, when Redis restarted, when a token is missing (a gap), and when it gives no sign of life. Void
attempts need no care: workers drop them for a newer one, and their late tokens are dropped here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bus.client import Restart
from bus.messages import Delta, StepOutput
from gateway import errors
from gateway.candidates import candidates
from gateway.cluster import Cluster
from gateway.dispatch import Candidate, NoneFits, choose
from gateway.errors import ApiError
from gateway.inflight import Flight, InFlight, Sink, Target
from gateway.outbox import Outbox
from gateway.stats import Stats

log = logging.getLogger("gateway")

# A worker that is free and gave no sign of a request for this long never got it.
LOST_S = 3.0
# Whatever the metrics say: longer than a worker's watchdog lets a step take.
SILENT_S = 90.0
# A model whose only worker died keeps its queue this long for a new one.
JOIN_GRACE_S = 10.0
STRAY_CANCEL_S = 1.0


class Delivery:
    """`on_event(kind, subject, reason, numbers)` publishes to the audit stream. Owner of the table."""

    def __init__(
        self,
        cluster: Cluster,
        stats: Stats,
        *,
        lease_s: float,
        queue_timeout_s: float,
        max_attempts: int,
        replay: bool,
        on_event: Callable[[str, str, str, dict[str, float]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.table = InFlight()
        self.cluster = cluster
        self.stats = stats
        self.outbox: Outbox  # set by who has the bus
        self._lease_s = lease_s
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
        found = self._choose(flight)
        if isinstance(found, NoneFits):
            raise _does_not_fit(flight, found)
        if found is None and not self.cluster.is_joining(flight.model, self._clock(), JOIN_GRACE_S):
            raise errors.unavailable(f"no worker serves {flight.model!r} at the moment; try again", 2.0)
        self.table.add(flight)
        if found is not None:
            self._send(flight, found)

    def cancel(self, flight: Flight) -> None:
        """Nobody wants the rest of it (the client left)."""
        if self.table.has(flight):
            self._tell_worker(flight)
            self._remove(flight)
            self.stats.of(flight.model).finished["abort"] += 1

    def fail_all(self, error: ApiError) -> None:
        """Ends everything: this gateway leaves."""
        for flight in list(self.table.flights.values()):
            if self.table.has(flight):
                self._tell_worker(flight)
                self._fail(flight, error)
        self.flush()

    # ------------------------------------------------------------------------------------- from workers

    def on_step(self, step: StepOutput) -> None:
        """One engine step's deltas. Call `flush` when the batch is through."""
        now = self._clock()
        flights = self.table.flights
        for delta in step.deltas:
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
            self._replay(flight, "gap", f"token {len(received)} is missing, {delta.index} came")
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

    def on_worker_gone(self, worker: str, epoch: int, reason: str) -> None:
        """Declared lost by the controller, or left."""
        self.cluster.drop(worker, epoch)
        for flight in self.table.at(worker, epoch):
            if self.table.has(flight):  # its call may have failed with a sibling
                self._replay(flight, reason, f"{worker} (epoch {epoch}) is gone")
        self.flush()

    def on_restart(self, restart: Restart) -> None:
        """Streams may have lost entries: everything unfinished is submitted again. No worker is to blame."""
        if restart.data_lost:
            self.cluster.forget_workers()
        for flight in list(self.table.flights.values()):
            if flight.target is not None:
                self._replay(flight, "bus_restarted", "Redis restarted", is_strike=False)
        self.flush()

    def on_poll(self) -> None:
        """The registry was read: newer epochs, missing leases, new instances."""
        for target in list(self.table.places):
            if self.cluster.newer_epoch(target.worker, target.epoch):
                self.on_worker_gone(target.worker, target.epoch, "epoch_changed")
            elif self.cluster.missing_for(target.worker, target.epoch) > 2 * self._lease_s:
                self.on_worker_gone(target.worker, target.epoch, "lease_missing")
        self._place_waiting()
        self.flush()

    def on_bus_full(self, flight: Flight) -> None:
        """Redis has no memory for the Submit."""
        if flight.received:
            self.table.unassign(flight)
        else:
            self._fail(flight, errors.overloaded("the message bus is full (Redis is at maxmemory)"))
            self.flush()

    def on_sent(self, flight: Flight) -> None:
        flight.is_sent = True
        flight.last_sign = self._clock()

    def tick(self) -> None:
        """A few times a second: deadlines, and requests that were lost without a sign."""
        now = self._clock()
        for flight in list(self.table.flights.values()):
            if not self.table.has(flight):  # its call failed with a sibling
                continue
            if not flight.is_running and now > flight.deadline:
                self._too_late(flight, now)
            elif flight.is_sent and self._is_lost(flight, now):
                self._replay(flight, "silent", f"no sign of life for {now - flight.last_sign:.1f} s")
        self.flush()

    def _too_late(self, flight: Flight, now: float) -> None:
        self._tell_worker(flight)
        if flight.was_admitted:
            error = errors.worker_lost(f"no worker went on with it within {self._queue_timeout_s:.0f} s")
        else:
            error = errors.deadline_exceeded(now - flight.arrived)
        self._fail(flight, error)

    def _is_lost(self, flight: Flight, now: float) -> bool:
        silence = now - flight.last_sign
        if silence < LOST_S or flight.target is None:
            return False
        instance, _, epoch = flight.target
        is_idle = self.cluster.was_idle_after(instance, epoch, flight.last_sign + LOST_S / 2, now)
        return is_idle or (flight.is_running and silence > SILENT_S)

    def _replay(self, flight: Flight, reason: str, detail: str, *, is_strike: bool = True) -> None:
        flight.strikes += is_strike
        log.info("%s: attempt %d is void (%s): %s", flight.request_id, flight.attempt, reason, detail)
        if not self._may_replay:
            self._fail(
                flight, errors.worker_lost(f"the worker was lost ({reason}) and gateway.replay is off")
            )
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

    def _give_up(self, flight: Flight, detail: str) -> None:
        message = f"given up after {flight.strikes} attempts, each lost its worker; the last: {detail}"
        self._on_event("dead_letter", flight.request_id, message, {"attempt": float(flight.attempt)})
        self._tell_worker(flight)
        self._fail(flight, errors.worker_lost(message))

    # ------------------------------------------------------------------------------------- placing

    def _place_waiting(self) -> None:
        for flight in list(self.table.waiting.values()):
            if self.table.has(flight):
                self._place(flight)

    def _place(self, flight: Flight) -> None:
        found = self._choose(flight)
        if isinstance(found, NoneFits):
            self._fail(flight, _does_not_fit(flight, found))
        elif found is not None:
            self._send(flight, found)

    def _choose(self, flight: Flight) -> Candidate | NoneFits | None:
        return choose(candidates(self.cluster, self.table, flight.model, self._clock()), flight.num_tokens)

    def _send(self, flight: Flight, to: Candidate) -> None:
        self.table.assign(flight, Target(to.instance, to.worker, to.epoch))
        self.outbox.submit(flight)

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


def _does_not_fit(flight: Flight, found: NoneFits) -> ApiError:
    return errors.too_long(len(flight.prompt_token_ids), found.limit, flight.sampling.max_tokens)

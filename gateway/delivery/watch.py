"""When is a flight lost? What the registry, the controller, Redis and the clock tell about workers.

A flight is replayed when its worker is declared lost or left, when the worker has another epoch, when its
lease is missing though Redis answers (the controller may be dead, too), when Redis restarted, when this
gateway's own lease had run out, and when the flight gives no sign of life though its worker does. (A gap
between tokens is noticed where they arrive.)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bus.client import Restart
from gateway.delivery.cluster import Cluster
from gateway.delivery.delivery import Delivery
from gateway.delivery.inflight import Flight, Target
from gateway.errors import deadline_exceeded, unavailable, worker_lost

# A worker that is free and gave no sign of a request for this long never got it.
LOST_S = 3.0
# Whatever the metrics say: longer than a worker's watchdog lets a step take.
SILENT_S = 90.0


class Watch:
    """`lease_s` is the workers'; twice that without a lease means dead."""

    def __init__(
        self,
        delivery: Delivery,
        cluster: Cluster,
        *,
        lease_s: float,
        queue_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._delivery = delivery
        self._attempts = delivery.attempts
        self._table = delivery.table
        self._cluster = cluster
        self._lease_s = lease_s
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock

    def on_worker_gone(self, worker: str, epoch: int, reason: str) -> None:
        """This incarnation, and those before it, run nothing any more. One that left did not die of its
        requests."""
        self._cluster.drop(worker, epoch)
        is_strike = reason != "worker_left"
        for flight in self._table.at(worker, epoch):
            self._attempts.replay(flight, reason, f"{worker} (epoch {epoch}) is gone", is_strike=is_strike)
        self._delivery.flush()

    def on_own_lease_lost(self) -> None:
        """Workers cancel what a gateway without a lease had asked for: it is submitted again."""
        for flight in self._placed():
            detail = "this gateway's lease had run out"
            self._attempts.replay(flight, "gateway_lease_lost", detail, is_strike=False, may_still_run=True)
        self._delivery.flush()

    def on_restart(self, restart: Restart) -> None:
        """Streams may have lost entries: everything unfinished is submitted again. No worker is to blame."""
        if restart.data_lost:
            self._cluster.forget_workers()
        may_still_run = not restart.data_lost  # else the workers lost their leases and drop it
        for flight in self._placed():
            self._attempts.replay(
                flight, "bus_restarted", "Redis restarted", is_strike=False, may_still_run=may_still_run
            )
        self._delivery.flush()

    def on_poll(self) -> None:
        """The registry was read: other epochs, missing leases, new instances."""
        for target in list(self._table.places):
            _, worker, epoch = target
            if self._cluster.has_other_epoch(worker, epoch):
                self._replay_at(target, "epoch_changed", not self._cluster.was_fenced(worker, epoch))
            elif self._cluster.missing_for(worker, epoch) > 2 * self._lease_s:
                self._replay_at(target, "lease_missing", True)
        self._attempts.place_waiting()
        self._delivery.flush()

    def tick(self) -> None:
        """A few times a second: deadlines, and requests that were lost without a sign."""
        now = self._clock()
        for flight in list(self._table.flights.values()):
            if not flight.is_running and now > flight.deadline:
                self._too_late(flight, now)
            elif flight.is_sent and self._is_lost(flight, now):
                silence = f"no sign of life for {now - flight.last_sign:.1f} s"
                self._attempts.replay(flight, "silent", silence, may_still_run=True)
        self._delivery.flush()

    def on_bus_away(self, away_s: float, patience_s: float) -> None:
        """What has not begun is refused after `patience_s`; streams that have wait as long as a request may
        wait in the queue, saying so with comments, and not for ever."""
        if away_s < patience_s:
            return
        error = unavailable("the message bus (Redis) is away; try again", 2.0)
        for flight in list(self._table.flights.values()):
            if not flight.was_admitted or away_s > self._queue_timeout_s:
                self._delivery.fail(flight, error)
        self._delivery.flush()

    def _replay_at(self, target: Target, reason: str, is_strike: bool) -> None:
        detail = f"{target.worker} (epoch {target.epoch}) is gone"
        for flight in self._table.at_target(target):
            self._attempts.replay(flight, reason, detail, is_strike=is_strike)

    def _placed(self) -> list[Flight]:
        return [flight for flight in self._table.flights.values() if flight.target is not None]

    def _too_late(self, flight: Flight, now: float) -> None:
        if flight.was_admitted:
            error = worker_lost(f"no worker went on with it within {self._queue_timeout_s:.0f} s")
        else:
            error = deadline_exceeded(now - flight.arrived, self._held_up(flight))
        self._delivery.fail(flight, error)

    def _held_up(self, flight: Flight) -> str:
        """What it waited for, where that was the client's own wish."""
        if flight in self._table.for_room:
            return f"no instance could hold its {flight.num_tokens} tokens, and no group that can was made"
        if flight.min_precision and flight.target is None and self._cluster.ready(flight.model):
            return f"no instance had every layer at {flight.min_precision!r} or better"
        return ""

    def _is_lost(self, flight: Flight, now: float) -> bool:
        silence = now - flight.last_sign
        if silence < LOST_S or flight.target is None:
            return False
        instance, worker, epoch = flight.target
        if self._cluster.has_left(instance, worker, epoch, now):
            return True
        is_idle = self._cluster.was_idle_after(instance, epoch, flight.last_sign + LOST_S / 2, now)
        if is_idle or not flight.is_running or silence <= SILENT_S:
            return is_idle
        # preempted, or in a long prefill: silent while its instance goes on
        return not self._cluster.is_working(instance, epoch, now, SILENT_S)

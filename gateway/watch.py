"""When is a flight lost? What the registry, the controller, Redis and the clock tell about workers.

A flight is replayed when its worker is declared lost or left, when the worker has a newer epoch, when its
lease is missing though Redis answers (the controller may be dead, too), when Redis restarted, and when it
gives no sign of life though its worker does. (A gap between tokens is noticed where they arrive.)
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bus.client import Restart
from gateway.cluster import Cluster
from gateway.delivery import Delivery
from gateway.errors import deadline_exceeded, unavailable, worker_lost
from gateway.inflight import Flight

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
        self._table = delivery.table
        self._cluster = cluster
        self._lease_s = lease_s
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock

    def on_worker_gone(self, worker: str, epoch: int, reason: str) -> None:
        """This incarnation, and those before it, run nothing any more."""
        self._cluster.drop(worker, epoch)
        for flight in self._table.at(worker, epoch):
            self._delivery.replay(flight, reason, f"{worker} (epoch {epoch}) is gone")
        self._delivery.flush()

    def on_restart(self, restart: Restart) -> None:
        """Streams may have lost entries: everything unfinished is submitted again. No worker is to blame."""
        if restart.data_lost:
            self._cluster.forget_workers()
        for flight in list(self._table.flights.values()):
            if flight.target is not None:
                self._delivery.replay(flight, "bus_restarted", "Redis restarted", is_strike=False)
        self._delivery.flush()

    def on_poll(self) -> None:
        """The registry was read: newer epochs, missing leases, new instances."""
        for target in list(self._table.places):
            if self._cluster.newer_epoch(target.worker, target.epoch):
                self.on_worker_gone(target.worker, target.epoch, "epoch_changed")
            elif self._cluster.missing_for(target.worker, target.epoch) > 2 * self._lease_s:
                self.on_worker_gone(target.worker, target.epoch, "lease_missing")
        self._delivery.place_waiting()
        self._delivery.flush()

    def tick(self) -> None:
        """A few times a second: deadlines, and requests that were lost without a sign."""
        now = self._clock()
        for flight in list(self._table.flights.values()):
            if not flight.is_running and now > flight.deadline:
                self._too_late(flight, now)
            elif flight.is_sent and self._is_lost(flight, now):
                silence = f"no sign of life for {now - flight.last_sign:.1f} s"
                self._delivery.replay(flight, "silent", silence)
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

    def _too_late(self, flight: Flight, now: float) -> None:
        if flight.was_admitted:
            error = worker_lost(f"no worker went on with it within {self._queue_timeout_s:.0f} s")
        else:
            error = deadline_exceeded(now - flight.arrived)
        self._delivery.fail(flight, error)

    def _is_lost(self, flight: Flight, now: float) -> bool:
        silence = now - flight.last_sign
        if silence < LOST_S or flight.target is None:
            return False
        instance, _, epoch = flight.target
        is_idle = self._cluster.was_idle_after(instance, epoch, flight.last_sign + LOST_S / 2, now)
        return is_idle or (flight.is_running and silence > SILENT_S)

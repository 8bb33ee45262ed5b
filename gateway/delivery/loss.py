"""Detection of lost requests, from the registry, the controller, Redis and the clock.

Delivery itself notices a missing token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from bus.client import Restart
from gateway.delivery.cluster import Cluster
from gateway.delivery.delivery import Delivery
from gateway.delivery.request import RequestState, RetryReason
from gateway.errors import deadline_exceeded, unavailable, worker_lost

# A worker that is idle and gave no sign of a request for this long never got it.
LOST_S = 3.0
# Longer than a worker's watchdog allows a step: then a request is lost, whatever the metrics say.
SILENT_S = 90.0


class LossDetector:
    """`lease_s` is the workers'. A worker whose lease is missing for twice that counts as dead."""

    def __init__(self, delivery: Delivery, cluster: Cluster, lease_s: float, queue_timeout_s: float) -> None:
        self._delivery, self._table, self._cluster = delivery, delivery.table, cluster
        self._lease_s, self._queue_timeout_s = lease_s, queue_timeout_s
        self._clock = time.monotonic

    def on_worker_gone(self, worker: str, epoch: int, reason: RetryReason) -> None:
        """Send the requests of this epoch, and of earlier ones, again: it runs nothing any more."""
        self._cluster.drop(worker, epoch)
        is_strike = reason is not RetryReason.WORKER_LEFT
        detail = f"{worker} (epoch {epoch}) is gone"
        self._replay(self._table.at_worker(worker, epoch), reason, detail, is_strike=is_strike)

    def on_own_lease_lost(self) -> None:
        """Send everything again: workers cancel the requests of a gateway without a lease."""
        self._replay_all(RetryReason.GATEWAY_LEASE_LOST, "this gateway's lease had run out")

    def on_restart(self, restart: Restart) -> None:
        """Send everything again: the streams may have lost entries, through no fault of a worker."""
        if restart.data_lost:
            self._cluster.forget_workers()
        may_still_run = not restart.data_lost  # otherwise the workers lost their leases and drop it
        self._replay_all(RetryReason.BUS_RESTARTED, "Redis restarted", may_still_run=may_still_run)

    def on_poll(self) -> None:
        """Look at what the registry shows: other epochs, missing leases, new instances."""
        for target in list(self._table.assigned):
            _, worker, epoch = target
            detail = f"{worker} (epoch {epoch}) is gone"
            if self._cluster.has_other_epoch(worker, epoch):
                is_strike = not self._cluster.was_fenced(worker, epoch)
                self._replay(self._table.at(target), RetryReason.EPOCH_CHANGED, detail, is_strike=is_strike)
            elif self._cluster.missing_for(worker, epoch) > 2 * self._lease_s:
                self._replay(self._table.at(target), RetryReason.LEASE_MISSING, detail)
        self._delivery.attempts.place_waiting()
        self._delivery.flush()

    def tick(self) -> None:
        """Look for passed deadlines and silent requests. To be called a few times a second."""
        now = self._clock()
        for state in list(self._table.requests.values()):
            if not state.is_running and now > state.deadline:
                self._fail_late(state, now)
            elif state.is_sent and self._is_lost(state, now):
                detail = f"no sign of life for {now - state.last_sign:.1f} s"
                self._replay([state], RetryReason.SILENT, detail, may_still_run=True)
        self._delivery.flush()

    def on_bus_away(self, away_s: float, patience_s: float) -> None:
        """Refuse what has not begun once Redis is away for `patience_s`; what has begun waits longer."""
        if away_s < patience_s:
            return
        error = unavailable("the message bus (Redis) is away; try again", 2.0)
        for state in list(self._table.requests.values()):
            if not state.was_admitted or away_s > self._queue_timeout_s:
                self._delivery.fail(state, error)
        self._delivery.flush()

    def _replay_all(self, reason: RetryReason, detail: str, *, may_still_run: bool = True) -> None:
        """Send again, without a strike, all requests that are at workers."""
        placed = [state for state in self._table.requests.values() if state.target is not None]
        self._replay(placed, reason, detail, is_strike=False, may_still_run=may_still_run)

    def _replay(
        self, states: Iterable[RequestState], reason: RetryReason, detail: str, **flags: bool
    ) -> None:
        """Send requests again; `flags` as `Attempts.replay` takes them."""
        for state in states:
            self._delivery.attempts.replay(state, reason, detail, **flags)
        self._delivery.flush()

    def _fail_late(self, state: RequestState, now: float) -> None:
        late = worker_lost(f"no worker continued it within {self._queue_timeout_s:.0f} s")
        if not state.was_admitted:
            late = deadline_exceeded(now - state.request.arrived, self._unmet_wish(state))
        self._delivery.fail(state, late)

    def _unmet_wish(self, state: RequestState) -> str:
        """Return what a request waited for if that was the client's own wish; "" if not."""
        request = state.request
        if state in self._table.for_room:
            return f"no instance could hold its {request.num_tokens} tokens, and no group that can was made"
        if request.min_precision and state.target is None and self._cluster.ready(request.model):
            return f"no instance had its layers and its KV cache at {request.min_precision!r} or better"
        return ""

    def _is_lost(self, state: RequestState, now: float) -> bool:
        silence_s = now - state.last_sign
        if silence_s < LOST_S or state.target is None:
            return False
        instance, worker, epoch = state.target
        if self._cluster.has_left(instance, worker, epoch, now):
            return True
        is_idle = self._cluster.was_idle_after(instance, epoch, state.last_sign + LOST_S / 2, now)
        if is_idle or not state.is_running or silence_s <= SILENT_S:
            return is_idle
        # Preempted, or in a long prefill: silent while its instance makes steps.
        return not self._cluster.is_working(instance, epoch, now, SILENT_S)

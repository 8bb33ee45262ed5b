"""The attempts of a request: where the first goes, when another follows, when the gateway gives up.

A retry submits the request again, with the tokens received so far and the next attempt number.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bus.messages import Delta, FinishReason, RejectReason
from bus.settings import GatewaySettings
from gateway import errors
from gateway.delivery.cluster import Cluster
from gateway.delivery.dispatch import Candidate, Wait, WaitForSplit
from gateway.delivery.endings import Endings
from gateway.delivery.placement import Found, Placement
from gateway.delivery.request import InstanceAddress, RequestState, RetryReason
from gateway.delivery.table import ModelQueues
from gateway.errors import ApiError

log = logging.getLogger("gateway")

OnEvent = Callable[[str, str, str, dict[str, float]], None]


class Attempts:
    """`on_event` publishes to the audit stream; `on_demand` is called when a request waits for a shape."""

    def __init__(
        self,
        endings: Endings,
        cluster: Cluster,
        placement: Placement,
        settings: GatewaySettings,
        *,
        on_event: OnEvent,
        on_demand: Callable[[], None],
    ) -> None:
        self._table, self._outbox, self._stats = endings.table, endings.outbox, endings.stats
        self._endings, self._cluster, self._placement = endings, cluster, placement
        self._settings = settings
        self._on_event, self._on_demand = on_event, on_demand
        self._clock = time.monotonic

    def begin(self, state: RequestState) -> None:
        """Send a new request, or let it wait. Raises ApiError: 400 if nothing can hold it, 503."""
        model = state.request.model
        found = self._placement.find(state)
        if found is None and not self._cluster.is_joining(model, self._clock()):
            raise errors.unavailable(f"no worker serves {model!r} at the moment; try again", 2.0)
        self._table.add(state)
        self._carry_out(state, found)

    def place_waiting(self) -> None:
        """Place what waits again: there may be new instances, or old ones in another shape."""
        for model in self._cluster.known_models():
            for state in self._placement.to_recall(model):
                self._recall(state)
        for state in list(self._table.waiting.values()):
            if not self._table.has(state):  # another request of its call failed
                continue
            state.refused_by = frozenset()
            if self._cluster.was_retired(model := state.request.model):
                self._endings.fail(state, errors.no_such_model(model, self._cluster.known_models()))
            else:
                self._place(state)

    def move(self, place: InstanceAddress, num_tokens: int, queued_tokens: int = 0) -> None:
        """Take requests back from the queue of an instance, and place them again where there is room."""
        for state in self._placement.to_move(place, num_tokens, queued_tokens):
            self._recall(state)
        self.place_waiting()

    def _recall(self, state: RequestState) -> None:
        target = state.target
        assert target is not None
        self._outbox.cancel(target.worker, target.epoch, [state.id], up_to_attempt=state.attempt)
        self._end_attempt(state, RetryReason.RECALLED)
        state.was_recalled = True
        self._table.recall(state)

    def _carry_out(self, state: RequestState, found: Found | None) -> None:
        if isinstance(found, Candidate):
            self._placement.send(state, found)
        elif found is Wait.GROUP:
            self._demand(state, self._table.for_room)
        elif found is Wait.PRECISION:
            self._demand(state, self._table.for_precision)
        else:
            self._table.wait(state, self._table.for_parts if isinstance(found, WaitForSplit) else None)

    def _demand(self, state: RequestState, queue: ModelQueues) -> None:
        """Let a request wait in `queue` for another shape, and tell the controller."""
        if state not in queue:
            self._table.wait(state, queue)
            self._on_demand()

    def _place(self, state: RequestState) -> None:
        try:
            found = self._placement.find(state)
        except ApiError as error:
            self._endings.fail(state, error)
            return
        self._carry_out(state, found)
        is_queued = found in (None, Wait.LONG) or isinstance(found, WaitForSplit)
        if is_queued and state.was_admitted and self._cluster.ready(state.request.model):
            state.deadline = self._clock() + self._settings.queue_timeout_s

    def reject(self, state: RequestState, reason: RejectReason, detail: str) -> None:
        """Send a request that its worker did not run elsewhere, or to the same instance later."""
        if reason is RejectReason.KV_CAPACITY:
            self._retry_with_room(state, detail)
            return
        # The metrics, or the last poll, may still show the instance as it was: not there again until the
        # next poll, or two such instances would exchange the request without end.
        if state.target is not None:
            state.refused_by |= {state.target}
        if reason is RejectReason.RETIRED:
            self.replay(state, RetryReason.RETIRED, detail, is_strike=False)
        else:
            self._end_attempt(state, RetryReason.PRECISION_FLOOR)
            self._table.unassign(state)
            self._place(state)

    def _retry_with_room(self, state: RequestState, detail: str) -> None:
        """Let a request wait for a larger instance; after `max_attempts` misfits it fails."""
        state.num_misfits += 1
        self._end_attempt(state, RetryReason.KV_CAPACITY)
        if state.num_misfits >= self._settings.max_attempts:
            limit = self._cluster.longest_tokens(state.request.model, self._clock())
            log.warning("sent back %d times: %s", state.num_misfits, detail, extra=state.log_ids)
            self._endings.fail(state, errors.refused_capacity(detail, limit))
            return
        self._unassign(state)
        self._demand(state, self._table.for_room)

    def replay(
        self,
        state: RequestState,
        reason: RetryReason,
        detail: str,
        *,
        is_strike: bool = True,
        may_still_run: bool = False,
    ) -> None:
        """Submit a request again, unless it has had `max_attempts`.

        `is_strike`: the request may have killed its worker. `may_still_run`: the old attempt may be alive and
        must not continue beside the new one. A new one at the same worker replaces it there.
        """
        if not self._table.has(state):
            return
        old, attempt = state.target, state.attempt
        self._replay(state, reason, detail, is_strike)
        is_same = state.target is not None and old is not None and state.target[1:] == old[1:]
        if may_still_run and old is not None and not is_same:
            self._outbox.cancel(old.worker, old.epoch, [state.id], up_to_attempt=attempt)

    def _replay(self, state: RequestState, reason: RetryReason, detail: str, is_strike: bool) -> None:
        # An attempt that had not begun counts, too: what kills a worker in its first step never begins.
        state.strikes += is_strike and state.is_sent
        log.info("attempt %d is void (%s): %s", state.attempt, reason, detail, extra=state.log_ids)
        if (finish := state.missed_finish()) is not None:
            self._finish(state, finish)
        elif is_strike and not self._settings.replay:
            message = f"the worker was lost ({reason}) and gateway.replay is off"
            self._endings.fail(state, errors.worker_lost(message))
        elif state.strikes >= self._settings.max_attempts:
            message = f"given up after {state.strikes} attempts, each lost its worker; the last: {detail}"
            self._on_event("dead_letter", state.id, message, {"attempt": float(state.attempt)})
            self._endings.fail(state, errors.worker_lost(message))
        else:
            numbers = {"attempt": float(state.attempt), "received": float(len(state.received))}
            self._on_event("request_replayed", state.id, f"{reason}: {detail}", numbers)
            self._end_attempt(state, reason)
            self._unassign(state)
            self._place(state)

    def _end_attempt(self, state: RequestState, reason: RetryReason) -> None:
        self._stats.models[state.request.model].request_replays[reason] += 1
        state.end_attempt(reason, self._clock())

    def _unassign(self, state: RequestState) -> None:
        """Let a request wait again, for as long as a new one if it had begun."""
        self._table.unassign(state)
        if state.was_admitted:
            state.deadline = self._clock() + self._settings.queue_timeout_s

    def _finish(self, state: RequestState, reason: FinishReason) -> None:
        """End a request that has all its tokens and missed only the message that says so."""
        index = len(state.received)
        last = Delta(
            request_id=state.id, attempt=state.attempt, index=index, token_ids=[], finish_reason=reason
        )
        state.sink.on_tokens(state.request, last, 0, None)
        self._endings.touch(state.sink)
        self._endings.end(state, reason)

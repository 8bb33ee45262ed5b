"""Delivery: every accepted request gets every token once, in order, and exactly one end, whatever dies.

A synchronous core: it is called with what happened, changes the table, calls sinks and queues writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from bus.clock import now_ms
from bus.messages import Delta, Demand, StepOutput
from bus.precisions import PRECISIONS
from gateway import errors
from gateway.delivery.attempts import Attempts
from gateway.delivery.candidates import lowest_named
from gateway.delivery.endings import Endings
from gateway.delivery.request import GenerationRequest, RequestState, RetryReason, Sink
from gateway.errors import ApiError

STRAY_CANCEL_S = 1.0


class Delivery:
    """The owner of the table of requests."""

    def __init__(self, endings: Endings, attempts: Attempts, queue_timeout_s: float) -> None:
        self.table, self.outbox, self.stats = endings.table, endings.outbox, endings.stats
        self.endings = endings
        self.attempts = attempts
        self._queue_timeout_s = queue_timeout_s
        self._clock = time.monotonic
        self._strays: dict[str, float] = {}  # request id -> when its worker got a Cancel for it
        self.outbox.on_sent = self.on_sent
        self.outbox.on_full = self.on_full
        self.outbox.on_unsendable = self.on_unsendable

    def new_state(self, request: GenerationRequest, sink: Sink) -> RequestState:
        return RequestState(request, sink, deadline=request.arrived + self._queue_timeout_s)

    def submit(self, state: RequestState) -> None:
        """Accept a request. Raises ApiError: 400 if no instance can hold it, 503 if there is none."""
        self.attempts.begin(state)

    def cancel(self, state: RequestState) -> None:
        """End a request whose client left."""
        self.endings.cancel(state)

    def fail(self, state: RequestState, error: ApiError) -> None:
        """End a request with an error, at its worker, too; nothing if it has ended."""
        if self.table.has(state):
            self.endings.cancel_at_worker(state)
            self.endings.fail(state, error)

    def fail_all(self, error: ApiError) -> None:
        """End every request: this gateway leaves."""
        for state in list(self.table.requests.values()):
            self.fail(state, error)
        self.flush()

    def flush(self) -> None:
        """Write out what a batch of steps brought, once per sink."""
        self.endings.flush()

    def demands(self, gateway: str) -> list[Demand]:
        """Return, for each model, what waits for a group of workers or for layers in more bits."""
        at_ms, found, table = now_ms(), [], self.table
        for model in sorted({*table.for_room.models, *table.for_precision.models}):
            tokens = [state.request.num_tokens for state in table.for_room.of(model)]
            floors = [
                floor for state in table.for_precision.of(model) if (floor := state.request.min_precision)
            ]
            found.append(
                Demand(
                    gateway=gateway,
                    model=model,
                    tokens=max(tokens, default=0),
                    count=len(tokens),
                    at_ms=at_ms,
                    floor=min(floors, key=PRECISIONS.index, default=""),
                )
            )
        return found

    def on_step(self, step: StepOutput, deltas: Sequence[Delta]) -> None:
        """Take the deltas of an engine step, or some of them. Call `flush` after the batch."""
        now = self._clock()
        requests = self.table.requests
        for delta in deltas:
            state = requests.get(delta.request_id)
            if state is None:
                self._cancel_stray(step, delta, now)
                continue
            is_current = state.target is not None and state.target[1:] == (step.worker, step.epoch)
            if is_current and delta.attempt == state.attempt:
                self._accept(state, delta, step, now)
            else:
                self.stats.late_deltas += 1

    def _accept(self, state: RequestState, delta: Delta, step: StepOutput, now: float) -> None:
        received = state.received
        skip = len(received) - delta.index
        if skip < 0:
            self.stats.token_gaps += 1
            detail = f"token {len(received)} is missing, {delta.index} came"
            self.attempts.replay(state, RetryReason.GAP, detail, may_still_run=True)
            return
        if state.misses_scores(delta):
            self.stats.token_gaps += 1
            detail = f"log-probabilities of the prompt are missing from {state.num_prompt_scored} on"
            self.attempts.replay(state, RetryReason.GAP, detail, may_still_run=True)
            return
        delta = state.new_scores(delta)
        state.last_sign = now
        if delta.reject_reason is not None:
            self.attempts.reject(state, delta.reject_reason, delta.error or "")
            return
        if not state.is_running:
            if not state.was_admitted:
                state.cached_tokens = delta.cached_tokens
            self._on_begun(state, max(now - step.step_s, state.request.arrived))
        token_ids = delta.token_ids[skip:] if skip else delta.token_ids
        is_enough = False
        if token_ids:
            self._count(state, len(token_ids), step, now)
            received.extend(token_ids)
        if token_ids or delta.prompt_logprobs or delta.finish_reason not in (None, "error"):
            is_enough = state.sink.on_tokens(state.request, delta, skip, step)
        self.endings.touch(state.sink)
        if is_enough:
            self.endings.cancel_at_worker(state)
            self.endings.end(state, "stop")
        elif delta.finish_reason == "error":
            reason = delta.error or "no reason given"
            self.endings.fail(state, errors.engine_error(f"the worker failed: {reason}"))
        elif delta.finish_reason is not None:
            self.endings.end(state, delta.finish_reason)

    def _on_begun(self, state: RequestState, began: float) -> None:
        state.is_running = True
        if state.journey is not None:
            state.journey.began(began)
        if not state.was_admitted:
            state.was_admitted = True
            state.began = began
            queue_s = began - state.request.arrived
            self.stats.models[state.request.model].request_queue_time_seconds.observe(queue_s)
            state.sink.on_admitted()

    def _count(self, state: RequestState, num_tokens: int, step: StepOutput, now: float) -> None:
        stats = self.stats.models[state.request.model]
        if state.received:
            stats.inter_token_latency_seconds.observe((now - state.last_token) / num_tokens)
        else:
            stats.time_to_first_token_seconds.observe(now - state.request.arrived)
            state.first_token = now
        stats.generation_tokens += num_tokens
        stats.generation_tokens_by_precision[lowest_named(step.fingerprint)] += num_tokens
        state.last_token = now
        if state.journey is not None:
            state.journey.made(step, len(state.received), num_tokens, now)

    def _cancel_stray(self, step: StepOutput, delta: Delta, now: float) -> None:
        """Cancel what has ended here and still runs at a worker: its Cancel was lost, or we restarted."""
        if delta.finish_reason is not None or now - self._strays.get(delta.request_id, -1e9) < STRAY_CANCEL_S:
            return
        if len(self._strays) > 4096:
            self._strays.clear()
        self._strays[delta.request_id] = now
        self.outbox.cancel(step.worker, step.epoch, [delta.request_id])

    def on_sent(self, state: RequestState) -> None:
        """Note that Redis has the Submit of a request."""
        state.is_sent = True
        state.last_sign = self._clock()

    def on_full(self, state: RequestState) -> None:
        """Refuse a request that Redis has no memory for; let one that has begun wait."""
        if state.received:
            state.end_attempt(RetryReason.BUS_FULL, self._clock())
            self.table.unassign(state)
        else:
            full = "the message bus is full (Redis is at maxmemory); try again"
            self.endings.fail(state, errors.overloaded(full))
            self.flush()

    def on_unsendable(self, state: RequestState) -> None:
        """Fail a request whose Submit cannot be encoded."""
        self.endings.fail(state, errors.internal())
        self.flush()

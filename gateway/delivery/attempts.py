"""A flight's attempts: where the first goes, when there is a next one, and when it is given up.

A replay submits the flight again, with the tokens received so far and the next attempt number. The late
tokens of a void attempt are dropped; a worker drops it for a newer one, and is told where the newer one goes
elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from bus.messages import Delta, FinishReason
from gateway import errors
from gateway.delivery.cluster import JOIN_GRACE_S, Cluster
from gateway.delivery.dispatch import Candidate, NoRoom, Parting
from gateway.delivery.endings import Endings
from gateway.delivery.inflight import Flight, InFlight, Target
from gateway.delivery.outbox import Outbox
from gateway.delivery.placement import Found, Placement
from gateway.errors import ApiError
from gateway.stats import Stats

log = logging.getLogger("gateway")

OnEvent = Callable[[str, str, str, dict[str, float]], None]


class Attempts:
    """`on_event(kind, subject, reason, numbers)` publishes to the audit stream. `on_demand` hears that a
    request began to wait for a group."""

    def __init__(
        self,
        table: InFlight,
        cluster: Cluster,
        outbox: Outbox,
        placement: Placement,
        endings: Endings,
        stats: Stats,
        *,
        queue_timeout_s: float,
        max_attempts: int,
        replay: bool,
        on_event: OnEvent,
        on_demand: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._cluster = cluster
        self._outbox = outbox
        self._placement = placement
        self._endings = endings
        self._stats = stats
        self._queue_timeout_s = queue_timeout_s
        self._max_attempts = max_attempts
        self._may_replay = replay
        self._on_event = on_event
        self._on_demand = on_demand
        self._clock = clock

    # ------------------------------------------------------------------------------------- places

    def begin(self, flight: Flight) -> None:
        """Sends it to an instance, or lets it wait for one that is joining, getting its precision back, or
        becoming large enough. Raises ApiError: 400 where no shape can hold it, 503 where there is none."""
        found = self._placement.find(flight)
        if found is None and not self._cluster.is_joining(flight.model, self._clock(), JOIN_GRACE_S):
            raise errors.unavailable(f"no worker serves {flight.model!r} at the moment; try again", 2.0)
        self._table.add(flight)
        self._carry_out(flight, found)

    def place_waiting(self) -> None:
        """There may be new instances, or old ones in another shape."""
        for model in self._cluster.known_models():
            for flight in self._placement.to_recall(model):
                self._recall(flight)
        for flight in list(self._table.waiting.values()):
            if not self._table.has(flight):
                continue
            flight.refused_by = frozenset()
            if self._cluster.was_retired(flight.model):
                known = self._cluster.known_models()
                self._endings.fail(flight, errors.no_such_model(flight.model, known))
            else:
                self._place(flight)

    def _recall(self, flight: Flight) -> None:
        """It waits there, and is to wait here."""
        target = flight.target
        assert target is not None
        self._outbox.cancel(target.worker, target.epoch, [flight.request_id], up_to_attempt=flight.attempt)
        self._void(flight, "recalled")
        flight.was_recalled = True
        self._table.recall(flight)

    def below_floor(self, flight: Flight) -> None:
        """Its instance has layers below the precision it asks for, and did not begin it. Elsewhere then, or
        here at the next look: metrics may not know yet, and it would alternate between two such instances."""
        if flight.target is not None:
            flight.refused_by |= {flight.target}
        self._void(flight, "precision_floor")
        self._table.unassign(flight)
        self._place(flight)

    def too_small(self, flight: Flight, reason: str) -> None:
        """Its instance cannot hold it in the shape of now, which may have changed on the way. The next look
        knows more. One that is sent back again and again ends: our numbers and the worker's disagree."""
        flight.misfits += 1
        self._void(flight, "kv_capacity")
        if flight.misfits >= self._max_attempts:
            limit = self._cluster.longest_tokens(flight.model, self._clock())
            log.warning("sent back %d times: %s", flight.misfits, reason, extra=flight.log_ids)
            self._endings.fail(flight, errors.refused_capacity(reason, limit))
            return
        self._table.unassign(flight)
        if flight.was_admitted:
            flight.deadline = self._clock() + self._queue_timeout_s
        self._wait_for_room(flight)

    def retired(self, flight: Flight, detail: str) -> None:
        """Its instance goes, and did not finish it. The last poll may still show the instance."""
        if flight.target is not None:
            flight.refused_by |= {flight.target}
        self.replay(flight, "retired", detail, is_strike=False)

    def _carry_out(self, flight: Flight, found: Found | None) -> None:
        if isinstance(found, Candidate):
            self._placement.send(flight, found)
        elif isinstance(found, NoRoom):
            self._wait_for_room(flight)
        else:
            self._table.wait(flight, self._table.for_parts if isinstance(found, Parting) else None)

    def _wait_for_room(self, flight: Flight) -> None:
        if flight not in self._table.for_room:
            self._table.wait(flight, self._table.for_room)
            self._on_demand()

    def _place(self, flight: Flight) -> None:
        try:
            found = self._placement.find(flight)
        except ApiError as error:
            self._endings.fail(flight, error)
            return
        self._carry_out(flight, found)
        waits_its_turn = found is None or isinstance(found, Parting)
        if waits_its_turn and flight.was_admitted and self._cluster.ready(flight.model):
            flight.deadline = self._clock() + self._queue_timeout_s

    # ------------------------------------------------------------------------------------- again

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
        if not self._table.has(flight):
            return
        old, attempt = flight.target, flight.attempt
        self._replay(flight, reason, detail, is_strike)
        if may_still_run and old is not None and not _is_at(flight, old):
            self._outbox.cancel(old.worker, old.epoch, [flight.request_id], up_to_attempt=attempt)

    def _replay(self, flight: Flight, reason: str, detail: str, is_strike: bool) -> None:
        # One that had not begun counts, too: what kills a worker in its first step never begins.
        flight.strikes += is_strike and flight.is_sent
        log.info("attempt %d is void (%s): %s", flight.attempt, reason, detail, extra=flight.log_ids)
        if (finish := flight.missed_finish()) is not None:
            self._finish(flight, finish)
            return
        if is_strike and not self._may_replay:
            message = f"the worker was lost ({reason}) and gateway.replay is off"
            self._endings.fail(flight, errors.worker_lost(message))
            return
        if flight.strikes >= self._max_attempts:
            self._give_up(flight, detail)
            return
        numbers = {"attempt": float(flight.attempt), "received": float(len(flight.received))}
        self._on_event("request_replayed", flight.request_id, f"{reason}: {detail}", numbers)
        self._void(flight, reason)
        self._table.unassign(flight)
        if flight.was_admitted:
            flight.deadline = self._clock() + self._queue_timeout_s
        self._place(flight)

    def _void(self, flight: Flight, reason: str) -> None:
        """Its attempt does not go on; another one will."""
        self._stats.of(flight.model).replays[reason] += 1
        if flight.journey is not None:
            flight.journey.void(reason, self._clock())

    def _finish(self, flight: Flight, reason: FinishReason) -> None:
        """All tokens are here, only the word that it was over was lost."""
        last = Delta(
            request_id=flight.request_id,
            attempt=flight.attempt,
            index=len(flight.received),
            token_ids=[],
            finish_reason=reason,
        )
        flight.sink.on_tokens([], last, 0, None)
        self._endings.touch(flight.sink)
        self._endings.end(flight, reason)

    def _give_up(self, flight: Flight, detail: str) -> None:
        message = f"given up after {flight.strikes} attempts, each lost its worker; the last: {detail}"
        self._on_event("dead_letter", flight.request_id, message, {"attempt": float(flight.attempt)})
        self._endings.fail(flight, errors.worker_lost(message))


def _is_at(flight: Flight, target: Target) -> bool:
    """There the new attempt takes the place of the old one by itself."""
    return flight.target is not None and flight.target[1:] == target[1:]

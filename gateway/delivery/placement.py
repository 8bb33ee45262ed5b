"""Puts flights where they run: the choice among the ready instances, the member of a group, the Submit.

Whoever is at a worker when a request kills it gets a strike, too, and in a group all members make
the step that kills one. So a flight that has its last chance gets it alone: no other with its last chance is
at that instance before this one has ended. Of all that suffered
together only the culprit then fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from gateway.delivery.candidates import Candidates
from gateway.delivery.cluster import Cluster
from gateway.delivery.dispatch import (
    Behind,
    BelowFloor,
    Candidate,
    NoneFits,
    NoRoom,
    Parting,
    Seat,
    choose,
    crowded,
    is_long,
    may_keep,
    member_for,
    num_to_recall,
)
from gateway.delivery.inflight import Flight, InFlight, Target
from gateway.delivery.outbox import Outbox
from gateway.errors import below_floor, too_long

# Short requests wait for a group to part, or for a seat in it; where none has got a place for so long, those
# that have waited so long go to the group anyway.
PART_PATIENCE_S = 30.0

Found = Candidate | BelowFloor | NoRoom | Parting


class Placement:
    """Chooses by `gateway.delivery.dispatch`; assigns in the table; submits through the outbox."""

    def __init__(
        self,
        cluster: Cluster,
        table: InFlight,
        outbox: Outbox,
        *,
        max_attempts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._last_strike = max_attempts - 1
        self._cluster = cluster
        self._table = table
        self._outbox = outbox
        self._clock = clock
        self._placed_s: dict[str, float] = {}  # model -> when a short request got a place last

    def find(self, flight: Flight) -> Found | None:
        """Where it should run; None while there is nowhere. Raises ApiError: 400 where no shape of the
        cluster holds it, 503 where it would not wait for its precision and has not begun."""
        candidates = self._candidates(flight)
        found = choose(
            candidates,
            flight.num_tokens,
            flight.min_precision,
            self._reserved_tokens(flight),
            self._long_tokens(flight.model),
        )
        if isinstance(found, Behind):
            return None
        if isinstance(found, Parting):
            since_s = max(flight.arrived, self._placed_s.get(flight.model, flight.arrived))
            return found if self._clock() < since_s + PART_PATIENCE_S else found.candidate
        if isinstance(found, NoneFits):
            limit = max(found.limit, self._cluster.longest_tokens(flight.model, self._clock()))
            if flight.num_tokens > limit:
                raise too_long(len(flight.prompt_token_ids), limit, flight.sampling.max_tokens)
            return NoRoom()
        is_long_here = bool(candidates) and is_long(candidates, flight.num_tokens)
        if is_long_here and self._is_behind(flight, self._table.for_room.first(flight.model)):
            return NoRoom()
        if not is_long_here and isinstance(found, Candidate) and found.parts:
            waiting = self._table.for_parts.of(flight.model)
            # Who waits for a precision that this one has not is held up by nobody who goes there.
            for_this = (one for one in waiting if may_keep(found, one.min_precision))
            if self._is_behind(flight, next(for_this, None)):
                return Parting(found)
            if not self._is_behind(flight, next(iter(waiting), None)):
                self._placed_s[flight.model] = self._clock()
        if isinstance(found, BelowFloor) and not (flight.waits_for_precision or flight.was_admitted):
            raise below_floor(flight.model, flight.min_precision)
        return found

    def to_recall(self, model: str) -> list[Flight]:
        """Short ones that wait at workers and should wait here, so that a group can part, or be made. Each
        once: after that it is here for long, or was sent for want of patience."""
        found = []
        candidates = self.candidates(model)
        for seat in crowded(candidates, self._long_tokens(model)):
            there = self._table.at_target(_target(seat))
            waiting = [one for one in there if one.is_sent and not one.is_running and not one.was_recalled]
            short = [one for one in waiting if not is_long(candidates, one.num_tokens)]
            queued = sorted(short, key=lambda one: one.arrived)
            count = num_to_recall(seat, [one.num_tokens for one in queued])
            found += queued[len(queued) - count :]
        return found

    def send(self, flight: Flight, to: Candidate) -> None:
        """A new attempt at `to`, or at a member of it."""
        place = member_for(to, flight.num_tokens)
        self._table.assign(flight, _target(place))
        if flight.journey is not None:
            flight.journey.sent(_target(place), flight.attempt, flight.num_known_tokens, self._clock())
        self._outbox.submit(flight)

    def candidates(self, model: str, refused_by: frozenset[Target] = frozenset()) -> list[Candidate]:
        """Ready instances, with their load as far as it is known."""
        return Candidates(self._cluster, self._table, self._clock()).of(model, refused_by)

    def _candidates(self, flight: Flight) -> list[Candidate]:
        found = self.candidates(flight.model, flight.refused_by)
        if self._is_suspect(flight):
            return [one for one in found if not self._has_suspect(one)]
        return found

    def _reserved_tokens(self, flight: Flight) -> int:
        """For those that came before it."""
        waiting = self._table.for_room.of(flight.model)
        return max((one.num_tokens for one in waiting if one.arrived < flight.arrived), default=0)

    def _long_tokens(self, model: str) -> int:
        first = self._table.for_room.first(model)
        return first.num_tokens if first else 0

    @staticmethod
    def _is_behind(flight: Flight, first: Flight | None) -> bool:
        """First come, first served among those that wait for the same."""
        return first is not None and first is not flight and first.arrived <= flight.arrived

    def _has_suspect(self, candidate: Candidate) -> bool:
        places: Iterable[Candidate | Seat] = candidate.seats or [candidate]
        there = (flight for place in places for flight in self._table.at_target(_target(place)))
        return any(map(self._is_suspect, there))

    def _is_suspect(self, flight: Flight) -> bool:
        """It has its last chance after others that failed."""
        return 0 < self._last_strike == flight.strikes


def _target(place: Candidate | Seat) -> Target:
    return Target(place.instance, place.worker, place.epoch)

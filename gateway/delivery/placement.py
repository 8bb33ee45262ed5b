"""Puts flights where they run: what is known of the ready instances, the choice, the Submit.

Whoever is at a worker when a request kills it gets a strike, too. So a flight that has its last chance gets
it alone: no other with its last chance is at that place before this one has ended. Of all that suffered
together only the culprit then fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from bus.messages import InstanceCard, InstanceMetrics
from gateway.delivery.cluster import Cluster, Ready
from gateway.delivery.dispatch import (
    Behind,
    BelowFloor,
    Candidate,
    NoneFits,
    NoRoom,
    Parting,
    choose,
    is_long,
)
from gateway.delivery.inflight import Flight, InFlight, Place, Target
from gateway.delivery.outbox import Outbox
from gateway.delivery.precision import lowest
from gateway.errors import below_floor, too_long

# A request waits so long for a group to part, before it keeps it together.
PART_PATIENCE_S = 10.0


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

    def find(self, flight: Flight) -> Candidate | BelowFloor | NoRoom | None:
        """Where it should run; None while there is nowhere. Raises ApiError: 400 where no shape of the
        cluster holds it, 503 where it would not wait for its precision and has not begun."""
        candidates = self.candidates(flight.model, flight.refused_by)
        if self._is_suspect(flight):
            candidates = [one for one in candidates if not self._has_suspect(one)]
        found = choose(candidates, flight.num_tokens, flight.min_precision, self._reserved_tokens(flight))
        if isinstance(found, Behind):
            return None
        if isinstance(found, Parting):
            return None if self._clock() < flight.arrived + PART_PATIENCE_S else found.candidate
        if isinstance(found, NoneFits):
            limit = max(found.limit, self._cluster.longest_tokens(flight.model, self._clock()))
            if flight.num_tokens > limit:
                raise too_long(len(flight.prompt_token_ids), limit, flight.sampling.max_tokens)
            return NoRoom()
        if candidates and is_long(candidates, flight.num_tokens) and self._is_behind_another(flight):
            return NoRoom()
        if isinstance(found, BelowFloor) and not (flight.waits_for_precision or flight.was_admitted):
            raise below_floor(flight.model, flight.min_precision)
        return found

    def send(self, flight: Flight, to: Candidate) -> None:
        """A new attempt at `to`."""
        self._table.assign(flight, Target(to.instance, to.worker, to.epoch))
        self._outbox.submit(flight)

    def _reserved_tokens(self, flight: Flight) -> int:
        """For those that came before it."""
        waiting = self._table.waiting_for_room(flight.model)
        return max((one.num_tokens for one in waiting if one.arrived < flight.arrived), default=0)

    def _is_behind_another(self, flight: Flight) -> bool:
        """First come, first served among those that wait for a group."""
        return next(self._table.waiting_for_room(flight.model), flight) is not flight

    def _has_suspect(self, candidate: Candidate) -> bool:
        target = Target(candidate.instance, candidate.worker, candidate.epoch)
        return any(map(self._is_suspect, self._table.at_target(target)))

    def _is_suspect(self, flight: Flight) -> bool:
        """It has its last chance after others that failed."""
        return 0 < self._last_strike == flight.strikes

    def candidates(self, model: str, refused_by: frozenset[Target] = frozenset()) -> list[Candidate]:
        """Ready instances, with their load as far as it is known."""
        now = self._clock()
        return [self._candidate(ready, now, refused_by) for ready in self._cluster.ready(model)]

    def _candidate(self, ready: Ready, now: float, refused_by: frozenset[Target]) -> Candidate:
        """Of an instance of one worker; what belongs to groups is asked for only where there is one."""
        card = ready.card
        target = Target(card.id, ready.worker, ready.epoch)
        place = self._table.places.get(target, _NOBODY)
        metrics = self._cluster.instance_metrics(card.id, ready.epoch, now)
        of_shape = metrics if metrics and self._cluster.is_of_shape(ready, metrics) else None
        max_tokens = self._cluster.tokens_of(card, of_shape)
        alone = Candidate(
            instance=card.id,
            worker=ready.worker,
            epoch=ready.epoch,
            max_tokens=max_tokens,
            num_measured=metrics.running + metrics.waiting if metrics else None,
            num_own=len(place.flights),
            num_own_since=place.num_since,
            kv_usage=metrics.kv_usage if metrics else 0.0,
            precision=lowest(metrics.last.layers) if metrics else None,
            is_below=target in refused_by,
            low_tokens=max_tokens,
            free_tokens=_free_tokens(card, of_shape, place, max_tokens),
        )
        return alone if card.tp == 1 else self._as_group(alone, ready, place, now)

    def _as_group(self, leader: Candidate, ready: Ready, place: Place, now: float) -> Candidate:
        """With what its members have to do."""
        cluster, members = self._cluster, self._cluster.members(ready, now)
        usual_tokens = cluster.usual_tokens(ready, now)
        longest = max([place.longest_tokens, *(one.last.longest_tokens for one in members)])
        return replace(
            leader,
            num_measured=sum(one.running + one.waiting for one in members) if members else None,
            tp=ready.card.tp,
            low_tokens=usual_tokens,
            stays=longest > usual_tokens or not cluster.parts_groups,
            part_tokens=usual_tokens * (1 - cluster.free_share),
        )


_NOBODY = Place()


def _free_tokens(
    card: InstanceCard, metrics: InstanceMetrics | None, place: Place, max_tokens: int
) -> float | None:
    """Of KV, less the queue and what is on its way. Without metrics of this shape, less what this gateway has
    there."""
    if metrics is None:
        return max_tokens - place.num_tokens if card.tp in card.tokens_at else None
    last = metrics.last
    free_blocks = last.kv_blocks - last.kv_used
    return free_blocks * card.block_tokens - last.waiting_tokens - place.tokens_since

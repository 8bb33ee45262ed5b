"""Puts flights where they run: what is known of the ready instances, the choice, the Submit."""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.cluster import Cluster, Ready
from gateway.dispatch import Candidate, NoneFits, choose
from gateway.errors import too_long
from gateway.inflight import Flight, InFlight, Target
from gateway.outbox import Outbox


class Placement:
    """Chooses by `gateway.dispatch`; assigns in the table; submits through the outbox."""

    def __init__(
        self, cluster: Cluster, table: InFlight, outbox: Outbox, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster = cluster
        self._table = table
        self._outbox = outbox
        self._clock = clock

    def find(self, flight: Flight) -> Candidate | None:
        """Where it should run; None while there is nowhere. Raises ApiError 400 where it fits nowhere."""
        found = choose(self.candidates(flight.model), flight.num_tokens)
        if isinstance(found, NoneFits):
            raise too_long(len(flight.prompt_token_ids), found.limit, flight.sampling.max_tokens)
        return found

    def send(self, flight: Flight, to: Candidate) -> None:
        """A new attempt at `to`."""
        self._table.assign(flight, Target(to.instance, to.worker, to.epoch))
        self._outbox.submit(flight)

    def candidates(self, model: str) -> list[Candidate]:
        """Ready instances, with their load as far as it is known."""
        now = self._clock()
        return [self._candidate(ready, now) for ready in self._cluster.ready(model)]

    def _candidate(self, ready: Ready, now: float) -> Candidate:
        card = ready.card
        place = self._table.places.get(Target(card.id, ready.worker, ready.epoch))
        metrics = self._cluster.instance_metrics(card.id, ready.epoch, now)
        kv_tokens = metrics.kv_blocks * card.block_tokens if metrics else 0
        return Candidate(
            instance=card.id,
            worker=ready.worker,
            epoch=ready.epoch,
            max_tokens=min(card.max_model_len, kv_tokens or card.max_model_len),
            num_measured=metrics.running + metrics.waiting if metrics else None,
            num_own=len(place.flights) if place else 0,
            num_own_since=place.num_since if place else 0,
            kv_usage=metrics.kv_usage if metrics else 0.0,
        )

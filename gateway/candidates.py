"""Who can take a request of a model now, and what is known of their load."""

from __future__ import annotations

from gateway.cluster import Cluster, Ready
from gateway.dispatch import Candidate
from gateway.inflight import InFlight, Target


def candidates(cluster: Cluster, table: InFlight, model: str, now: float) -> list[Candidate]:
    return [_candidate(cluster, table, ready, now) for ready in cluster.ready(model)]


def _candidate(cluster: Cluster, table: InFlight, ready: Ready, now: float) -> Candidate:
    card = ready.card
    place = table.places.get(Target(card.id, ready.worker, ready.epoch))
    metrics = cluster.instance_metrics(card.id, ready.epoch, now)
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

"""What /admin/state shows: workers, instances, what the monitor measured, the policy, morphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from bus.messages import InstanceCard, InstanceTelemetry, WorkerCard, layers_below_full
from gateway.delivery.cluster import Cluster
from gateway.operations.deployed import deployment_json, model_json
from gateway.operations.transforms import layer_degrees
from gateway.state import Gateway

SHOWN_MORPHS: Final = 32


def picture(gateway: Gateway, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """metrics: to be shown instead of all that the monitor says."""
    cluster = gateway.cluster
    return {
        "workers": [_worker(gateway, card) for card in cluster.workers.values()],
        "instances": [_instance(gateway, worker, card) for worker, card in shown_instances(cluster)],
        "metrics": _metrics(gateway) if metrics is None else metrics,
        "policy": asdict(gateway.policy),
        "models": [model_json(card) for card in gateway.catalogue.models.values()],
        "deployments": [deployment_json(one, gateway) for one in gateway.catalogue.deployments.values()],
        "morphs": [entry.as_json() for entry in gateway.morphs.recent(SHOWN_MORPHS)],
        "gateway": _gateway(gateway),
    }


def shown_instances(cluster: Cluster) -> Iterator[tuple[WorkerCard, InstanceCard]]:
    """And members of a group that parts whose card was read before it: its leader's knows them no more."""
    yield from cluster.instances()
    for worker in cluster.workers.values():
        for card in worker.instances:
            leader = cluster.workers.get(card.workers[0]) if card.workers else None
            led = [one for one in leader.instances if one.model == card.model] if leader else []
            if led and worker is not leader and card.pp == 1 and worker.id not in led[0].workers:
                yield worker, card


def _worker(gateway: Gateway, card: WorkerCard) -> dict[str, Any]:
    """`pages` and `busy` are null without a fresh report: absent is not zero."""
    metrics = gateway.cluster.worker_metrics(card.id, card.epoch, time.monotonic())
    return {
        "id": card.id,
        "host": card.host,
        "pid": card.pid,
        "device": card.device,
        "epoch": card.epoch,
        "state": _state(gateway, card),
        "progress": card.progress,
        "page_bytes": card.page_bytes,
        "pages": asdict(metrics.pages) if metrics else None,
        "busy": metrics.busy if metrics else None,
    }


def _state(gateway: Gateway, card: WorkerCard) -> str:
    """As the card says; "unknown" while the registry cannot be read."""
    return card.state if gateway.bus.up else "unknown"


def _instance(gateway: Gateway, worker: WorkerCard, card: InstanceCard) -> dict[str, Any]:
    """Of a group the worker that leads tells of the shape and the KV, and each of its own requests."""
    metrics = gateway.cluster.instance_metrics(card.id, worker.epoch, time.monotonic())
    last = metrics.last if metrics else None
    layers = [asdict(layer) for layer in last.layers] if last else None
    members = _members(gateway, worker, card)
    return {
        "id": card.id,
        "model": card.model,
        "workers": card.workers or [worker.id],
        "tp": card.tp,
        "pp": card.pp,
        "stages": [asdict(stage) for stage in card.stages],
        "state": _state(gateway, worker),
        "changing": gateway.morphs.changing(worker.id, card.tp),
        "running": sum(one.running for one in members) if members else None,
        "waiting": sum(one.waiting for one in members) if members else None,
        "layers": layers,
        "kv": {
            "blocks": last.kv_blocks if last else None,
            "used": last.kv_used if last else None,
            "block_tokens": card.block_tokens,
        },
        "dtype": card.dtype,
        "max_model_len": card.max_model_len,
        "num_layers": card.num_layers,
        "layer_tp": layer_degrees(card, gateway.morphs.transform_of(worker.id)),
        "layers_below_full": layers_below_full(last.layers) if last else None,
        "variants": card.variants,
        "order": card.order,
        "order_name": card.order_name,
        "min_blocks": card.min_blocks,
        "max_blocks": card.max_blocks * card.tp,
        "layer_pages": card.layer_pages,
        "kv_heads": card.kv_heads,
        "degrees": card.degrees,
        "recomputed_tokens": sum(one.recomputed_tokens for one in members) if members else None,
        "tokens_at": card.tokens_at,
    }


def _members(gateway: Gateway, leader: WorkerCard, card: InstanceCard) -> list[InstanceTelemetry]:
    """What each worker of the instance reported last; [] where one did not: absent is not zero."""
    cluster, now = gateway.cluster, time.monotonic()
    found = []
    names = card.workers if card.pp == 1 else []  # a pipeline's leader has all the requests
    for name in names or [leader.id]:
        worker = cluster.workers.get(name)
        own = next((one for one in worker.instances if one.model == card.model), None) if worker else None
        metrics = cluster.instance_metrics(own.id, worker.epoch, now) if worker and own else None
        if metrics is None:
            return []
        found.append(metrics.last)
    return found


def _metrics(gateway: Gateway) -> dict[str, Any]:
    """The monitor's picture, with its age in seconds; {} before the first."""
    cluster = gateway.cluster
    if cluster.metrics is None:
        return {}
    return asdict(cluster.metrics) | {"age_seconds": time.monotonic() - cluster.metrics_at}


def _gateway(gateway: Gateway) -> dict[str, Any]:
    """`queued` counts all requests that no worker has begun, `unplaced` those of them that wait here and in
    no worker's queue."""
    return {
        "id": gateway.id,
        "is_draining": gateway.is_draining,
        "inflight": gateway.admission.inflight,
        "queued": gateway.admission.queued,
        "unplaced": len(gateway.delivery.table.waiting),
        "streams": len(gateway.streams),
        "models": gateway.cluster.known_models(),
    }

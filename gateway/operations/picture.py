"""The state that /admin/state and the dashboard show: workers, instances, metrics, policy, models, morphs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any, Final, NamedTuple

from bus.catalogue import Contents
from bus.deployments import Deployment, ModelCard, Profile
from bus.leader import LeaderView
from bus.messages import (
    InstanceCard,
    InstanceMetrics,
    InstanceTelemetry,
    LayerShape,
    Metrics,
    WorkerCard,
    layers_below_full,
)
from bus.morphs import progress_of
from gateway.delivery.cluster import Cluster, ReadyInstance
from gateway.morphs import MorphRecord
from gateway.operations.transforms import layer_degrees
from gateway.state import Gateway

SHOWN_MORPHS: Final = 32
# What an instance's card shows as it is, and what its workers report and is added up.
_CARD: Final = (
    *("id", "model", "tp", "pp", "dtype", "max_model_len", "num_layers", "variants", "order", "order_name"),
    *("min_blocks", "layer_pages", "attention_pages", "losses", "losses_assumed"),
    *("kv_heads", "degrees", "tokens_at", "products", "max_num_seqs", "max_num_batched_tokens", "max_tp"),
)
_COUNTS: Final = ("running", "waiting", "recomputed_tokens")
MEASURED: Final = [field.name for field in fields(InstanceMetrics) if field.name != "last"]
DIGITS: Final = 4


def picture(gateway: Gateway, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the state as JSON values. `metrics` are shown in the place of the monitor's."""
    cluster = gateway.cluster
    return {
        "workers": [_worker(gateway, card) for card in cluster.workers.values()],
        "instances": [_instance(gateway, worker, card) for worker, card in shown_instances(cluster)],
        "metrics": _metrics(cluster) if metrics is None else metrics,
        "policy": asdict(gateway.policy),
        "models": [model_json(card) for card in gateway.catalogue.models.values()],
        "deployments": [deployment_json(one, gateway) for one in gateway.catalogue.deployments.values()],
        "morphs": [record.as_json() for record in gateway.morphs.recent(SHOWN_MORPHS)],
        "controller": _leader(gateway.leader) | {"failure": gateway.controller_failures.last()},
        "gateway": {
            "id": gateway.id,
            "is_draining": gateway.is_draining,
            "inflight": gateway.admission.inflight,
            "queued": gateway.admission.queued,  # requests that no worker has begun
            "unplaced": len(gateway.delivery.table.waiting),  # queued requests in no worker's queue
            "streams": len(gateway.streams),
            "models": cluster.known_models(),
        },
    }


def _leader(leader: LeaderView) -> dict[str, Any]:
    """Return the controller that led last, and whether it leads: without its lease, which always changes."""
    return {"name": leader.name, "term": leader.term, "leads": leader.lease_ms > 0}


def shown_instances(cluster: Cluster) -> Iterator[tuple[WorkerCard, InstanceCard]]:
    """Yield the instances, and members of a group that has parted whose cards were read before it did."""
    yield from cluster.instances()
    for worker in cluster.workers.values():
        for card in worker.instances:
            leader = cluster.workers.get(card.workers[0]) if card.workers else None
            led = [one for one in leader.instances if one.model == card.model] if leader else []
            if led and worker is not leader and not card.is_divided and worker.id not in led[0].workers:
                yield worker, card


def _worker(gateway: Gateway, card: WorkerCard) -> dict[str, Any]:
    """Return one worker. `pages`, `busy` and `gpu` are null without a fresh report: absent is not zero."""
    metrics = gateway.cluster.worker_metrics(card.id, card.epoch, time.monotonic())
    names = ("id", "host", "pid", "device", "epoch", "progress", "page_bytes")
    return {name: getattr(card, name) for name in names} | {
        "state": _state(gateway, card),
        "pages": asdict(metrics.pages) if metrics else None,
        "busy": metrics.busy if metrics else None,
        "gpu": asdict(metrics.gpu) if metrics and metrics.gpu else None,
    }


def _state(gateway: Gateway, card: WorkerCard) -> str:
    """Return the card's state; "unknown" while the registry cannot be read."""
    return card.state if gateway.bus.up else "unknown"


def _instance(gateway: Gateway, worker: WorkerCard, card: InstanceCard) -> dict[str, Any]:
    """Return one instance. In a group the leader reports shape and KV, each worker its own requests."""
    metrics = gateway.cluster.instance_metrics(card.id, worker.epoch, time.monotonic())
    last = metrics.last if metrics else None
    blocks, used = (last.kv_blocks, last.kv_used) if last else (None, None)
    members = _members(gateway, worker, card)
    return {name: getattr(card, name) for name in _CARD} | {
        "workers": card.members(worker.id),
        "stages": [asdict(stage) for stage in card.stages],
        "state": _state(gateway, worker),
        "changing": gateway.morphs.changing(worker.id, card.tp),
        "layers": [asdict(layer) for layer in last.layers] if last else None,
        "kv": {
            "blocks": blocks,
            "used": used,
            "block_tokens": card.block_tokens,
            "precision": last.kv_precision if last else None,
            "loss": card.kv_loss,
        },
        "layer_tp": layer_degrees(card, gateway.morphs.transform_of(worker.id)),
        "layers_below_full": layers_below_full(last.layers) if last else None,
        "expert_use": last.expert_use if last else None,
        "max_blocks": card.most_blocks,
        "withheld": gateway.morphs.withheld(card.id),
        **{name: sum(getattr(one, name) for one in members) if members else None for name in _COUNTS},
    }


def _members(gateway: Gateway, leader: WorkerCard, card: InstanceCard) -> list[InstanceTelemetry]:
    """Return the last report of each worker of the instance; [] if one is missing: absent is not zero."""
    cluster, now = gateway.cluster, time.monotonic()
    found = []
    names = [] if card.is_divided else card.workers  # else the leader has all the requests
    for name in names or [leader.id]:
        worker = cluster.workers.get(name)
        own = next((one for one in worker.instances if one.model == card.model), None) if worker else None
        metrics = cluster.instance_metrics(own.id, worker.epoch, now) if worker and own else None
        if metrics is None:
            return []
        found.append(metrics.last)
    return found


def num_requests(gateway: Gateway, leader: WorkerCard, card: InstanceCard) -> float:
    """Return the requests of an instance; infinite without a fresh report: it is not idle."""
    members = _members(gateway, leader, card)
    return sum(one.running + one.waiting for one in members) if members else math.inf


def _metrics(cluster: Cluster) -> dict[str, Any]:
    if cluster.metrics is None:
        return {}
    shown = asdict(cluster.metrics) | {"age_seconds": time.monotonic() - cluster.metrics_at}
    for one in shown["instances"]:
        del one["last"]["prefix_digests"]  # hundreds of numbers for the choice of an instance alone
    return shown


def active_models(contents: Contents) -> set[str]:
    """Return the models that deployments serve or are to serve."""
    return {one.model for one in contents.deployments.values() if one.state not in ("retired", "failed")}


def awaited_models(contents: Contents) -> dict[str, str]:
    """Return the models that deployments serve or are to serve, with the progress of each."""
    awaited = ("waiting", "loading", "serving")
    return {one.model: _progress(one) for one in contents.deployments.values() if one.state in awaited}


def _progress(deployment: Deployment) -> str:
    if deployment.state == "serving":  # asked for only where no worker has the model
        return "no worker has it now"
    return f"{deployment.state}: {deployment.reason}" if deployment.reason else deployment.state


def model_json(card: ModelCard, profiles: list[Profile] | None = None) -> dict[str, Any]:
    shown = asdict(card)
    del shown["epoch"], shown["since_ms"]
    shown["since"] = card.since_ms / 1000
    return shown | ({} if profiles is None else {"profiles": [profile_json(one) for one in profiles]})


def profile_json(profile: Profile) -> dict[str, Any]:
    return {
        "device": profile.device,
        "version": profile.version,
        "samples": len(profile.latency) + len(profile.memory),
        "precisions": list(dict.fromkeys(one.configuration.precision for one in profile.latency)),
        "prompt_tokens": sorted({one.prompt_tokens for one in profile.latency}),
        "batch_sizes": sorted({one.batch_size for one in profile.latency}),
        "degrees": profile.degrees,
        "fixed_degrees": profile.fixed_degrees,
        "links": sorted({one.kind for one in profile.links}),
        "device_seconds": profile.device_seconds,
        "peak_bytes": profile.peak_bytes,
        "loss": profile.loss,
        "ended": profile.ended_ms / 1000,
    }


def deployment_json(deployment: Deployment, gateway: Gateway) -> dict[str, Any]:
    shown = asdict(deployment)
    del shown["epochs"], shown["since_ms"]
    return shown | {"since": deployment.since_ms / 1000, "kv": kv_json(deployment, gateway)}


def kv_json(deployment: Deployment, gateway: Gateway) -> dict[str, int] | None:
    """Return the size of a deployment's whole KV cache now; None without a fresh report of its shape."""
    if not deployment.instance:
        return None
    cluster, leader = gateway.cluster, deployment.stages[0].workers[0]
    found = next((one for one in cluster.instances() if one[1].id == deployment.instance), None)
    metrics = cluster.instance_metrics(deployment.instance, deployment.epochs[leader], time.monotonic())
    if found is None or metrics is None:
        return None
    worker, card = found
    profile = gateway.catalogue.profiles.get((deployment.model, worker.kind))
    is_whole = deployment.configuration is None or card.tp == deployment.configuration.tp
    is_reported = is_whole and cluster.is_of_shape(ReadyInstance(card, worker.id, worker.epoch), metrics)
    if profile is None or not is_reported:
        return None
    blocks, ranks = metrics.last.kv_blocks, card.tp if card.is_divided else 1
    block_bytes = ranks * profile.rank_block_bytes(ranks, metrics.last.kv_precision) * profile.num_layers
    return {"blocks": blocks, "tokens": blocks * profile.block_tokens, "bytes": blocks * block_bytes}


def live_state(gateway: Gateway) -> dict[str, Any]:
    """Return what the dashboard draws: a short `picture`, pages of workers, progress of morphs."""
    state = picture(gateway, metrics=_smoothed(gateway.cluster.metrics))
    for worker in state["workers"]:
        card = gateway.cluster.workers[worker["id"]]
        worker["busy"] = _short(worker["busy"])
        worker["gpu"] = _short_gpu(worker["gpu"])
        worker["ranges"] = ranges(gateway, card, worker["pages"])
    state["morphs"] = [_morph(record) for record in gateway.morphs.recent(SHOWN_MORPHS)]
    return state


def _smoothed(metrics: Metrics | None) -> dict[str, Any]:
    if metrics is None:
        return {"instances": []}
    instances = [{name: _short(getattr(one, name)) for name in MEASURED} for one in metrics.instances]
    return {"at_ms": metrics.at_ms, "instances": instances}


def _short(value: Any) -> Any:
    return round(value, DIGITS) if isinstance(value, float) else value


def _short_gpu(gpu: dict[str, Any] | None) -> dict[str, Any] | None:
    if gpu is None:
        return None
    return {
        name: {key: _short(one) for key, one in value.items()} if isinstance(value, dict) else _short(value)
        for name, value in gpu.items()
    }


def _morph(record: MorphRecord) -> dict[str, Any]:
    """Return a morph, while it runs with `progress`: 0 to 1, null if its worker does not report it."""
    progress = {"progress": _short(progress_of(record.kind, record.numbers))} if record.is_running else {}
    return record.as_json() | progress


class _Held(NamedTuple):
    """Layers [first, end) of an instance, on a worker. `epoch`: of the leader, which reports them."""

    card: InstanceCard
    epoch: int
    first: int
    end: int


def ranges(gateway: Gateway, worker: WorkerCard, pages: dict[str, int] | None) -> list[dict[str, Any]]:
    """Return what lies in a worker's pages, KV divided by blocks times layers; [] without a report."""
    now = time.monotonic()
    held = _held(gateway, worker)
    metrics = [(one, gateway.cluster.instance_metrics(one.card.id, one.epoch, now)) for one in held]
    known = [(one, found.last) for one, found in metrics if found is not None]
    if pages is None or len(known) < len(held):
        return []
    transform = gateway.morphs.transform_of(worker.id)
    num_blocks = sum(last.kv_blocks * (one.end - one.first) for one, last in known)
    found: list[dict[str, Any]] = []
    for one, last in known:
        found += _weights(one, last.layers, layer_degrees(one.card, transform))
        blocks = last.kv_blocks * (one.end - one.first)
        kv_pages = pages["kv"] * blocks // num_blocks if num_blocks else 0
        kv = {"owner": one.card.id, "kind": "kv", "layer": None, "part": "", "precision": "full"}
        found.append(kv | {"pages": kv_pages})
    return found


def _held(gateway: Gateway, worker: WorkerCard) -> list[_Held]:
    whole = [_Held(card, worker.epoch, 0, card.num_layers) for card in worker.instances if not card.stages]
    return whole + [
        _Held(card, leader.epoch, stage.first, stage.end)
        for leader in gateway.cluster.workers.values()
        for card in leader.instances
        for stage in card.stages
        if worker.id in stage.workers
    ]


def _weights(one: _Held, layers: list[LayerShape], degrees: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the pages of layers. The members of a group share the rows of the FFN."""
    card = one.card
    for number in range(one.first, min(one.end, len(layers))):
        for part, precision in (("attention", layers[number].attention), ("ffn", layers[number].ffn)):
            attention = card.attention_pages.get(precision, 0)
            pages = attention if part == "attention" else card.layer_pages.get(precision, 0) - attention
            is_shared = part == "ffn" and not card.stages
            kept = -(-pages // degrees[number]) if is_shared else pages
            about = {"owner": card.id, "kind": "weights", "layer": number, "part": part}
            yield about | {"precision": precision, "pages": kept}

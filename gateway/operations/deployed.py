"""What is registered and deployed, as /admin shows it."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from bus.catalogue import Contents
from bus.deployments import Deployment, ModelCard, Profile
from gateway.delivery.cluster import ReadyInstance
from gateway.state import Gateway


def active_models(contents: Contents) -> set[str]:
    """That are served by a deployment, or are to be."""
    return {one.model for one in contents.deployments.values() if one.state not in ("retired", "failed")}


def awaited_models(contents: Contents) -> dict[str, str]:
    """Those that are not served yet, and how far they are."""
    return {
        one.model: f"{one.state}: {one.reason}" if one.reason else one.state
        for one in contents.deployments.values()
        if one.state in ("waiting", "loading")
    }


def model_json(card: ModelCard, profiles: list[Profile] | None = None) -> dict[str, Any]:
    shown = asdict(card)
    del shown["epoch"], shown["since_ms"]
    told = {"since": card.since_ms / 1000}
    return shown | told | ({} if profiles is None else {"profiles": [profile_json(one) for one in profiles]})


def profile_json(profile: Profile) -> dict[str, Any]:
    return {
        "device": profile.device,
        "version": profile.version,
        "samples": len(profile.latency) + len(profile.memory),
        "precisions": list(dict.fromkeys(one.configuration.precision for one in profile.latency)),
        "prompt_tokens": sorted({one.prompt_tokens for one in profile.latency}),
        "batch_sizes": sorted({one.batch_size for one in profile.latency}),
        "degrees": profile.degrees,
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
    """The KV cache that it has by now, of all its workers together: its share of their pages, and no less
    than its intent's requests need. None where nothing serves it or no fresh report of its shape tells."""
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
    is_told = is_whole and cluster.is_of_shape(ReadyInstance(card, worker.id, worker.epoch), metrics)
    if profile is None or not is_told:
        return None
    blocks = metrics.last.kv_blocks
    block_bytes = profile.block_bytes_per_layer * profile.num_layers
    return {"blocks": blocks, "tokens": blocks * profile.block_tokens, "bytes": blocks * block_bytes}

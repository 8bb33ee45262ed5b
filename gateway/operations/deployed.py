"""What is registered and deployed, as /admin shows it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bus.catalogue import Contents
from bus.deployments import Deployment, ModelCard, Profile


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
        "device_seconds": profile.device_seconds,
        "peak_bytes": profile.peak_bytes,
        "loss": profile.loss,
        "ended": profile.ended_ms / 1000,
    }


def deployment_json(deployment: Deployment) -> dict[str, Any]:
    shown = asdict(deployment)
    del shown["epochs"], shown["since_ms"]
    return shown | {"since": deployment.since_ms / 1000}

"""What the last metrics tell of memory: what is free on each worker, and what every instance holds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil

from bus.catalogue import Contents
from bus.deployments import Deployment
from bus.messages import InstanceMetrics, Metrics, Stage
from controller.deployments.observation import WorkerView
from controller.deployments.transitions import deployment_of, instance_at, shown_by
from controller.planning.making_room import Tenant


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """`free_bytes`: of each worker, idle KV of others among them. `held`: instances of which it has
    something, later stages of pipelines too, which no card shows."""

    free_bytes: dict[str, int]
    tenants: list[Tenant]
    held: dict[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """Pages of KV of an instance on a worker; of these those that it needs."""

    instance: str
    deployment: str
    kv_pages: float
    kept_pages: float


def room_of(metrics: Metrics | None, devices: Iterable[WorkerView], contents: Contents) -> FreeMemory:
    """Workers without a report of their epoch have no room."""
    told = {(one.worker, one.id, one.epoch): one for one in metrics.instances} if metrics else {}
    hidden = _hidden(contents.deployments.values())
    room = FreeMemory({}, [])
    for device in devices:
        worker = device.card.id
        later = [_later(*one, device, contents, told) for one in hidden[worker]]
        shown = list(_shown(device, told, sum(one.kv_pages for one in later)))
        room.held[worker] = frozenset(one.instance for one in (*shown, *later))
        if device.pages is None:
            continue
        idle_pages = sum(max(0.0, one.kv_pages - one.kept_pages) for one in shown)
        room.free_bytes[worker] = (device.pages.free + int(idle_pages)) * device.card.page_bytes
        room.tenants.extend(_tenants([*shown, *later], device))
    return room


def _hidden(deployments: Iterable[Deployment]) -> Mapping[str, list[tuple[Deployment, Stage]]]:
    """By worker, the stages that no card tells of."""
    found: dict[str, list[tuple[Deployment, Stage]]] = defaultdict(list)
    for one in deployments:
        for stage in one.stages:
            for worker in set(stage.workers) - set(shown_by(one)):
                found[worker].append((one, stage))
    return found


Told = Mapping[tuple[str, str, int], InstanceMetrics]


def _later(
    deployment: Deployment, stage: Stage, device: WorkerView, contents: Contents, told: Told
) -> _Holding:
    """It has as many blocks as its leader."""
    lead = shown_by(deployment)[0]
    leading = told.get((lead, instance_at(deployment, lead), deployment.epochs.get(lead, 0)))
    profile = contents.profiles.get((deployment.model, device.kind))
    pages = 0
    if leading is not None and profile is not None:
        layer_bytes = leading.last.kv_blocks * profile.block_bytes_per_layer / len(stage.workers)
        pages = (stage.end - stage.first) * ceil(layer_bytes / device.card.page_bytes)
    return _Holding(
        instance=instance_at(deployment, device.card.id),
        deployment=deployment.id,
        kv_pages=pages,
        kept_pages=pages,
    )


def _shown(device: WorkerView, told: Told, later_pages: float) -> Iterator[_Holding]:
    """They share the pages of the KV as they share the blocks."""
    worker = device.card
    lasts = {
        card.id: one.last
        for card in worker.instances
        if (one := told.get((worker.id, card.id, worker.epoch)))
    }
    kv_pages = max(0.0, device.pages.kv - later_pages) if device.pages else 0.0
    pages_per_block = kv_pages / (sum(last.kv_blocks for last in lasts.values()) or 1)
    for card in worker.instances:
        last = lasts.get(card.id)
        blocks = last.kv_blocks if last else 0
        kept = min(blocks, max(card.min_blocks, last.kv_used)) if last else 0
        yield _Holding(
            instance=card.id,
            deployment=deployment_of(card.deployed),
            kv_pages=blocks * pages_per_block,
            kept_pages=kept * pages_per_block,
        )


def _tenants(holdings: list[_Holding], device: WorkerView) -> Iterator[Tenant]:
    """Each is taken to hold an equal part of the weights. Idle KV counts as free already."""
    assert device.pages is not None
    page_bytes = device.card.page_bytes
    for one in holdings:
        kept_bytes = int(one.kept_pages * page_bytes)
        yield Tenant(
            instance=one.instance,
            deployment=one.deployment,
            workers=(device.card.id,),
            weight_bytes=device.pages.weights * page_bytes // len(holdings),
            kv_bytes=kept_bytes,
            kv_kept_bytes=kept_bytes,
            load=device.load,
        )

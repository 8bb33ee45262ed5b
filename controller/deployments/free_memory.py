"""Memory by the last metrics: what is free on each worker, and what every instance holds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from bus.catalogue import Contents
from bus.deployments import Deployment
from bus.messages import InstanceMetrics, Metrics, Stage
from bus.pages import kv_pages_per_layer
from controller.deployments.observation import WorkerView
from controller.deployments.transitions import deployment_of
from controller.planning.making_room import Tenant


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Memory by worker: `free_bytes` with idle KV; `held` with later stages, which no card shows.

    `ranks` are the instances there that compute each layer together with other workers, or will.
    """

    free_bytes: dict[str, int]
    tenants: list[Tenant]
    held: dict[str, frozenset[str]] = field(default_factory=dict)
    ranks: dict[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Holding:
    """The pages of KV of an instance on a worker, and those of them that it needs."""

    instance: str
    deployment: str
    kv_pages: float
    kept_pages: float


Seen = Mapping[tuple[str, str, int], InstanceMetrics]  # metrics by worker, instance and epoch


def free_memory(metrics: Metrics | None, devices: Iterable[WorkerView], contents: Contents) -> FreeMemory:
    """Return what is free and held; workers without a report of their epoch have nothing free."""
    seen = {(one.worker, one.id, one.epoch): one for one in metrics.instances} if metrics else {}
    hidden: dict[str, list[tuple[Deployment, Stage]]] = defaultdict(list)  # stages that no card shows
    ranks: dict[str, set[str]] = defaultdict(set)
    for one in contents.deployments.values():
        for stage in one.stages:
            for name in stage.workers:
                if name not in one.shown_by:
                    hidden[name].append((one, stage))
                if len(stage.workers) > 1:
                    ranks[name].add(one.instance_at(name))
    memory = FreeMemory({}, [])
    for device in devices:
        worker = device.card.id
        later = [_later(*one, device, contents, seen) for one in hidden[worker]]
        shown = list(_shown(device, seen, sum(one.kv_pages for one in later)))
        memory.held[worker] = frozenset(one.instance for one in (*shown, *later))
        groups = {card.id for card in device.card.instances if card.tp > 1}
        memory.ranks[worker] = frozenset(groups | ranks[worker])
        if device.pages is not None:
            idle_pages = sum(max(0.0, one.kv_pages - one.kept_pages) for one in shown)
            memory.free_bytes[worker] = (device.pages.free + int(idle_pages)) * device.card.page_bytes
            memory.tenants.extend(_tenants([*shown, *later], device))
    return memory


def _later(
    deployment: Deployment, stage: Stage, device: WorkerView, contents: Contents, seen: Seen
) -> _Holding:
    """Return what a rank or a later stage holds that no card shows: as many blocks as its leader."""
    lead = deployment.shown_by[0]
    leading = seen.get((lead, deployment.instance_at(lead), deployment.epochs.get(lead, 0)))
    profile = contents.profiles.get((deployment.model, device.kind))
    pages = 0
    if leading is not None and profile is not None:
        told = leading.last
        block_bytes = profile.rank_block_bytes(len(stage.workers), told.kv_precision)
        of_layer = kv_pages_per_layer(told.kv_blocks, block_bytes, device.card.page_bytes)
        pages = (stage.end - stage.first) * of_layer
    return _Holding(deployment.instance_at(device.card.id), deployment.id, pages, pages)


def _shown(device: WorkerView, seen: Seen, later_pages: float) -> Iterator[_Holding]:
    """Yield what instances on the card hold: they share the pages of the KV as they share the blocks."""
    worker = device.card
    found = {card.id: seen.get((worker.id, card.id, worker.epoch)) for card in worker.instances}
    kv_pages = max(0.0, device.pages.kv - later_pages) if device.pages else 0.0
    pages_per_block = kv_pages / (sum(one.last.kv_blocks for one in found.values() if one) or 1)
    for card in worker.instances:
        one = found[card.id]
        blocks = one.last.kv_blocks if one else 0
        kept = min(blocks, max(card.min_blocks, one.last.kv_used)) if one else 0
        owner = deployment_of(card.deployed)
        yield _Holding(card.id, owner, kv_pages=blocks * pages_per_block, kept_pages=kept * pages_per_block)


def _tenants(holdings: list[_Holding], device: WorkerView) -> Iterator[Tenant]:
    """Yield each holding as a tenant with an equal part of the weights; idle KV counts as free already."""
    assert device.pages is not None
    page_bytes = device.card.page_bytes
    for one in holdings:
        yield Tenant(
            instance=one.instance,
            deployment=one.deployment,
            workers=(device.card.id,),
            weight_bytes=device.pages.weights * page_bytes // len(holdings),
            kv_bytes=int(one.kept_pages * page_bytes),
            load=device.load,
        )

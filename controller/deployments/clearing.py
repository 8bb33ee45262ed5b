"""Instances of deployments that are not to be served there any more. Pure.

Retiring is ordered again, after a growing pause, until the worker is clear (`retries`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Deployment
from bus.messages import InstanceCard, WorkerCard
from bus.morphs import CancelMorph, Cause, Retire
from controller.deployments.observation import UNHEARD_MS, Observation, WorkerView
from controller.deployments.retries import next_try, overdue, reports_of
from controller.deployments.transitions import (
    ORDERED,
    Command,
    Transition,
    because,
    becomes,
    deployment_of,
    transform,
)

PART_WAIT_S = 30.0
KEPT = 32  # deployments that ended are remembered


def next_of_clearing(deployment: Deployment, seen: Observation) -> Transition | None:
    """Clear a deployment that waits, failed or retires and still has stages."""
    if not seen.is_settled:
        return None
    unclear = [
        device
        for worker, epoch in deployment.epochs.items()
        if (device := seen.holder(worker, epoch)) and not _is_clear(deployment, device, seen)
    ]
    if not unclear:
        record = replace(deployment, stages=[], epochs={})
        is_retiring = record.state == "retiring"
        return becomes(record, "retired", seen.now_ms, "") if is_retiring else Transition(record=record)
    late = overdue(deployment, unclear, seen)
    commands = tuple(one for device in unclear for one in _commands(deployment, device, seen))
    if not commands:
        return late
    return because(replace(late or Transition(), commands=commands), deployment, *_cause_of(deployment))


def _cause_of(deployment: Deployment) -> tuple[Cause, str]:
    if deployment.state != "retiring":
        return "undone", f"what is left of it goes: {deployment.reason}"
    if deployment.heir:
        return "replaced", f"{deployment.heir} serves in its place"
    is_given_up = deployment.replaces and deployment.reason != ORDERED
    return "undone" if is_given_up else "retirement", deployment.reason


def _is_clear(deployment: Deployment, device: WorkerView, seen: Observation) -> bool:
    if device.card.state == "draining":
        return True  # the pipeline takes all with it
    if device.instance(deployment.instance_at(device.card.id)) is not None:
        return False
    return not (_may_load(deployment, device, seen) or _gives_back(deployment, device, seen))


def _gives_back(deployment: Deployment, device: WorkerView, seen: Observation) -> bool:
    """Return True while a Retire runs (the card goes first); a try that ended in conflict says nothing."""
    reports = reports_of(f"{deployment.deploy_id(device.card.id)}-retire", seen)
    return [one.state for one in reports if one.state != "conflict"][-1:] == ["running"]


def _may_load(deployment: Deployment, device: WorkerView, seen: Observation) -> bool:
    """Return True if the Deploy may still run; a slow worker finds the cancellation behind the order."""
    command_id = deployment.deploy_id(device.card.id)
    report = seen.reports.get(command_id)
    if report is not None:
        return report.state == "running"
    is_fresh = seen.now_ms - seen.sent.get(command_id, deployment.since_ms) <= UNHEARD_MS
    return is_fresh or not seen.is_known(f"{command_id}-cancel-0")


def _commands(deployment: Deployment, device: WorkerView, seen: Observation) -> Iterator[tuple[str, Command]]:
    worker = device.card
    card = device.instance(deployment.instance_at(worker.id))
    base = deployment.deploy_id(worker.id)
    if card is not None:
        yield from _away(card, worker, base, seen)
    elif _gives_back(deployment, device, seen):
        if command_id := next_try(f"{base}-retire", seen):
            instance = deployment.instance_at(worker.id)
            yield worker.id, Retire(id=command_id, epoch=worker.epoch, instance=instance)
    elif command_id := next_try(f"{base}-cancel", seen):
        yield worker.id, CancelMorph(id=command_id, epoch=worker.epoch, morph_id=base)


def _away(
    card: InstanceCard, worker: WorkerCard, base: str, seen: Observation
) -> Iterator[tuple[str, Command]]:
    """Retire an instance: a group parts first, the leader of a pipeline gives up all stages."""
    if card.tp > 1 and not card.is_divided:
        if card.workers[:1] == [worker.id] and (command_id := next_try(f"{base}-apart", seen)):
            epochs = {name: one.card.epoch for name, one in seen.workers.items()}
            if all(name in epochs for name in card.workers):
                yield transform(command_id, card.model, card.workers, epochs, 1, PART_WAIT_S)
    elif command_id := next_try(f"{base}-retire", seen):
        yield worker.id, Retire(id=command_id, epoch=worker.epoch, instance=card.id)


def orphans(contents: Contents, seen: Observation) -> Iterator[Transition]:
    """Retire instances whose deployments are elsewhere; `adopting` takes up those that no record knows."""
    for device in seen.workers.values() if seen.is_settled else ():
        worker = device.card
        for card in worker.instances if worker.state == "serving" else ():
            owner = contents.deployments.get(deployment_of(card.deployed))
            if owner is None or owner.epochs.get(worker.id) == worker.epoch:
                continue
            if commands := tuple(_away(card, worker, f"{card.deployed}-{worker.epoch}", seen)):
                why = f"{worker.id} brought back what it had of it"
                yield because(Transition(commands=commands), owner, "orphan", why)


def forgotten(contents: Contents) -> Iterator[Transition]:
    """Erase the oldest deployments that ended."""
    by_age = sorted(contents.deployments.values(), key=lambda one: one.since_ms)
    ended = [one for one in by_age if one.state in ("retired", "failed") and not one.stages]
    for deployment in ended[: max(0, len(ended) - KEPT)]:
        yield Transition(erased=deployment)

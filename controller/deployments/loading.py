"""A deployment's way from its orders to serving, and back when a worker is gone. Pure.

A loss is one attempt; a deployment that served for a while begins to count anew. What an attempt leaves on
live workers is given up (`clearing`) before the next one.
"""

from __future__ import annotations

from dataclasses import replace

from bus.deployments import Deployment
from controller.deployments.observation import Observation
from controller.deployments.retries import next_try
from controller.deployments.transitions import (
    MAX_ATTEMPTS,
    Transition,
    because,
    becomes,
    degree_by_transform,
    deploy_id,
    instance_at,
    noted,
    shown_by,
    transform,
    transform_id,
    workers_of,
)

LOAD_LIMIT_MS = 900_000
STABLE_MS = 60_000  # a deployment that served so long was no failed attempt


def next_of_loading(deployment: Deployment, seen: Observation) -> Transition | None:
    """Return what becomes of a loading deployment: serving, another attempt, or news."""
    if why := _why_not_loaded(deployment, seen):
        return failed_attempt(deployment, why, seen.now_ms)
    shown = [_shown(deployment, worker, seen) for worker in shown_by(deployment)]
    if all(shown):
        return _loaded(deployment, seen)
    waited_for = [worker for worker, there in zip(shown_by(deployment), shown, strict=True) if not there]
    steps = [f"{worker}: {_progress(deployment, worker, seen)}" for worker in waited_for]
    return noted(deployment, "; ".join(steps))


def _why_not_loaded(deployment: Deployment, seen: Observation) -> str:
    if seen.is_settled and (gone := seen.gone(deployment.epochs)):
        return f"{gone} while it loaded {deployment.model}"
    ids = {worker: deploy_id(deployment, worker) for worker in deployment.epochs}
    for worker, command_id in ids.items():
        report = seen.reports.get(command_id)
        if report is not None and report.state not in ("running", "applied"):
            return f"{worker}: {report.state}: {report.reason}"
        if not _shown(deployment, worker, seen) and seen.is_unheard(command_id, deployment.since_ms):
            return f"{worker} did not take the order to load {deployment.model}"
    if seen.now_ms - deployment.since_ms > LOAD_LIMIT_MS:
        return f"not loaded within {LOAD_LIMIT_MS // 60_000} minutes"
    return ""


def _shown(deployment: Deployment, worker: str, seen: Observation) -> bool:
    device = seen.holder(worker, deployment.epochs[worker])
    return device is not None and device.instance(instance_at(deployment, worker)) is not None


def _progress(deployment: Deployment, worker: str, seen: Observation) -> str:
    report = seen.reports.get(deploy_id(deployment, worker))
    return (report.reason if report else "") or "loads it"


def _loaded(deployment: Deployment, seen: Observation) -> Transition | None:
    """Serve, or first make a group of the workers that have loaded it."""
    leader = workers_of(deployment)[0]
    tp = degree_by_transform(deployment)
    card = seen.workers[leader].instance(instance_at(deployment, leader))
    assert card is not None
    if tp > 1 and tp not in card.degrees:
        degrees = ", ".join(map(str, card.degrees))
        why = f"{leader} forms no group of degree {tp}; {deployment.model} can be at {degrees}"
        return failed_attempt(replace(deployment, is_ungrouped=True), why, seen.now_ms)
    if tp > 1 and card.tp != tp:
        return _grouping(deployment, tp, seen)
    record = replace(deployment, instance=instance_at(deployment, leader))
    return becomes(record, "serving", seen.now_ms, "")


def _grouping(deployment: Deployment, tp: int, seen: Observation) -> Transition | None:
    command_id = transform_id(deployment, "up")
    report = seen.reports.get(command_id)
    if report is not None and report.state not in ("running", "applied"):
        why = f"no group of {', '.join(workers_of(deployment))}: {report.state}: {report.reason}"
        return failed_attempt(replace(deployment, is_ungrouped=True), why, seen.now_ms)
    if seen.is_known(command_id):
        if seen.is_unheard(command_id, seen.sent.get(command_id, deployment.since_ms)):
            why = f"{workers_of(deployment)[0]} did not take the order to lead a group"
            return failed_attempt(deployment, why, seen.now_ms)
        return None
    command = transform(command_id, deployment.model, workers_of(deployment), deployment.epochs, tp)
    record = replace(deployment, reason=f"loaded; becomes one instance of degree {tp}")
    return because(Transition(record=record, commands=(command,)), deployment, "deployment", record.reason)


def _together_again(deployment: Deployment, seen: Observation) -> Transition | None:
    """Make a group anew whose members are all there and alone again."""
    tp, leader = degree_by_transform(deployment), workers_of(deployment)[0]
    card = seen.workers[leader].instance(instance_at(deployment, leader))
    if tp == 1 or card is None or card.tp != 1 or not seen.may_change:
        return None
    command_id = next_try(f"{transform_id(deployment, 'up')}-again", seen)
    if command_id is None:
        return None
    command = transform(command_id, deployment.model, workers_of(deployment), deployment.epochs, tp)
    why = f"its workers are alone again, to be one instance of degree {tp}"
    return because(Transition(commands=(command,)), deployment, "deployment", why)


def failed_attempt(deployment: Deployment, why: str, now_ms: int) -> Transition:
    """Return to waiting, or give up after MAX_ATTEMPTS."""
    if deployment.attempts < MAX_ATTEMPTS:
        return becomes(deployment, "waiting", now_ms, f"{why}; it is tried again")
    return becomes(deployment, "failed", now_ms, f"given up after {deployment.attempts} attempts: {why}")


def next_of_serving(deployment: Deployment, seen: Observation) -> Transition | None:
    """Return what becomes of a serving deployment that lost a worker, or its group."""
    if not seen.is_settled:
        return None
    why = seen.gone(deployment.epochs)
    lacking = [worker for worker in shown_by(deployment) if not _shown(deployment, worker, seen)]
    if not why and lacking:
        why = f"{lacking[0]} does not have {deployment.model} any more"
    if not why:
        return _together_again(deployment, seen)
    served_long = seen.now_ms - deployment.since_ms >= STABLE_MS
    return failed_attempt(replace(deployment, attempts=0) if served_long else deployment, why, seen.now_ms)

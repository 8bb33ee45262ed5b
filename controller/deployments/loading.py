"""A deployment's way from its orders to serving, and back when a worker is gone. Pure."""

from __future__ import annotations

from dataclasses import replace

from bus.deployments import Deployment
from controller.deployments.observation import Observation
from controller.deployments.retries import next_try
from controller.deployments.transitions import MAX_ATTEMPTS, Transition, because, becomes, noted, transform

LOAD_LIMIT_MS = 900_000
STABLE_MS = 60_000  # a deployment that served so long was no failed attempt


def next_of_loading(deployment: Deployment, seen: Observation) -> Transition | None:
    """Return what becomes of a loading deployment: serving, another attempt, or news."""
    if why := _why_not_loaded(deployment, seen):
        return failed_attempt(deployment, why, seen.now_ms)
    waited_for = [worker for worker in deployment.shown_by if not _shown(deployment, worker, seen)]
    if not waited_for:
        return _loaded(deployment, seen)
    steps = [f"{worker}: {_progress(deployment, worker, seen)}" for worker in waited_for]
    return noted(deployment, "; ".join(steps))


def _why_not_loaded(deployment: Deployment, seen: Observation) -> str:
    if seen.is_settled and (gone := seen.gone(deployment.epochs)):
        return f"{gone} while it loaded {deployment.model}"
    for worker in deployment.epochs:
        command_id = deployment.deploy_id(worker)
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
    return device is not None and device.instance(deployment.instance_at(worker)) is not None


def _progress(deployment: Deployment, worker: str, seen: Observation) -> str:
    report = seen.reports.get(deployment.deploy_id(worker))
    return (report.reason if report else "") or "loads it"


def _loaded(deployment: Deployment, seen: Observation) -> Transition | None:
    """Serve, or first make a group of the workers that have loaded it."""
    leader = deployment.workers[0]
    tp = deployment.degree_by_transform
    card = seen.workers[leader].instance(deployment.instance_at(leader))
    assert card is not None
    if tp > 1 and tp not in card.degrees:
        degrees = ", ".join(map(str, card.degrees))
        why = f"{leader} forms no group of degree {tp}; {deployment.model} can be at {degrees}"
        return failed_attempt(replace(deployment, is_ungrouped=True), why, seen.now_ms)
    if tp > 1 and card.tp != tp:
        return _grouping(deployment, tp, seen)
    record = replace(deployment, instance=deployment.instance_at(leader))
    return becomes(record, "serving", seen.now_ms, "")


def _grouping(deployment: Deployment, tp: int, seen: Observation) -> Transition | None:
    command_id = deployment.transform_id
    report = seen.reports.get(command_id)
    if report is not None and report.state not in ("running", "applied"):
        why = f"no group of {', '.join(deployment.workers)}: {report.state}: {report.reason}"
        return failed_attempt(replace(deployment, is_ungrouped=True), why, seen.now_ms)
    if seen.is_known(command_id):
        if seen.is_unheard(command_id, seen.sent.get(command_id, deployment.since_ms)):
            why = f"{deployment.workers[0]} did not take the order to lead a group"
            return failed_attempt(deployment, why, seen.now_ms)
        return None
    command = transform(command_id, deployment.model, deployment.workers, deployment.epochs, tp)
    record = replace(deployment, reason=f"loaded; becomes one instance of degree {tp}")
    return because(Transition(record=record, commands=(command,)), deployment, "deployment", record.reason)


def _together_again(deployment: Deployment, seen: Observation) -> Transition | None:
    """Make a group anew whose members are all there and alone again."""
    tp, leader = deployment.degree_by_transform, deployment.workers[0]
    card = seen.workers[leader].instance(deployment.instance_at(leader))
    if tp == 1 or card is None or card.tp != 1 or not seen.may_change:
        return None
    command_id = next_try(f"{deployment.transform_id}-again", seen)
    if command_id is None:
        return None
    command = transform(command_id, deployment.model, deployment.workers, deployment.epochs, tp)
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
    lacking = [worker for worker in deployment.shown_by if not _shown(deployment, worker, seen)]
    if not why and lacking:
        why = f"{lacking[0]} does not have {deployment.model} any more"
    if not why:
        return _together_again(deployment, seen)
    served_long = seen.now_ms - deployment.since_ms >= STABLE_MS
    return failed_attempt(replace(deployment, attempts=0) if served_long else deployment, why, seen.now_ms)

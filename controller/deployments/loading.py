"""A deployment's way to serving: waiting, loading, serving, and back when what it stood on is gone. Pure.

A loss is one attempt; what served for a while begins to count anew. What an attempt leaves on live workers is
given up (`controller.deployments.clearing`) before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Estimate, Intent, ModelCard, Profile, Stage
from controller.deployments.clearing import next_try
from controller.deployments.decisions import (
    MAX_ATTEMPTS,
    Decision,
    becomes,
    deploy_id,
    deploys,
    instance_at,
    noted,
    shown_by,
    transform,
    transform_id,
    workers_of,
)
from controller.deployments.picture import Device, Picture
from controller.deployments.profiling import profiles_of

LOAD_LIMIT_MS = 900_000
STABLE_MS = 60_000  # what served so long was no failed attempt
FIRST_PAUSE_MS = 1_000  # before the second attempt; doubles


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The first feasible configuration of the intent's order, and where it goes."""

    estimate: Estimate
    stages: list[Stage]
    blocks: int = 0
    current: Estimate | None = None  # of the question's `current`, from the same profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """`is_final`: no change of these workers' load would help."""

    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a planner decides on. `devices`: those it may use. `may_group`: by tensor parallelism. `current`:
    how it is served already. `gone`: instances whose memory counts as free."""

    card: ModelCard
    intent: Intent
    profiles: dict[str, Profile]
    devices: list[Device]
    may_group: bool = True
    current: Configuration | None = None
    gone: frozenset[str] = frozenset()


Planner = Callable[[Question], Chosen | Refused]


def next_of_waiting(
    deployment: Deployment, contents: Contents, picture: Picture, plan: Planner
) -> Decision | None:
    """Its stages are clear."""
    card = contents.models.get(deployment.model)
    if card is None:
        return becomes(
            deployment, "failed", picture.now_ms, f"the model {deployment.model} is not registered"
        )
    profiles = profiles_of(contents, card)
    if not profiles:
        if card.state == "failed":
            why = f"{card.name} could not be measured: {card.reason}"
            return becomes(deployment, "failed", picture.now_ms, why)
        return noted(
            deployment, f"{card.name} is {card.state}: {card.progress or 'no worker is free for it'}"
        )
    if not picture.is_settled or picture.now_ms - deployment.since_ms < _pause_ms(deployment):
        return None
    return _place(deployment, card, profiles, contents, picture, plan)


def _pause_ms(deployment: Deployment) -> int:
    return FIRST_PAUSE_MS << (deployment.attempts - 1) if deployment.attempts else 0


def _place(
    deployment: Deployment,
    card: ModelCard,
    profiles: dict[str, Profile],
    contents: Contents,
    picture: Picture,
    plan: Planner,
) -> Decision | None:
    devices = [device for device in picture.workers.values() if device.takes_orders]
    if not devices:
        return noted(deployment, "no worker takes orders")
    free = [device for device in devices if can_take(device, card.name, contents)]
    if not free:
        why = f"no worker is free: each has {card.name} already, loads, measures, or does not tell its memory"
        return noted(deployment, why)
    question = Question(
        card=card,
        intent=deployment.intent,
        profiles=profiles,
        devices=free,
        may_group=not deployment.is_ungrouped,
    )
    answer = plan(question)
    if isinstance(answer, Refused):
        if answer.is_final and len(free) == len(devices):
            return becomes(deployment, "failed", picture.now_ms, answer.reason)
        return noted(deployment, answer.reason)
    return load(deployment, card, answer, picture)


def can_take(device: Device, model: str, contents: Contents) -> bool:
    """Not a second instance of the model, and nothing while it loads another or measures: its memory is not
    what its report says."""
    name = device.card.id
    on_it = [one for one in contents.deployments.values() if name in one.epochs]
    is_loading = any(one.state == "loading" or one.model == model for one in on_it)
    measures = any(card.state == "profiling" and card.worker == name for card in contents.models.values())
    return device.pages is not None and not (is_loading or measures or device.serves(model))


def load(deployment: Deployment, card: ModelCard, chosen: Chosen, picture: Picture) -> Decision:
    workers = [worker for stage in chosen.stages for worker in stage.workers]
    record = replace(
        deployment,
        state="loading",
        reason=f"{', '.join(workers)} load{'s' if len(workers) == 1 else ''} it",
        configuration=chosen.estimate.configuration,
        stages=chosen.stages,
        expected=chosen.estimate,
        since_ms=picture.now_ms,
        attempts=deployment.attempts + 1,
        loads=deployment.loads + 1,
        epochs={worker: picture.workers[worker].card.epoch for worker in workers},
    )
    return Decision(record=record, commands=deploys(record, card, chosen.blocks), told=True)


def next_of_loading(deployment: Deployment, picture: Picture) -> Decision | None:
    if why := _why_not_loaded(deployment, picture):
        return failed_attempt(deployment, why, picture.now_ms)
    shown = [_shown(deployment, worker, picture) for worker in shown_by(deployment)]
    if all(shown):
        return _loaded(deployment, picture)
    waited_for = [worker for worker, there in zip(shown_by(deployment), shown, strict=True) if not there]
    steps = [f"{worker}: {_progress(deployment, worker, picture)}" for worker in waited_for]
    return noted(deployment, "; ".join(steps))


def _why_not_loaded(deployment: Deployment, picture: Picture) -> str:
    if picture.is_settled and (gone := picture.gone(deployment.epochs)):
        return f"{gone} while it loaded {deployment.model}"
    ids = {worker: deploy_id(deployment, worker) for worker in deployment.epochs}
    for worker, command_id in ids.items():
        report = picture.reports.get(command_id)
        if report is not None and report.state not in ("running", "applied"):
            return f"{worker}: {report.state}: {report.reason}"
        if not _shown(deployment, worker, picture) and picture.is_unheard(command_id, deployment.since_ms):
            return f"{worker} did not take the order to load {deployment.model}"
    if picture.now_ms - deployment.since_ms > LOAD_LIMIT_MS:
        return f"not loaded within {LOAD_LIMIT_MS // 60_000} minutes"
    return ""


def _shown(deployment: Deployment, worker: str, picture: Picture) -> bool:
    device = picture.holder(worker, deployment.epochs[worker])
    return device is not None and device.instance(instance_at(deployment, worker)) is not None


def _progress(deployment: Deployment, worker: str, picture: Picture) -> str:
    report = picture.reports.get(deploy_id(deployment, worker))
    return (report.reason if report else "") or "loads it"


def _loaded(deployment: Deployment, picture: Picture) -> Decision | None:
    """Every worker has it. A group is made of them now."""
    leader = workers_of(deployment)[0]
    tp = deployment.configuration.tp if deployment.configuration else 1
    card = picture.workers[leader].instance(instance_at(deployment, leader))
    assert card is not None
    if tp > 1 and tp not in card.degrees:
        why = f"{leader} forms no group of degree {tp}; {deployment.model} can be at {_listed(card.degrees)}"
        return failed_attempt(replace(deployment, is_ungrouped=True), why, picture.now_ms)
    if tp > 1 and card.tp != tp:
        return _grouping(deployment, tp, picture)
    record = replace(deployment, instance=instance_at(deployment, leader))
    return becomes(record, "serving", picture.now_ms, "")


def _listed(degrees: list[int]) -> str:
    return ", ".join(map(str, degrees))


def _grouping(deployment: Deployment, tp: int, picture: Picture) -> Decision | None:
    command_id = transform_id(deployment, "up")
    report = picture.reports.get(command_id)
    if report is not None and report.state not in ("running", "applied"):
        why = f"no group of {', '.join(workers_of(deployment))}: {report.state}: {report.reason}"
        return failed_attempt(replace(deployment, is_ungrouped=True), why, picture.now_ms)
    if picture.is_known(command_id):
        if picture.is_unheard(command_id, picture.sent.get(command_id, deployment.since_ms)):
            why = f"{workers_of(deployment)[0]} did not take the order to lead a group"
            return failed_attempt(deployment, why, picture.now_ms)
        return None
    command = transform(command_id, deployment.model, workers_of(deployment), deployment.epochs, tp)
    record = replace(deployment, reason=f"loaded; becomes one instance of degree {tp}")
    return Decision(record=record, commands=(command,))


def _together_again(deployment: Deployment, picture: Picture) -> Decision | None:
    """A group whose members are alone again, all of them there, is made anew."""
    tp, leader = deployment.configuration.tp if deployment.configuration else 1, workers_of(deployment)[0]
    card = picture.workers[leader].instance(instance_at(deployment, leader))
    if tp == 1 or card is None or card.tp != 1 or not picture.may_change:
        return None
    command_id = next_try(f"{transform_id(deployment, 'up')}-again", picture)
    if command_id is None:
        return None
    command = transform(command_id, deployment.model, workers_of(deployment), deployment.epochs, tp)
    return Decision(commands=(command,))


def failed_attempt(deployment: Deployment, why: str, now_ms: int) -> Decision:
    if deployment.attempts < MAX_ATTEMPTS:
        return becomes(deployment, "waiting", now_ms, f"{why}; it is tried again")
    return becomes(deployment, "failed", now_ms, f"given up after {deployment.attempts} attempts: {why}")


def next_of_serving(deployment: Deployment, picture: Picture) -> Decision | None:
    if not picture.is_settled:
        return None
    why = picture.gone(deployment.epochs)
    lacking = [worker for worker in shown_by(deployment) if not _shown(deployment, worker, picture)]
    if not why and lacking:
        why = f"{lacking[0]} does not have {deployment.model} any more"
    if not why:
        return _together_again(deployment, picture)
    served_long = picture.now_ms - deployment.since_ms >= STABLE_MS
    return failed_attempt(replace(deployment, attempts=0) if served_long else deployment, why, picture.now_ms)

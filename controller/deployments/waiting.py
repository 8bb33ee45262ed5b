"""A deployment's way from its order to a place, or what it waits for at each worker. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from bus.deployments import Deployment, ModelCard
from bus.groups import natural
from bus.morphs import Cause
from controller.deployments.observation import Observation
from controller.deployments.planner import Situation
from controller.deployments.profiling import profiles_of
from controller.deployments.transitions import Transition, because, becomes, deploys, noted
from controller.planning.fitting import sized
from controller.planning.plan import Plan

FIRST_PAUSE_MS = 1_000  # before the second attempt; doubles
NAMED = 8  # workers that are named one by one
UNMEASURED = "is of a kind not measured yet"
ROOM, WORKER, NOWHERE = "waits for room", "waits for a worker", "fits nowhere here"
ASK_FOR_LESS = (
    "start workers with more memory (worker.memory_mb) or more of them, or retire it and ask for less"
)


def next_of_waiting(deployment: Deployment, now: Situation) -> Transition | None:
    """Return what becomes of a waiting deployment whose stages are clear."""
    card, now_ms = now.contents.models.get(deployment.model), now.seen.now_ms
    if card is None:
        return becomes(deployment, "failed", now_ms, f"the model {deployment.model} is not registered")
    if not profiles_of(now.contents, card):
        if card.state == "failed":
            why = f"{card.name} could not be measured: {card.reason}"
            return becomes(deployment, "failed", now_ms, why)
        how = card.progress or "no worker is free for it"
        return noted(deployment, f"{card.name} is {card.state}: {how}")
    pause_ms = FIRST_PAUSE_MS << (deployment.attempts - 1) if deployment.attempts else 0
    if not now.seen.is_settled or now_ms - deployment.since_ms < pause_ms:
        return None
    return _place(deployment, card, now)


def _place(deployment: Deployment, card: ModelCard, now: Situation) -> Transition | None:
    workers = now.seen.workers
    why_not = {name: now.why_not_taken(one, card.name) for name, one in workers.items()}
    if deployment.copies:
        why_not |= {name: "is not free" for name, one in workers.items() if one.card.instances}
    question = now.question(deployment, (one for name, one in workers.items() if not why_not[name]))
    assert question is not None
    plan = now.plan(question) if question.devices else None
    if plan and plan.chosen:
        return load(deployment, card, plan, now.seen)
    are_all_asked = len(question.devices) == sum(one.takes_orders for one in workers.values())
    if plan and plan.is_unmet and are_all_asked:
        return becomes(deployment, "failed", now.seen.now_ms, plan.reason)
    return _queued(deployment, plan, _obstacles(why_not, plan), now)


def load(
    deployment: Deployment,
    card: ModelCard,
    plan: Plan,
    seen: Observation,
    cause: Cause = "deployment",
    why: str = "",
) -> Transition:
    """Order the workers of `plan`, which has a choice, to load the model."""
    assert plan.chosen is not None
    record = replace(
        deployment,
        state="loading",
        reason=why or f"{', '.join(plan.workers)} load{'s' if len(plan.workers) == 1 else ''} it",
        configuration=plan.chosen.configuration,
        is_fixed=plan.chosen.is_fixed,
        stages=plan.stages,
        expected=plan.chosen,
        since_ms=seen.now_ms,
        attempts=deployment.attempts + 1,
        loads=deployment.loads + 1,
        epochs={worker: seen.workers[worker].card.epoch for worker in plan.workers},
    )
    why = why or ("to be loaded" if not deployment.loads else f"to be loaded again: {deployment.reason}")
    transition = Transition(record=record, commands=deploys(record, card, plan.blocks), announced=True)
    return because(transition, deployment, cause, why)


def _queued(deployment: Deployment, plan: Plan | None, obstacles: str, now: Situation) -> Transition | None:
    """Note what it waits for; there is an event only if that changes in kind."""
    if plan is None and not obstacles:
        return _note(deployment, WORKER, "no worker is there. It stays queued until one joins")
    empty = now.plan_when_empty(deployment)
    if empty and not empty.chosen:
        sizes = _listed({name: f"{sized(size)} at most" for name, size in empty.free_bytes.items()})
        where = f"; {sizes}" if sizes else ""
        why = f"{empty.reason}, even with nothing else deployed{where}. It stays queued: {ASK_FOR_LESS}"
        return _note(deployment, NOWHERE, why)
    if plan is None:
        return _note(deployment, WORKER, f"{obstacles}. It stays queued until one of them is free")
    gone = " and ".join(map(str, plan.retirements))
    help_ = f"To make room: {gone}" if gone else "Nothing that could go would make room"
    return _note(deployment, ROOM, f"{plan.reason}; {obstacles}. It stays queued. {help_}")


def _note(deployment: Deployment, what: str, why: str) -> Transition | None:
    transition = noted(deployment, f"{what}: {why}")
    is_news = not deployment.reason.startswith(what)
    return replace(transition, announced=is_news) if transition else None


def _obstacles(why_not: Mapping[str, str], plan: Plan | None) -> str:
    free = plan.free_bytes if plan else {}
    said = {name: f"{sized(free[name])} free" if name in free else UNMEASURED for name in why_not}
    return _listed({name: why or said[name] for name, why in why_not.items()})


def _listed(said: Mapping[str, str]) -> str:
    """Join what is said of each worker: "w0, w1: 4.0 MiB free; w2: drains"."""
    alike: dict[str, list[str]] = defaultdict(list)
    for worker in sorted(said, key=natural):
        alike[said[worker]].append(worker)
    return "; ".join(f"{_names(workers)}: {words}" for words, workers in alike.items())


def _names(workers: list[str]) -> str:
    if len(workers) <= NAMED:
        return ", ".join(workers)
    return f"{', '.join(workers[: NAMED - 1])} ... {workers[-1]} ({len(workers)} workers)"

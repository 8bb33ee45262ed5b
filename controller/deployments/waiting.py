"""A deployment's way from its order to a place: where it goes, or what it waits for at each worker. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Deployment, ModelCard
from bus.messages import Cause
from bus.shapes import natural
from controller.deployments.observation import Observation
from controller.deployments.planner import (
    ChosenPlan,
    Planner,
    Question,
    RefusedPlan,
    fits_when_empty,
    question_of,
    why_not_taken,
)
from controller.deployments.profiling import profiles_of
from controller.deployments.transitions import Transition, because, becomes, deploys, noted
from controller.planning.fitting import sized

FIRST_PAUSE_MS = 1_000  # before the second attempt; doubles
NAMED = 8  # workers that are named one by one
ROOM, WORKER, NOWHERE = "waits for room", "waits for a worker", "fits nowhere here"
ASK_FOR_LESS = (
    "start workers with more memory (worker.memory_mb) or more of them, or retire it and ask for less"
)


def next_of_waiting(
    deployment: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    """Its stages are clear."""
    card = contents.models.get(deployment.model)
    if card is None:
        return becomes(deployment, "failed", seen.now_ms, f"the model {deployment.model} is not registered")
    if not profiles_of(contents, card):
        if card.state == "failed":
            why = f"{card.name} could not be measured: {card.reason}"
            return becomes(deployment, "failed", seen.now_ms, why)
        return noted(
            deployment, f"{card.name} is {card.state}: {card.progress or 'no worker is free for it'}"
        )
    if not seen.is_settled or seen.now_ms - deployment.since_ms < _pause_ms(deployment):
        return None
    return _place(deployment, card, contents, seen, plan)


def _pause_ms(deployment: Deployment) -> int:
    return FIRST_PAUSE_MS << (deployment.attempts - 1) if deployment.attempts else 0


def _place(
    deployment: Deployment, card: ModelCard, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    why_not = {name: why_not_taken(one, card.name, contents) for name, one in seen.workers.items()}
    free = [one for name, one in seen.workers.items() if not why_not[name]]
    question = question_of(deployment, free, contents)
    assert question is not None
    answer = plan(replace(question, current=None)) if free else None
    if isinstance(answer, ChosenPlan):
        return load(deployment, card, answer, seen)
    are_all_asked = len(free) == sum(one.takes_orders for one in seen.workers.values())
    if answer and answer.is_final and are_all_asked:
        return becomes(deployment, "failed", seen.now_ms, answer.reason)
    return _queued(deployment, answer, _obstacles(question, why_not, answer), contents, seen, plan)


def load(
    deployment: Deployment,
    card: ModelCard,
    chosen: ChosenPlan,
    seen: Observation,
    cause: Cause = "deployment",
    why: str = "",
) -> Transition:
    workers = [worker for stage in chosen.stages for worker in stage.workers]
    record = replace(
        deployment,
        state="loading",
        reason=why or f"{', '.join(workers)} load{'s' if len(workers) == 1 else ''} it",
        configuration=chosen.estimate.configuration,
        stages=chosen.stages,
        expected=chosen.estimate,
        since_ms=seen.now_ms,
        attempts=deployment.attempts + 1,
        loads=deployment.loads + 1,
        epochs={worker: seen.workers[worker].card.epoch for worker in workers},
    )
    why = why or ("to be loaded" if not deployment.loads else f"to be loaded again: {deployment.reason}")
    transition = Transition(record=record, commands=deploys(record, card, chosen.blocks), told=True)
    return because(transition, deployment, cause, why)


# --------------------------------------------------------------------------- why it waits


def _queued(
    deployment: Deployment,
    answer: RefusedPlan | None,
    obstacles: str,
    contents: Contents,
    seen: Observation,
    plan: Planner,
) -> Transition | None:
    """It stays where it is. That is told once, and again when it waits for something else."""
    if answer is None and not obstacles:
        return _told(deployment, WORKER, "no worker is there. It stays queued until one joins")
    empty = fits_when_empty(deployment, contents, seen, plan)
    if isinstance(empty, RefusedPlan):
        sizes = _listed({name: f"{sized(size)} at most" for name, size in empty.free_bytes.items()})
        where = f"; {sizes}" if sizes else ""
        why = f"{empty.reason}, even with nothing else deployed{where}. It stays queued: {ASK_FOR_LESS}"
        return _told(deployment, NOWHERE, why)
    if answer is None:
        return _told(deployment, WORKER, f"{obstacles}. It stays queued until one of them is free")
    help_ = f"To make room: {answer.ways}" if answer.ways else "Nothing that could go would make room"
    return _told(deployment, ROOM, f"{answer.reason}; {obstacles}. It stays queued. {help_}")


def _told(deployment: Deployment, what: str, why: str) -> Transition | None:
    transition = noted(deployment, f"{what}: {why}")
    is_news = not deployment.reason.startswith(what)
    return replace(transition, told=is_news) if transition else None


def _obstacles(question: Question, why_not: Mapping[str, str], answer: RefusedPlan | None) -> str:
    """Of every worker, alike ones together."""
    free = answer.free_bytes if answer else {}
    return _listed(
        {
            name: why or (f"{sized(free[name])} free" if name in free else "is of a kind not measured yet")
            for name, why in why_not.items()
        }
    )


def _listed(said: Mapping[str, str]) -> str:
    """ "w0, w1: 4.0 MiB free; w2: drains"."""
    alike: dict[str, list[str]] = defaultdict(list)
    for worker in sorted(said, key=natural):
        alike[said[worker]].append(worker)
    return "; ".join(f"{_names(workers)}: {words}" for words, workers in alike.items())


def _names(workers: list[str]) -> str:
    if len(workers) <= NAMED:
        return ", ".join(workers)
    return f"{', '.join(workers[: NAMED - 1])} ... {workers[-1]} ({len(workers)} workers)"

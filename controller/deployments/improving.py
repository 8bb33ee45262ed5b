"""The intent of what serves stays its target: when is it deployed otherwise? Pure.

========  =====================================================  ========================================
change    when                                                   where
========  =====================================================  ========================================
better    what the intent minimises would fall by `MARGIN` or    workers that were idle all the window
          more, and no deployment waits that could ever fit
packed    a deployment waits that would have room then, and      workers that have other models already,
          what the intent minimises, which is not the latency,   so that one it has alone gets empty
          does not rise
========  =====================================================  ========================================

The old one serves until the new one, its heir, does: an heir is a deployment of the same intent that says
whom it `replaces`. It gets one attempt; whatever goes wrong, the old one stays. One change at a time, and
none of a deployment that came, or was last tried to be changed, less than a cool-down ago, which doubles with
every heir that came to nothing. Records tell all of that, so a controller that starts again knows it. Where
morphs are by hand (policy mode `manual`) nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Deployment
from bus.messages import Cause
from controller.deployments.observation import Observation, WorkerView
from controller.deployments.planner import (
    ChosenPlan,
    Planner,
    RefusedPlan,
    can_take,
    fits_when_empty,
    question_of,
)
from controller.deployments.transitions import Transition, becomes, instance_at, workers_of
from controller.deployments.waiting import load
from controller.planning.intent import Comparison, compare, objective

MAX_DOUBLINGS = 6
IDLE_LOAD = 0.05  # share of `controller.load_window_s`


def heirs_of(deployment: Deployment, contents: Contents) -> list[Deployment]:
    return [one for one in contents.deployments.values() if one.replaces == deployment.id]


def taken_over(deployment: Deployment, contents: Contents, seen: Observation) -> Transition | None:
    """Of one that serves: its heir does, too."""
    for heir in heirs_of(deployment, contents):
        if heir.state == "serving":
            record = replace(deployment, heir=heir.id)
            return becomes(record, "retiring", seen.now_ms, f"{heir.id} serves in its place")
    return None


def given_up(
    heir: Deployment, transition: Transition | None, contents: Contents, now_ms: int
) -> Transition | None:
    """What becomes of an heir that waits or loads; of any other `transition`. It has one attempt, and only
    while there is something to replace: what lost its workers finds its own way."""
    if not heir.replaces or heir.state not in ("waiting", "loading"):
        return transition
    old = contents.deployments.get(heir.replaces)
    serves = old is not None and old.state == "serving"
    if heir.state == "loading" and not serves:
        return becomes(heir, "retiring", now_ms, f"{heir.replaces}, which it was to replace, does not serve")
    record = transition.record if transition else None
    if serves and isinstance(record, Deployment) and record.state in ("waiting", "failed"):
        return becomes(heir, "retiring", now_ms, f"{heir.replaces} serves on: {record.reason}")
    if serves and heir.state == "waiting":
        return becomes(heir, "retiring", now_ms, f"{heir.replaces} serves on")
    return transition


def next_of_pursuit(
    deployment: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    """Of one that serves."""
    if not (seen.is_settled and seen.may_change) or _is_cooling(deployment, contents, seen):
        return None
    states = {one.state for one in contents.deployments.values()}
    if states & {"loading", "retiring"}:
        return None
    waiting = [one for one in contents.deployments.values() if one.state == "waiting"]
    waiting = [one for one in waiting if not _fits_nowhere(one, contents, seen, plan)]
    if not waiting:
        return _bettered(deployment, contents, seen, plan)
    if objective(deployment.intent) == "latency":
        return None
    packed = (_packed(deployment, one, contents, seen, plan) for one in waiting)
    return next((transition for transition in packed if transition), None)


def _fits_nowhere(deployment: Deployment, contents: Contents, seen: Observation, plan: Planner) -> bool:
    """Whatever moves, it waits on."""
    return isinstance(fits_when_empty(deployment, contents, seen, plan), RefusedPlan)


def _is_cooling(deployment: Deployment, contents: Contents, seen: Observation) -> bool:
    """All heirs of one that serves came to nothing."""
    heirs = heirs_of(deployment, contents)
    last_ms = max([deployment.since_ms, *(one.since_ms for one in heirs)])
    return seen.now_ms - last_ms < seen.cooldown_ms << min(len(heirs), MAX_DOUBLINGS)


def _bettered(
    deployment: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    if not seen.is_load_known:
        return None
    idle = [device for device in _free_for(deployment, contents, seen) if device.load <= IDLE_LOAD]
    found = _alternative(deployment, idle, contents, seen, plan)
    if found is None or not found[1].is_better:
        return None
    chosen, compared = found
    return _heir(deployment, chosen, compared, "better", f"{_workers(chosen)} idle", contents, seen)


def _packed(
    deployment: Deployment, waiting: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> Transition | None:
    emptied = [
        device
        for worker in workers_of(deployment)
        if (device := seen.workers.get(worker)) and len(device.card.instances) == 1
    ]
    shared = [device for device in _free_for(deployment, contents, seen) if device.card.instances]
    found = _alternative(deployment, shared, contents, seen, plan) if emptied else None
    if found is None or not found[1].is_no_worse:
        return None
    chosen, compared = found
    taken = {worker for stage in chosen.stages for worker in stage.workers}
    left = [one for one in _free_for(waiting, contents, seen) if one.card.id not in taken]
    there = {one.card.id: one for one in [*left, *emptied]}
    if not _has_room(waiting, deployment, there.values(), contents, plan):
        return None
    why = f"{waiting.id} ({waiting.model}) waits for room"
    return _heir(deployment, chosen, compared, "packed", why, contents, seen)


def _free_for(deployment: Deployment, contents: Contents, seen: Observation) -> list[WorkerView]:
    return [
        device
        for device in seen.workers.values()
        if device.takes_orders and can_take(device, deployment.model, contents)
    ]


def _alternative(
    deployment: Deployment,
    devices: list[WorkerView],
    contents: Contents,
    seen: Observation,
    plan: Planner,
) -> tuple[ChosenPlan, Comparison] | None:
    """The best on these devices, against what serves."""
    question = question_of(deployment, devices, contents)
    answer = plan(question) if question and devices else None
    if not isinstance(answer, ChosenPlan):
        return None
    first = seen.workers.get(workers_of(deployment)[0])
    is_alike = first is not None and first.kind == seen.workers[answer.stages[0].workers[0]].kind
    now = (answer.current if is_alike else None) or deployment.expected
    return (answer, compare(now, answer.estimate, deployment.intent)) if now else None


def _has_room(
    waiting: Deployment, going: Deployment, devices: Iterable[WorkerView], contents: Contents, plan: Planner
) -> bool:
    """When the other one has gone."""
    question = question_of(waiting, list(devices), contents)
    if question is None:
        return False
    gone = frozenset(instance_at(going, worker) for worker in workers_of(going))
    return isinstance(plan(replace(question, gone=gone)), ChosenPlan)


def _heir(
    deployment: Deployment,
    chosen: ChosenPlan,
    compared: Comparison,
    cause: Cause,
    why: str,
    contents: Contents,
    seen: Observation,
) -> Transition:
    heir = replace(
        deployment,
        id=_id_of_heir(deployment, seen.now_ms),
        replaces=deployment.id,
        heir="",
        instance="",
        attempts=0,
        loads=0,
    )
    reason = f"in place of {deployment.id} on {_workers(chosen)}: {compared.words}; {why}"
    begun = load(heir, contents.models[deployment.model], chosen, seen, cause, reason)
    return replace(begun, compared=compared.numbers)


def _id_of_heir(deployment: Deployment, now_ms: int) -> str:
    """Never one that was there before, whoever is forgotten by now: a cool-down lies between two heirs."""
    return f"{deployment.id.partition('.')[0]}.{now_ms // 1000:x}"


def _workers(chosen: ChosenPlan) -> str:
    return ", ".join(worker for stage in chosen.stages for worker in stage.workers)

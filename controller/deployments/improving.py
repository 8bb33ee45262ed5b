"""The change of a serving deployment to a better configuration for its intent. Pure.

docs/deploy.md has the conditions. A replacement has one attempt; if that fails, the old deployment stays.
Records show tries and cool-downs, so a controller that starts again knows them.
"""

from __future__ import annotations

from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Deployment
from bus.morphs import Cause
from controller.deployments.observation import Observation
from controller.deployments.planner import Situation
from controller.deployments.transitions import Transition, becomes
from controller.deployments.waiting import load
from controller.planning.intent import Comparison, compare, objective
from controller.planning.plan import Plan

MAX_DOUBLINGS = 6
IDLE_LOAD = 0.05  # share of `controller.load_window_s`


def replacements_of(deployment: Deployment, contents: Contents) -> list[Deployment]:
    """Return the deployments that are to replace this one, or were."""
    return [one for one in contents.deployments.values() if one.replaces == deployment.id]


def taken_over(deployment: Deployment, contents: Contents, seen: Observation) -> Transition | None:
    """Retire a serving deployment whose replacement serves, too."""
    for one in replacements_of(deployment, contents):
        if one.state == "serving":
            record = replace(deployment, heir=one.id)
            return becomes(record, "retiring", seen.now_ms, f"{one.id} serves in its place")
    return None


def given_up(
    deployment: Deployment, transition: Transition | None, contents: Contents, now_ms: int
) -> Transition | None:
    """Retire a replacement that failed or whose deployment no longer serves; else return `transition`."""
    if not deployment.replaces or deployment.state not in ("waiting", "loading"):
        return transition
    old = contents.deployments.get(deployment.replaces)
    serves = old is not None and old.state == "serving"
    if deployment.state == "loading" and not serves:
        why = f"{deployment.replaces}, which it was to replace, does not serve"
        return becomes(deployment, "retiring", now_ms, why)
    record = transition.record if transition else None
    if serves and isinstance(record, Deployment) and record.state in ("waiting", "failed"):
        return becomes(deployment, "retiring", now_ms, f"{deployment.replaces} serves on: {record.reason}")
    if serves and deployment.state == "waiting":
        return becomes(deployment, "retiring", now_ms, f"{deployment.replaces} serves on")
    return transition


def next_of_improving(deployment: Deployment, now: Situation) -> Transition | None:
    """Return the change of a serving deployment that is worth it, if any."""
    if deployment.copies or not (now.seen.is_settled and now.seen.may_change) or _is_cooling(deployment, now):
        return None
    others = now.contents.deployments.values()
    if any(one.state in ("loading", "retiring") for one in others):
        return None
    waiting = [one for one in others if one.state == "waiting" and _fits_somewhere(one, now)]
    if not waiting:
        return _bettered(deployment, now)
    if objective(deployment.intent) == "latency":
        return None
    packed = (_packed(deployment, one, now) for one in waiting)
    return next((transition for transition in packed if transition), None)


def _fits_somewhere(deployment: Deployment, now: Situation) -> bool:
    """Return False if it would wait even with nothing else deployed."""
    plan = now.plan_when_empty(deployment)
    return plan is None or plan.chosen is not None


def _is_cooling(deployment: Deployment, now: Situation) -> bool:
    tries = replacements_of(deployment, now.contents)  # replacements of a serving deployment have all failed
    last_ms = max([deployment.since_ms, *(one.since_ms for one in tries)])
    return now.seen.now_ms - last_ms < now.seen.cooldown_ms << min(len(tries), MAX_DOUBLINGS)


def _bettered(deployment: Deployment, now: Situation) -> Transition | None:
    if not now.seen.is_load_known:
        return None
    idle = {one.card.id for one in now.seen.workers.values() if one.load <= IDLE_LOAD}
    plan, compared = _alternative(deployment, idle, now)
    if not compared or not compared.is_better:
        return None
    return _replacement(deployment, plan, compared, "better", f"{', '.join(plan.workers)} idle", now)


def _packed(deployment: Deployment, waiting: Deployment, now: Situation) -> Transition | None:
    workers = now.seen.workers
    own = (one for name in deployment.workers if (one := workers.get(name)))
    emptied = [one for one in own if len(one.card.instances) == 1]
    shared = {name for name, one in workers.items() if one.card.instances}
    plan, compared = _alternative(deployment, shared if emptied else set(), now)
    if not compared or not compared.is_no_worse:
        return None
    left = [one for one in now.takers(waiting.model) if one.card.id not in plan.workers]
    question = now.question(waiting, {one.card.id: one for one in [*left, *emptied]}.values())
    gone = frozenset(deployment.instance_at(worker) for worker in deployment.workers)
    if question is None or not now.plan(replace(question, gone=gone)).chosen:
        return None
    why = f"{waiting.id} ({waiting.model}) waits for room"
    return _replacement(deployment, plan, compared, "packed", why, now)


def _alternative(deployment: Deployment, names: set[str], now: Situation) -> tuple[Plan, Comparison | None]:
    """Return the best plan on workers of these `names`, compared with what serves if both are known."""
    devices = [one for one in now.takers(deployment.model) if one.card.id in names]
    question = now.question(deployment, devices)
    plan = now.plan(question) if question and devices else Plan()
    if plan.chosen is None:
        return plan, None
    first, other = now.seen.workers.get(deployment.workers[0]), now.seen.workers[plan.workers[0]]
    current = deployment.expected
    if first is not None and first.kind == other.kind:  # the same profile estimates both
        shape = deployment.configuration, deployment.is_fixed
        rows = (one for one in plan.estimates if (one.configuration, one.is_fixed) == shape)
        current = next(rows, current)
    return plan, compare(current, plan.chosen, deployment.intent) if current else None


def _replacement(
    deployment: Deployment, plan: Plan, compared: Comparison, cause: Cause, why: str, now: Situation
) -> Transition:
    # Seconds make an id that no forgotten deployment had: a cool-down lies between two replacements.
    replacement = replace(
        deployment,
        id=f"{deployment.id.partition('.')[0]}.{now.seen.now_ms // 1000:x}",
        replaces=deployment.id,
        heir="",
        instance="",
        attempts=0,
        loads=0,
    )
    reason = f"in place of {deployment.id} on {', '.join(plan.workers)}: {compared.words}; {why}"
    begun = load(replacement, now.contents.models[deployment.model], plan, now.seen, cause, reason)
    return replace(begun, compared=compared.numbers)

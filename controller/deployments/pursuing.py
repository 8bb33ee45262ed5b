"""The intent of what serves stays its target: when is it deployed otherwise? Pure.

========  =====================================================  ========================================
change    when                                                   where
========  =====================================================  ========================================
better    what the intent minimises would fall by `MARGIN` or    workers that were idle for two minutes
          more, and no deployment waits
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
from controller.deployments.decisions import Decision, becomes, instance_at, workers_of
from controller.deployments.loading import Chosen, Planner, Question, can_take, load
from controller.deployments.picture import Device, Picture
from controller.deployments.profiling import profiles_of
from controller.intents.intents import objective
from controller.intents.pursuit import Comparison, compare

COOLDOWN_MS = 120_000  # as long as the load looks back
MAX_DOUBLINGS = 6
IDLE_LOAD = 0.05  # share of the last two minutes


def heirs_of(deployment: Deployment, contents: Contents) -> list[Deployment]:
    return [one for one in contents.deployments.values() if one.replaces == deployment.id]


def taken_over(deployment: Deployment, contents: Contents, picture: Picture) -> Decision | None:
    """Of one that serves: its heir does, too."""
    for heir in heirs_of(deployment, contents):
        if heir.state == "serving":
            record = replace(deployment, heir=heir.id)
            return becomes(record, "retiring", picture.now_ms, f"{heir.id} serves in its place")
    return None


def given_up(heir: Deployment, decision: Decision | None, contents: Contents, now_ms: int) -> Decision | None:
    """What becomes of an heir that waits or loads; of any other `decision`. It has one attempt, and only
    while there is something to replace: what lost its workers finds its own way."""
    if not heir.replaces or heir.state not in ("waiting", "loading"):
        return decision
    old = contents.deployments.get(heir.replaces)
    serves = old is not None and old.state == "serving"
    if heir.state == "loading" and not serves:
        return becomes(heir, "retiring", now_ms, f"{heir.replaces}, which it was to replace, does not serve")
    record = decision.record if decision else None
    if serves and isinstance(record, Deployment) and record.state in ("waiting", "failed"):
        return becomes(heir, "retiring", now_ms, f"{heir.replaces} serves on: {record.reason}")
    if serves and heir.state == "waiting":
        return becomes(heir, "retiring", now_ms, f"{heir.replaces} serves on")
    return decision


def next_of_pursuit(
    deployment: Deployment, contents: Contents, picture: Picture, plan: Planner
) -> Decision | None:
    """Of one that serves."""
    if not (picture.is_settled and picture.may_change) or _is_cooling(deployment, contents, picture.now_ms):
        return None
    states = {one.state for one in contents.deployments.values()}
    if states & {"loading", "retiring"}:
        return None
    waiting = [one for one in contents.deployments.values() if one.state == "waiting"]
    if not waiting:
        return _bettered(deployment, contents, picture, plan)
    if objective(deployment.intent) == "latency":
        return None
    packed = (_packed(deployment, one, contents, picture, plan) for one in waiting)
    return next((decision for decision in packed if decision), None)


def _is_cooling(deployment: Deployment, contents: Contents, now_ms: int) -> bool:
    """All heirs of one that serves came to nothing."""
    heirs = heirs_of(deployment, contents)
    last_ms = max([deployment.since_ms, *(one.since_ms for one in heirs)])
    return now_ms - last_ms < COOLDOWN_MS << min(len(heirs), MAX_DOUBLINGS)


def _bettered(deployment: Deployment, contents: Contents, picture: Picture, plan: Planner) -> Decision | None:
    idle = [device for device in _free_for(deployment, contents, picture) if device.load <= IDLE_LOAD]
    found = _alternative(deployment, idle, contents, picture, plan)
    if found is None or not found[1].is_better:
        return None
    chosen, compared = found
    return _heir(deployment, chosen, compared, f"{_workers(chosen)} idle", contents, picture)


def _packed(
    deployment: Deployment, waiting: Deployment, contents: Contents, picture: Picture, plan: Planner
) -> Decision | None:
    emptied = [
        device
        for worker in workers_of(deployment)
        if (device := picture.workers.get(worker)) and len(device.card.instances) == 1
    ]
    shared = [device for device in _free_for(deployment, contents, picture) if device.card.instances]
    found = _alternative(deployment, shared, contents, picture, plan) if emptied else None
    if found is None or not found[1].is_no_worse:
        return None
    chosen, compared = found
    taken = {worker for stage in chosen.stages for worker in stage.workers}
    left = [one for one in _free_for(waiting, contents, picture) if one.card.id not in taken]
    there = {one.card.id: one for one in [*left, *emptied]}
    if not _has_room(waiting, deployment, there.values(), contents, plan):
        return None
    why = f"{waiting.id} ({waiting.model}) waits for room"
    return _heir(deployment, chosen, compared, why, contents, picture)


def _free_for(deployment: Deployment, contents: Contents, picture: Picture) -> list[Device]:
    return [
        device
        for device in picture.workers.values()
        if device.takes_orders and can_take(device, deployment.model, contents)
    ]


def _alternative(
    deployment: Deployment,
    devices: list[Device],
    contents: Contents,
    picture: Picture,
    plan: Planner,
) -> tuple[Chosen, Comparison] | None:
    """The best on these devices, against what serves."""
    question = _question(deployment, devices, contents)
    answer = plan(question) if question and devices else None
    if not isinstance(answer, Chosen):
        return None
    first = picture.workers.get(workers_of(deployment)[0])
    is_alike = first is not None and first.kind == picture.workers[answer.stages[0].workers[0]].kind
    now = (answer.current if is_alike else None) or deployment.expected
    return (answer, compare(now, answer.estimate, deployment.intent)) if now else None


def _has_room(
    waiting: Deployment, going: Deployment, devices: Iterable[Device], contents: Contents, plan: Planner
) -> bool:
    """When the other one has gone."""
    question = _question(waiting, list(devices), contents)
    if question is None:
        return False
    gone = frozenset(instance_at(going, worker) for worker in workers_of(going))
    return isinstance(plan(replace(question, gone=gone)), Chosen)


def _question(deployment: Deployment, devices: list[Device], contents: Contents) -> Question | None:
    """None: nothing is known of the model."""
    card = contents.models.get(deployment.model)
    profiles = profiles_of(contents, card) if card else {}
    if card is None or not profiles:
        return None
    return Question(
        card=card,
        intent=deployment.intent,
        profiles=profiles,
        devices=devices,
        may_group=not deployment.is_ungrouped,
        current=deployment.configuration,
    )


def _heir(
    deployment: Deployment,
    chosen: Chosen,
    compared: Comparison,
    why: str,
    contents: Contents,
    picture: Picture,
) -> Decision:
    heir = replace(
        deployment,
        id=_id_of_heir(deployment, picture.now_ms),
        replaces=deployment.id,
        heir="",
        instance="",
        attempts=0,
        loads=0,
    )
    begun = load(heir, contents.models[deployment.model], chosen, picture)
    assert isinstance(begun.record, Deployment)
    reason = f"in place of {deployment.id} on {_workers(chosen)}: {compared.words}; {why}"
    return replace(begun, record=replace(begun.record, reason=reason), compared=compared.numbers)


def _id_of_heir(deployment: Deployment, now_ms: int) -> str:
    """Never one that was there before, whoever is forgotten by now: a cool-down lies between two heirs."""
    return f"{deployment.id.partition('.')[0]}.{now_ms // 1000:x}"


def _workers(chosen: Chosen) -> str:
    return ", ".join(worker for stage in chosen.stages for worker in stage.workers)

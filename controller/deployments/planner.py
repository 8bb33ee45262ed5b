"""Questions to the planner, and their answers from pages, cards and profiles. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from bus.catalogue import Contents
from bus.deployments import Deployment, Intent, ModelCard, Profile
from controller.deployments.free_memory import FreeMemory
from controller.deployments.observation import Observation, WorkerView
from controller.deployments.profiling import profiles_of
from controller.planning.estimates import estimate_all
from controller.planning.fitting import Device
from controller.planning.intent import judge, preference
from controller.planning.placement import Placing
from controller.planning.plan import NOT_CUT, Plan, plan

MAX_STAGES = 4
DEGREES = (1, 2, 4, 8)
NO_GROUP = "workers would not form a group for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model to place on `devices`."""

    card: ModelCard
    intent: Intent
    profiles: dict[str, Profile]
    devices: list[WorkerView]
    may_group: bool = True  # True: tensor parallelism is allowed
    gone: frozenset[str] = frozenset()  # instances whose memory counts as free

    @property
    def key(self) -> Hashable:
        """Questions of one key have the same answer until memory or load change."""
        cards = [one.card for one in self.devices]
        devices = tuple((card.id, card.epoch, *(one.id for one in card.instances)) for card in cards)
        profiles = tuple((kind, one.digest, one.ended_ms) for kind, one in self.profiles.items())
        return devices, profiles, (self.card.name, self.intent, self.may_group, self.gone)


Planner = Callable[[Question], Plan]


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a decision on a deployment depends on: records, what is seen, and a planner."""

    contents: Contents
    seen: Observation
    plan: Planner

    def question(self, deployment: Deployment, devices: Iterable[WorkerView]) -> Question | None:
        """Return the question where to load `deployment`; None if its model has no profile."""
        card = self.contents.models.get(deployment.model)
        profiles = profiles_of(self.contents, card) if card else {}
        if card is None or not profiles:
            return None
        there, may_group = list(devices), not deployment.is_ungrouped
        intent = deployment.intent
        return Question(card=card, intent=intent, profiles=profiles, devices=there, may_group=may_group)

    def takers(self, model: str) -> list[WorkerView]:
        """Return the workers that could load `model` now."""
        return [one for one in self.seen.workers.values() if not self.why_not_taken(one, model)]

    def why_not_taken(self, device: WorkerView, model: str) -> str:
        """Return why a worker cannot load `model` now; "": it can. A worker has one instance of a model."""
        name = device.card.id
        if not device.takes_orders:
            return "drains" if device.card.state == "draining" else "is still starting"
        on_it = [one for one in self.contents.deployments.values() if name in one.epochs]
        if device.serves(model) or any(one.model == model for one in on_it):
            return f"has {model} already"
        if loading := next((one.model for one in on_it if one.state == "loading"), ""):
            return f"is loading {loading}"
        for card in self.contents.models.values():
            if card.state == "profiling" and card.worker == name:
                return f"is measuring {card.name}"
        return "" if device.pages is not None else "does not report its memory"

    def plan_when_empty(self, deployment: Deployment) -> Plan | None:
        """Return the plan if nothing else were deployed; None if that is not known."""
        devices = [device for device in self.seen.workers.values() if device.takes_orders]
        question = self.question(deployment, devices)
        if question is None or any(device.pages is None for device in devices):
            return None
        gone = {card.id for device in devices for card in device.card.instances if card.deployed}
        others = self.contents.deployments.values()
        gone |= {one.instance_at(worker) for one in others for worker in one.epochs}
        return self.plan(replace(question, gone=frozenset(gone)))


def planned(question: Question, memory: FreeMemory, placing: Placing | None = None) -> Plan:
    """Return the best plan over the kinds of devices that were measured."""
    plans = [
        _plan(profile, question, there, memory, placing)
        for kind, profile in sorted(question.profiles.items())
        if (there := [device for device in question.devices if device.kind == kind])
    ]
    if not plans:
        return Plan(reason="no worker of a kind that was measured takes orders")
    return min(plans, key=lambda one: (one.chosen is None, one.is_unmet, _rank(one, question.intent)))


def _rank(one: Plan, intent: Intent) -> tuple[float, ...]:
    estimate = one.chosen or one.best
    return preference(estimate, intent) if estimate else (float("inf"),)


def _plan(
    profile: Profile,
    question: Question,
    devices: Sequence[WorkerView],
    memory: FreeMemory,
    placing: Placing | None,
) -> Plan:
    candidates = [
        Device(
            worker=device.card.id,
            host=device.card.host,
            free_bytes=memory.free_bytes.get(device.card.id, 0) + _freed_bytes(device, question, memory),
            load=device.load,
            page_bytes=device.card.page_bytes,
            instances=_instances(device, memory) - question.gone,
            ranks=memory.ranks.get(device.card.id, frozenset()) - question.gone,
        )
        for device in devices
    ]
    profile = kept_by(profile, devices)
    degrees, stages = _shapes(question, profile, devices)
    intent = question.intent
    found = plan(
        profile,
        intent,
        candidates,
        degrees=degrees,
        max_stages=stages,
        placing=placing,
        tenants=memory.tenants,
        groups=profile.degrees if question.may_group else (),
    )
    # The map shows degrees that cannot be had here, too.
    others = estimate_all(profile, intent, degrees=set(DEGREES) - set(degrees))
    why = NOT_CUT if question.may_group else NO_GROUP
    refused = [replace(one, refusal=why) for one in others if one.configuration.tp > 1]
    return replace(found, estimates=[*found.estimates, *judge(refused, intent)])


def _instances(device: WorkerView, memory: FreeMemory) -> frozenset[str]:
    """Return the instances on a worker, with those that no card shows."""
    return memory.held.get(device.card.id, frozenset()).union(card.id for card in device.card.instances)


def _freed_bytes(device: WorkerView, question: Question, memory: FreeMemory) -> int:
    """Return the bytes that instances in `gone` would free; idle KV counts as free already."""
    return sum(
        one.weight_bytes + one.kv_bytes
        for one in memory.tenants
        if one.instance in question.gone and device.card.id in one.workers
    )


def _shapes(question: Question, profile: Profile, devices: Sequence[WorkerView]) -> tuple[Sequence[int], int]:
    """Return the degrees and the most stages; what the intent fixes may need workers yet to come."""
    fixed_tp, stages = question.intent.tp, max(question.intent.pp or 1, min(MAX_STAGES, len(devices)))
    if fixed_tp:
        return [fixed_tp], stages
    possible = {*(profile.degrees if question.may_group else ()), *profile.fixed_degrees}
    return [degree for degree in DEGREES if degree == 1 or degree in possible], stages


def kept_by(profile: Profile, devices: Iterable[WorkerView]) -> Profile:
    """Return the profile without precisions that one of these workers does not keep.

    A quantised checkpoint, which was measured in its own precision alone, needs no variants.
    """
    if all(one.configuration.precision != "full" for one in profile.latency):
        return profile
    kept = set.intersection(*(set(device.card.variants) for device in devices))
    return replace(
        profile,
        latency=[one for one in profile.latency if one.configuration.precision in kept],
        memory=[one for one in profile.memory if one.configuration.precision in kept],
    )

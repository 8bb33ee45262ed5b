"""What a planner is asked, what it answers, and of which workers it is asked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Estimate, Intent, ModelCard, Profile
from bus.messages import Stage
from controller.deployments.free_memory import FreeMemory
from controller.deployments.observation import Observation, WorkerView
from controller.deployments.profiling import profiles_of
from controller.deployments.transitions import instance_at
from controller.planning import fitting, placement
from controller.planning.estimates import estimate_all
from controller.planning.intent import judge, name_of, preference
from controller.planning.plan import Plan, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """The first feasible configuration of the intent's order, and where it goes."""

    estimate: Estimate
    stages: list[Stage]
    blocks: int = 0
    current: Estimate | None = None  # of the question's `current`, from the same profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedPlan:
    """`is_final`: no change of these workers' load would help. `ways`: what would make room, in words.
    `free_bytes`: of each worker that was looked at."""

    reason: str
    is_final: bool = False
    ways: str = ""
    free_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a planner decides on. `devices`: those it may use. `may_group`: by tensor parallelism. `current`:
    how it is served already. `gone`: instances whose memory counts as free."""

    card: ModelCard
    intent: Intent
    profiles: dict[str, Profile]
    devices: list[WorkerView]
    may_group: bool = True
    current: Configuration | None = None
    gone: frozenset[str] = frozenset()

    @property
    def key(self) -> Hashable:
        """Alike questions have the same answer, but for what memory and load have become meanwhile."""
        devices = tuple(
            (one.card.id, one.card.epoch, *(card.id for card in one.card.instances)) for one in self.devices
        )
        profiles = tuple((kind, one.digest, one.ended_ms) for kind, one in self.profiles.items())
        wanted = self.card.name, self.intent, self.may_group, self.current, self.gone
        return devices, profiles, wanted


Planner = Callable[[Question], ChosenPlan | RefusedPlan]


def question_of(deployment: Deployment, devices: list[WorkerView], contents: Contents) -> Question | None:
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


# --------------------------------------------------------------------------- who can take it


def can_take(device: WorkerView, model: str, contents: Contents) -> bool:
    return not why_not_taken(device, model, contents)


def why_not_taken(device: WorkerView, model: str, contents: Contents) -> str:
    """Not a second instance of the model, and nothing while it loads another or measures: its memory is not
    what its report says. "": it could take it."""
    name = device.card.id
    if not device.takes_orders:
        return "drains" if device.card.state == "draining" else "is still starting"
    on_it = [one for one in contents.deployments.values() if name in one.epochs]
    if device.serves(model) or any(one.model == model for one in on_it):
        return f"has {model} already"
    if loading := next((one.model for one in on_it if one.state == "loading"), ""):
        return f"is loading {loading}"
    for card in contents.models.values():
        if card.state == "profiling" and card.worker == name:
            return f"is measuring {card.name}"
    return "" if device.pages is not None else "does not tell its memory"


def fits_when_empty(
    deployment: Deployment, contents: Contents, seen: Observation, plan: Planner
) -> ChosenPlan | RefusedPlan | None:
    """Whether there were room for it if nothing else were deployed. None: that is not known."""
    devices = [device for device in seen.workers.values() if device.takes_orders]
    question = question_of(deployment, devices, contents)
    if question is None or any(device.pages is None for device in devices):
        return None
    gone = {card.id for device in devices for card in device.card.instances if card.deployed}
    gone |= {instance_at(one, worker) for one in contents.deployments.values() for worker in one.epochs}
    return plan(replace(question, gone=frozenset(gone)))


MAX_STAGES = 4
DEGREES = (1, 2, 4)
NOT_CUT = "the weights cannot be cut for this degree (worker.max_tp, the number of KV heads)"
NO_GROUP = "workers would not form a group for it"


def planned(
    question: Question,
    room: FreeMemory,
    window: placement.LoadWindow,
    at_s: float,
    placing: placement.Placing | None = None,
) -> Plan | None:
    """Of the kinds of devices that were measured the one whose best is best. None: none was."""
    plans = [
        _plan(profile, question, there, room, window, at_s, placing)
        for kind, profile in sorted(question.profiles.items())
        if (there := [device for device in question.devices if device.kind == kind])
    ]
    if not plans:
        return None
    return min(plans, key=lambda one: (one.chosen is None, one.is_unmet, _rank(one, question.intent)))


def _rank(one: Plan, intent: Intent) -> tuple[float, ...]:
    estimate = one.chosen or one.best
    return preference(estimate, intent) if estimate else (float("inf"),)


def _plan(
    profile: Profile,
    question: Question,
    devices: Sequence[WorkerView],
    room: FreeMemory,
    window: placement.LoadWindow,
    at_s: float,
    placing: placement.Placing | None,
) -> Plan:
    seen = [
        fitting.Device(
            worker=device.card.id,
            host=device.card.host,
            free_bytes=room.free_bytes.get(device.card.id, 0) + _freed_bytes(device, question, room),
            load=window.load(device.card.id, at_s),
            page_bytes=device.card.page_bytes,
            is_empty=question.gone.issuperset(_held(device, room)),
        )
        for device in devices
    ]
    profile = kept_by(profile, devices)
    degrees, stages = _shapes(question, profile, devices)
    found = plan(
        profile,
        question.intent,
        seen,
        degrees=degrees,
        max_stages=stages,
        placing=placing,
        tenants=room.tenants,
    )
    why = NOT_CUT if question.may_group else NO_GROUP
    return _with_others(found, profile, question.intent, set(DEGREES) - set(degrees), why)


def _freed_bytes(device: WorkerView, question: Question, room: FreeMemory) -> int:
    """Idle KV is counted as free already."""
    return sum(
        one.weight_bytes + one.kv_kept_bytes
        for one in room.tenants
        if one.instance in question.gone and device.card.id in one.workers
    )


def _held(device: WorkerView, room: FreeMemory) -> set[str]:
    return {card.id for card in device.card.instances} | room.held.get(device.card.id, frozenset())


def _shapes(question: Question, profile: Profile, devices: Sequence[WorkerView]) -> tuple[list[int], int]:
    """Degrees, and the most stages. What the intent fixes may also need workers that are yet to come. Several
    ranks are workers without a model, which fitting sees to."""
    fixed_tp, stages = question.intent.tp, max(question.intent.pp or 1, min(MAX_STAGES, len(devices)))
    if fixed_tp:
        return [fixed_tp], stages
    possible = profile.degrees if question.may_group else []
    return [degree for degree in DEGREES if degree == 1 or degree in possible], stages


def _with_others(found: Plan, profile: Profile, intent: Intent, degrees: set[int], why: str) -> Plan:
    """The map tells of degrees that cannot be had here, too."""
    others = estimate_all(profile, intent, degrees=degrees)
    refused = [replace(one, refusal=why) for one in others if one.configuration.tp > 1]
    return replace(found, estimates=[*found.estimates, *judge(refused, intent)])


def kept_by(profile: Profile, devices: Iterable[WorkerView]) -> Profile:
    """Of the precisions that all these workers keep."""
    kept = set.intersection(*(set(device.card.variants) for device in devices))
    return replace(
        profile,
        latency=[one for one in profile.latency if one.configuration.precision in kept],
        memory=[one for one in profile.memory if one.configuration.precision in kept],
    )


def answer_of(found: Plan | None, current: Configuration | None = None) -> ChosenPlan | RefusedPlan:
    """`current`: how it is served already."""
    if found is None:
        return RefusedPlan(reason="no worker of a kind that was measured takes orders")
    if found.chosen is not None:
        now = next((one for one in found.estimates if one.configuration == current), None)
        return ChosenPlan(estimate=found.chosen, stages=found.stages, blocks=found.blocks, current=now)
    best = f"{name_of(found.best)} " if found.best and not found.is_unmet else ""
    return RefusedPlan(
        reason=f"{best}{found.reason}",
        is_final=found.is_unmet,
        ways=", or ".join(str(way) for way in found.ways),
        free_bytes=found.free_bytes,
    )


def estimates_of(found: Plan | None) -> list[Estimate]:
    return found.estimates if found else []

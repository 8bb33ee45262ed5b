"""What a planner is asked, what it answers, and of which workers it is asked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Estimate, Intent, ModelCard, Profile, Stage
from controller.deployments.decisions import instance_at
from controller.deployments.picture import Device, Picture
from controller.deployments.profiling import profiles_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The first feasible configuration of the intent's order, and where it goes."""

    estimate: Estimate
    stages: list[Stage]
    blocks: int = 0
    current: Estimate | None = None  # of the question's `current`, from the same profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
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
    devices: list[Device]
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


Planner = Callable[[Question], Chosen | Refused]


def question_of(deployment: Deployment, devices: list[Device], contents: Contents) -> Question | None:
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


def can_take(device: Device, model: str, contents: Contents) -> bool:
    return not why_not_taken(device, model, contents)


def why_not_taken(device: Device, model: str, contents: Contents) -> str:
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
    deployment: Deployment, contents: Contents, picture: Picture, plan: Planner
) -> Chosen | Refused | None:
    """Whether there were room for it if nothing else were deployed. None: that is not known."""
    devices = [device for device in picture.workers.values() if device.takes_orders]
    question = question_of(deployment, devices, contents)
    if question is None or any(device.pages is None for device in devices):
        return None
    gone = {card.id for device in devices for card in device.card.instances if card.deployed}
    gone |= {instance_at(one, worker) for one in contents.deployments.values() for worker in one.epochs}
    return plan(replace(question, gone=frozenset(gone)))

"""From pages and cards to what placing asks for, and its answer in the words of a deployment. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from bus.deployments import Configuration, Estimate, Intent, Profile
from controller.deployments.picture import Device
from controller.deployments.questions import Chosen, Question, Refused
from controller.deployments.room import Room
from controller.intents import fitting, placement
from controller.intents.estimates import estimate_all
from controller.intents.intents import judge, name_of, preference
from controller.intents.planning import Plan, plan

MAX_STAGES = 4
DEGREES = (1, 2, 4)
NOT_CUT = "the weights cannot be cut for this degree (worker.max_tp, the number of KV heads)"
NO_GROUP = "workers would not form a group for it"


def planned(
    question: Question,
    room: Room,
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
    devices: Sequence[Device],
    room: Room,
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


def _freed_bytes(device: Device, question: Question, room: Room) -> int:
    """Idle KV is counted as free already."""
    return sum(
        one.weight_bytes + one.kv_kept_bytes
        for one in room.tenants
        if one.instance in question.gone and device.card.id in one.workers
    )


def _held(device: Device, room: Room) -> set[str]:
    return {card.id for card in device.card.instances} | room.held.get(device.card.id, frozenset())


def _shapes(question: Question, profile: Profile, devices: Sequence[Device]) -> tuple[list[int], int]:
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


def kept_by(profile: Profile, devices: Iterable[Device]) -> Profile:
    """Of the precisions that all these workers keep."""
    kept = set.intersection(*(set(device.card.variants) for device in devices))
    return replace(
        profile,
        latency=[one for one in profile.latency if one.configuration.precision in kept],
        memory=[one for one in profile.memory if one.configuration.precision in kept],
    )


def answer_of(found: Plan | None, current: Configuration | None = None) -> Chosen | Refused:
    """`current`: how it is served already."""
    if found is None:
        return Refused(reason="no worker of a kind that was measured takes orders")
    if found.chosen is not None:
        now = next((one for one in found.estimates if one.configuration == current), None)
        return Chosen(estimate=found.chosen, stages=found.stages, blocks=found.blocks, current=now)
    best = f"{name_of(found.best)} " if found.best and not found.is_unmet else ""
    return Refused(
        reason=f"{best}{found.reason}",
        is_final=found.is_unmet,
        ways=", or ".join(str(way) for way in found.ways),
        free_bytes=found.free_bytes,
    )


def estimates_of(found: Plan | None) -> list[Estimate]:
    return found.estimates if found else []

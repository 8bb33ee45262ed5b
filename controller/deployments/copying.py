"""The deployments that the planner can copy, and the copies there are. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bus.catalogue import Contents
from bus.deployments import Deployment
from bus.groups import natural
from controller.deployments.observation import Observation
from controller.deployments.planner import Situation
from controller.morphing.copies import Copies
from controller.planning.plan import Plan

ACTIVE: Final = ("waiting", "loading", "serving")
LONGEST_WAIT_MS: Final = 30_000  # a copy is of use soon or not at all


def copies_of(contents: Contents, seen: Observation) -> dict[str, Copies]:
    """Return by model what can be copied and was; models that workers serve by their settings are no part."""
    now, found = Situation(contents, seen, lambda question: Plan()), dict[str, Copies]()
    there = [one for one in contents.deployments.values() if one.state in ACTIVE]
    for model in dict.fromkeys(one.model for one in there):
        of_model = [one for one in there if one.model == model]
        copies = [one for one in of_model if one.copies]
        originals = [one for one in of_model if not one.copies and one.state == "serving"]
        one = Copies(refusal="no deployment serves it")
        if originals:
            one = _copyable(originals[0], copies, now, _waiting(there))
        made = {copy.instance: copy.id for copy in copies if copy.state == "serving"}
        unwanted = {copy.id: why for copy in copies if (why := _why_unwanted(copy, there, seen.now_ms))}
        found[model] = replace(one, made=made, unwanted=unwanted)
    return found


def _copyable(original: Deployment, copies: list[Deployment], now: Situation, waiting: str) -> Copies:
    shape = original.configuration
    if waiting:
        return Copies(refusal=f"{waiting} waits for a place")
    if shape is None or shape.num_devices > 1:
        return Copies(refusal=f"{original.id} has several workers")
    if coming := next((one.id for one in copies if one.state != "serving"), ""):
        return Copies(refusal=f"{coming} is on its way")
    spares = sorted(
        (one.card.id for one in now.takers(original.model) if not one.card.instances), key=natural
    )
    if not spares:
        return Copies(refusal="no worker is free")
    intent = replace(original.intent, tp=shape.tp, pp=shape.pp, precision=shape.precision)
    return Copies(original=original.id, intent=intent, spares=tuple(spares))


def _why_unwanted(copy: Deployment, there: list[Deployment], now_ms: int) -> str:
    """Return why a copy must go at once; "": it may stay."""
    root = copy.copies.partition(".")[0]
    if not any(one.id.partition(".")[0] == root for one in there if not one.copies):
        return f"{copy.copies} is deployed no more"
    if copy.state == "waiting":
        return "it finds no place" if now_ms - copy.since_ms > LONGEST_WAIT_MS else ""
    return f"{waiting} waits for a place" if (waiting := _waiting(there)) else ""


def _waiting(there: list[Deployment]) -> str:
    """Return a deployment that waits for a place, other than a copy; "": none does."""
    return next((one.id for one in there if one.state == "waiting" and not one.copies), "")

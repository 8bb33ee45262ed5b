"""A model's way to its profiles: registered, profiling on an idle worker, profiled or failed. Pure.

One profile is wanted for every kind of device there is, one measured at a time. What is measured already, of
the same checkpoint, is not measured again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Measure, ModelCard, ProbePeer, Profile
from bus.messages import CancelMorph
from bus.precisions import PRECISIONS
from controller.deployments.decisions import MAX_ATTEMPTS, Command, Decision, measure_id, model_becomes
from controller.deployments.picture import Device, Picture

SILENT_MS = 900_000  # no news of a profile for so long, and it is stuck; all of it may take longer
PROMPT_TOKENS = [32, 128, 512]
BATCH_SIZES = [1, 4]


def profiles_of(contents: Contents, card: ModelCard) -> dict[str, Profile]:
    """By kind of device, those of the checkpoint as it was registered."""
    return {
        device: profile
        for (model, device), profile in contents.profiles.items()
        if model == card.name and profile.digest == card.digest
    }


def next_of_model(card: ModelCard, contents: Contents, picture: Picture) -> Decision | None:
    """None: nothing is to be done."""
    profiles = profiles_of(contents, card)
    if card.state == "profiling":
        return _measuring(card, profiles, picture)
    if card.state == "failed":
        return None
    return _unmeasured(card, contents, profiles, picture)


def _unmeasured(
    card: ModelCard, contents: Contents, profiles: Mapping[str, Profile], picture: Picture
) -> Decision | None:
    wanting = [device for device in picture.workers.values() if device.takes_orders]
    wanting = [device for device in wanting if device.kind not in profiles]
    if profiles and (not wanting or card.attempts >= MAX_ATTEMPTS):
        if card.state == "profiled":
            return None
        kinds = ", ".join(sorted(profiles))
        return model_becomes(replace(card, attempts=0), "profiled", picture.now_ms, f"measured on {kinds}")
    free = [device for device in wanting if not _is_taken(device, contents)]
    if not free or not picture.is_settled:
        return None
    chosen = min(free, key=lambda device: (device.load, device.card.id))
    return _order(card, chosen, _peer_of(chosen, contents, picture), picture.now_ms)


def _peer_of(chosen: Device, contents: Contents, picture: Picture) -> ProbePeer | None:
    """To measure with it what workers say to each other: one of its host, if there is one."""
    host = chosen.card.host
    others = [
        device
        for device in picture.workers.values()
        if device.card.id != chosen.card.id
        and device.kind == chosen.kind
        and device.takes_orders
        and device.card.link
        and not _is_taken(device, contents)
    ]
    if not others:
        return None
    card = min(others, key=lambda one: (one.card.host != host, one.load, one.card.id)).card
    return ProbePeer(worker=card.id, link=card.link, link_key=card.link_key, shares_host=card.host == host)


def _is_taken(device: Device, contents: Contents) -> bool:
    """It measures another model, or loads one: both would be measured wrong."""
    name = device.card.id
    measures = any(card.state == "profiling" and card.worker == name for card in contents.models.values())
    loads = any(one.state == "loading" and name in one.epochs for one in contents.deployments.values())
    return measures or loads


def _order(card: ModelCard, device: Device, peer: ProbePeer | None, now_ms: int) -> Decision:
    worker = device.card
    record = replace(
        card,
        state="profiling",
        worker=worker.id,
        epoch=worker.epoch,
        since_ms=now_ms,
        attempts=card.attempts + 1,
        progress=f"on {worker.id}",
    )
    command = Measure(
        id=measure_id(record),
        epoch=worker.epoch,
        model=card.name,
        path=card.path,
        digest=card.digest,
        precisions=list(PRECISIONS),
        prompt_tokens=PROMPT_TOKENS,
        batch_sizes=BATCH_SIZES,
        peer=peer,
    )
    return Decision(record=record, commands=((worker.id, command),), told=True)


def _measuring(card: ModelCard, profiles: Mapping[str, Profile], picture: Picture) -> Decision | None:
    device = picture.workers.get(card.worker)
    if device is not None and device.kind in profiles:
        kinds = ", ".join(sorted(profiles))
        return model_becomes(replace(card, attempts=0), "profiled", picture.now_ms, f"measured on {kinds}")
    if why := _why_over(card, picture):
        return _failed(card, why, has_profile=bool(profiles), now_ms=picture.now_ms)
    if picture.now_ms - max(card.since_ms, picture.heard.get(measure_id(card), 0)) > SILENT_MS:
        why = f"{card.worker} has told nothing of its measurement for {SILENT_MS // 60_000} minutes"
        failed = _failed(card, why, has_profile=bool(profiles), now_ms=picture.now_ms)
        return replace(failed, commands=(cancel_of(card),))
    progress = picture.progress.get(measure_id(card), "")
    told = f"on {card.worker}: {progress}" if progress else card.progress
    return Decision(record=replace(card, progress=told)) if told != card.progress else None


def _why_over(card: ModelCard, picture: Picture) -> str:
    if complaint := picture.complaints.get(measure_id(card)):
        return f"{card.worker}: {complaint}"
    if picture.is_settled and (gone := picture.gone({card.worker: card.epoch})):
        return f"{gone} while it measured"
    return ""


def _failed(card: ModelCard, why: str, *, has_profile: bool, now_ms: int) -> Decision:
    if card.attempts < MAX_ATTEMPTS:
        return model_becomes(card, "registered", now_ms, f"{why}; it is measured again")
    if has_profile:
        return model_becomes(card, "profiled", now_ms, why)
    return model_becomes(card, "failed", now_ms, f"given up after {card.attempts} attempts: {why}")


def cancel_of(card: ModelCard) -> tuple[str, Command]:
    """For the worker that measures it: it would go on, and the next profile would wait behind this one."""
    name = measure_id(card)
    return card.worker, CancelMorph(id=f"{name}-cancel", epoch=card.epoch, morph_id=name)


def unowned(contents: Contents) -> Iterator[Decision]:
    """Profiles of models that were removed before they came."""
    for (model, _), profile in contents.profiles.items():
        if model not in contents.models:
            yield Decision(erased=profile)

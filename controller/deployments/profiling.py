"""A model's way to its profiles: registered, profiling on an idle worker, profiled or failed. Pure.

Every kind of device gets one profile, one at a time. A checkpoint that was measured is not measured again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Measure, ModelCard, ProbePeer, Profile
from bus.morphs import CancelMorph
from bus.policy import Slowdown
from bus.precisions import PRECISIONS, Precision, lowest
from controller.deployments.observation import Observation, WorkerView
from controller.deployments.transitions import MAX_ATTEMPTS, Command, Transition, measure_id, model_becomes
from controller.morphing.resting import Rest, Rests
from controller.planning.latency import slowdowns_of

SILENT_MS = 900_000  # a profile without news for so long is stuck; all of it may take longer
PROMPT_TOKENS = [32, 128, 512]
BATCH_SIZES = [1, 4]

SlowdownsByKind = Mapping[tuple[str, str], Mapping[Precision, Slowdown]]  # by model and kind of device


def profiles_of(contents: Contents, card: ModelCard) -> dict[str, Profile]:
    """Return the profiles of the checkpoint as it was registered, by kind of device."""
    return {
        device: profile
        for (model, device), profile in contents.profiles.items()
        if model == card.name and profile.digest == card.digest
    }


def next_of_model(card: ModelCard, contents: Contents, seen: Observation) -> Transition | None:
    """Return what is to be done for a model, if anything."""
    profiles = profiles_of(contents, card)
    if card.state == "profiling":
        return _measuring(card, profiles, seen)
    if card.state == "failed":
        return None
    there = (device for device in seen.workers.values() if device.takes_orders)
    wanting = [device for device in there if device.kind not in profiles]
    if profiles and (not wanting or card.attempts >= MAX_ATTEMPTS):
        return None if card.state == "profiled" else _profiled(card, profiles, seen)
    free = [device for device in wanting if not _is_taken(device, contents)]
    if not free or not seen.is_settled:
        return None
    chosen = min(free, key=lambda device: (device.load, device.card.id))
    return _order(card, chosen, _peer_of(chosen, contents, seen), seen.now_ms)


def _profiled(card: ModelCard, profiles: Mapping[str, Profile], seen: Observation) -> Transition:
    kinds = ", ".join(sorted(profiles))
    return model_becomes(replace(card, attempts=0), "profiled", seen.now_ms, f"measured on {kinds}")


def _peer_of(chosen: WorkerView, contents: Contents, seen: Observation) -> ProbePeer | None:
    """Return a worker to measure communication with, of the same host if there is one."""
    host = chosen.card.host
    linked = [one for one in seen.workers.values() if one.takes_orders and one.card.link]
    alike = [one for one in linked if one.kind == chosen.kind and one.card.id != chosen.card.id]
    others = [one for one in alike if not _is_taken(one, contents)]
    if not others:
        return None
    card = min(others, key=lambda one: (one.card.host != host, one.load, one.card.id)).card
    return ProbePeer(worker=card.id, link=card.link, link_key=card.link_key, shares_host=card.host == host)


def _is_taken(device: WorkerView, contents: Contents) -> bool:
    """Return True if it measures another model or loads one: both would be measured wrong."""
    name = device.card.id
    measures = any(card.state == "profiling" and card.worker == name for card in contents.models.values())
    loads = any(one.state == "loading" and name in one.epochs for one in contents.deployments.values())
    return measures or loads


def _order(card: ModelCard, device: WorkerView, peer: ProbePeer | None, now_ms: int) -> Transition:
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
    return Transition(record=record, commands=((worker.id, command),), announced=True)


def _measuring(card: ModelCard, profiles: Mapping[str, Profile], seen: Observation) -> Transition | None:
    device = seen.workers.get(card.worker)
    if device is not None and device.kind in profiles:
        return _profiled(card, profiles, seen)
    name = measure_id(card)
    if complaint := seen.complaints.get(name):
        return _failed(card, f"{card.worker}: {complaint}", bool(profiles), seen.now_ms)
    if seen.is_settled and (gone := seen.gone({card.worker: card.epoch})):
        return _failed(card, f"{gone} while it measured", bool(profiles), seen.now_ms)
    if seen.now_ms - max(card.since_ms, seen.heard.get(name, 0)) > SILENT_MS:
        why = f"{card.worker} has reported nothing on its measurement for {SILENT_MS // 60_000} minutes"
        return replace(_failed(card, why, bool(profiles), seen.now_ms), commands=(cancel_of(card),))
    progress = seen.progress.get(name, "")
    text = f"on {card.worker}: {progress}" if progress else card.progress
    return Transition(record=replace(card, progress=text)) if text != card.progress else None


def _failed(card: ModelCard, why: str, has_profile: bool, now_ms: int) -> Transition:
    if card.attempts < MAX_ATTEMPTS:
        return model_becomes(card, "registered", now_ms, f"{why}; it is measured again")
    if has_profile:
        return model_becomes(card, "profiled", now_ms, why)
    return model_becomes(card, "failed", now_ms, f"given up after {card.attempts} attempts: {why}")


def cancel_of(card: ModelCard) -> tuple[str, Command]:
    """Return the command to stop measuring: the next profile would wait behind this one."""
    name = measure_id(card)
    return card.worker, CancelMorph(id=f"{name}-cancel", epoch=card.epoch, morph_id=name)


def unowned(contents: Contents) -> Iterator[Transition]:
    """Erase profiles of models that were removed before they came."""
    for (model, _), profile in contents.profiles.items():
        if model not in contents.models:
            yield Transition(erased=profile)


def slowdowns_by_kind(contents: Contents) -> SlowdownsByKind:
    """Return the slowdowns of every model on every kind of device that it was measured on."""
    return {key: slowdowns_of(profile) for key, profile in contents.profiles.items()}


def rests_of(contents: Contents, slowdowns: SlowdownsByKind | None = None) -> Rests:
    """Return the shapes that serving deployments rest in: the reflexes leave others alone.

    slowdowns: by `slowdowns_by_kind`; without it none is known.
    """
    return {
        deployment.instance_at(worker): _rest(deployment, deployment.configuration, contents, slowdowns or {})
        for deployment in contents.deployments.values()
        if deployment.state == "serving" and deployment.configuration
        for worker in deployment.shown_by
    }


def _rest(
    deployment: Deployment, chosen: Configuration, contents: Contents, slowdowns: SlowdownsByKind
) -> Rest:
    """Return the shape at rest; under an intent's `max_loss` layers take precisions of known loss alone."""
    card = contents.models.get(deployment.model)
    by_kind = profiles_of(contents, card) if card else {}
    rest = Rest(
        precision=chosen.precision,
        tp=deployment.degree_by_transform,
        slowdowns=_slowest(slowdowns.get((deployment.model, kind), {}) for kind in by_kind),
    )
    most = deployment.intent.max_loss
    if most is None:
        return rest
    profiles = [*by_kind.values()]
    losses = [profile.loss for profile in profiles]
    known = [one for one in PRECISIONS if losses and all(one in of_kind for of_kind in losses)]
    lost = max((of_kind.get(chosen.precision, 0.0) for of_kind in losses), default=0.0)
    lost += max((profile.kv_loss_of(chosen.kv_dtype) or 0.0 for profile in profiles), default=0.0)
    return replace(rest, coarsest=lowest([chosen.precision, *known]), loss_left=max(0.0, most - lost))


def _slowest(found: Iterable[Mapping[Precision, Slowdown]]) -> dict[Precision, Slowdown]:
    """Return the slowest of several kinds of devices, for each precision."""
    slowest = dict[Precision, Slowdown]()
    for precision, one in ((name, one) for of_kind in found for name, one in of_kind.items()):
        before = slowest.get(precision, one)
        slowest[precision] = Slowdown(max(before.prompt, one.prompt), max(before.decode, one.decode))
    return slowest

"""Instances without a record, or with an outdated one. Pure.

A worker that lost its lease and came back gets its new epoch into the record. If Redis lost its data, a
record is made of the workers' cards, with the shape as the intent: cards do not show the intent.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bus.catalogue import Contents
from bus.deployments import Configuration, Deployment, Intent, ModelCard
from bus.groups import natural
from bus.messages import InstanceCard, Stage
from controller.deployments.observation import Observation
from controller.deployments.transitions import Transition, deployment_of

_DEPLOY = re.compile(r"(?P<deployment>[^-]+)-(?P<load>[0-9]+)-.+")  # `deploy_id`


def kept(deployment: Deployment, seen: Observation) -> Transition | None:
    """Note new epochs of a serving deployment's workers. What is divided ends with a lease."""
    if deployment.is_divided:
        return None
    epochs = dict(deployment.epochs)
    for worker in epochs:
        device = seen.workers.get(worker)
        card = device.instance(deployment.instance_at(worker)) if device and device.takes_orders else None
        if device and card and card.deployed == deployment.deploy_id(worker):
            epochs[worker] = device.card.epoch
    return Transition(record=replace(deployment, epochs=epochs)) if epochs != deployment.epochs else None


def folders_of_unknown(contents: Contents, seen: Observation) -> set[str]:
    """Return the folders of models that are deployed and not registered."""
    cards = [card for shown in _unknown(contents, seen).values() for card in shown]
    return {card.model_path for card in cards if card.model not in contents.models}


def adopted(contents: Contents, seen: Observation) -> Iterator[Transition]:
    """Write records of deployments that are served and were lost."""
    if not seen.is_settled:
        return
    for cards in _unknown(contents, seen).values():
        lead = cards[0]
        if record := _deployment_of(lead, _stages_of(cards), seen):
            model = _model_of(lead, seen)
            if model and model.name not in contents.models:
                contents = contents.with_record(model)
                yield Transition(record=model, announced=True)
            yield Transition(record=record, announced=True)


def _unknown(contents: Contents, seen: Observation) -> dict[str, list[InstanceCard]]:
    """Return by unknown deployment the instances of its last load that lead or are alone."""
    found: dict[tuple[str, int], list[InstanceCard]] = defaultdict(list)
    for device in seen.workers.values():
        for card in device.card.instances if device.takes_orders else ():
            match, leads = _DEPLOY.fullmatch(card.deployed), card.workers[:1] == [device.card.id]
            if match and leads and match["deployment"] not in contents.deployments:
                found[match["deployment"], int(match["load"])].append(card)
    return {name: sorted(found[name, load], key=lambda one: natural(one.id)) for name, load in sorted(found)}


def _stages_of(cards: Sequence[InstanceCard]) -> list[Stage]:
    """Return the stages. Several instances that are alone are a group whose members lost each other."""
    lead, workers = cards[0], [card.workers[0] for card in cards]
    if lead.stages:
        return lead.stages
    is_parted = len(workers) in lead.degrees and all(card.tp == card.pp == 1 for card in cards)
    return [Stage(workers=workers if is_parted else lead.workers, first=0, end=lead.num_layers)]


def _deployment_of(card: InstanceCard, stages: list[Stage], seen: Observation) -> Deployment | None:
    """Return the record; None without all its workers, or for a pipeline with unknown stages."""
    there = [seen.workers.get(worker) for stage in stages for worker in stage.workers]
    if len(stages) != card.pp or None in there:
        return None
    match = _DEPLOY.fullmatch(card.deployed)
    assert match
    tp = len(stages[0].workers)
    shape = Configuration(tp=tp, pp=card.pp, precision=card.precision, kv_dtype=card.kv_dtype)
    return Deployment(
        id=deployment_of(card.deployed),
        model=card.model,
        intent=Intent(tp=shape.tp, pp=shape.pp, precision=shape.precision, kv_dtype=shape.kv_dtype),
        state="serving",
        reason=f"{card.workers[0]} serves it; its record was lost, and its intent: it keeps its shape",
        configuration=shape,
        stages=stages,
        is_fixed=card.is_divided and tp > 1,
        instance=card.id,
        since_ms=seen.now_ms,
        loads=int(match["load"]),
        epochs={device.card.id: device.card.epoch for device in there if device},
    )


def _model_of(card: InstanceCard, seen: Observation) -> ModelCard | None:
    """Return the model's card; None if its folder is no model any more."""
    checkpoint = seen.checkpoints.get(card.model_path)
    if checkpoint is None:
        return None
    return ModelCard(
        name=card.model,
        path=card.model_path,
        digest=checkpoint.digest,
        num_layers=checkpoint.num_layers,
        state="registered",
        reason=f"{card.workers[0]} serves it; its record was lost",
        since_ms=seen.now_ms,
        context=checkpoint.context,
    )

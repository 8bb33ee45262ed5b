"""What an operator may order, from a body's bytes to a command. Every refusal names what there is instead."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Final, TypeVar

from pydantic import Field, ValidationError

from bus.messages import PARTS, Deploy, InstanceCard, Morph, Part, Resize, Retire, Swap, Transform, WorkerCard
from bus.precisions import Precision
from gateway.delivery.cluster import Cluster
from gateway.errors import ApiError, invalid, unavailable
from gateway.openai.json_body import json_object
from gateway.openai.params import MAX_COUNT, Body, between
from gateway.openai.problems import first_problem

MAX_LAYERS: Final = 4096  # named in one order
MAX_WAIT_S: Final = 600.0

B = TypeVar("B", bound=Body)

Seconds = Annotated[float, between(0, MAX_WAIT_S)]
Layer = Annotated[int, between(0, MAX_COUNT)]
Count = Annotated[int, between(1, MAX_COUNT)]


class SwapBody(Body):
    """Either `layers` or `count`. `wait_s`: how long the worker may wait for pages before it answers
    `deferred`."""

    precision: Precision
    layers: Annotated[list[Layer], Field(min_length=1, max_length=MAX_LAYERS)] | None = None
    count: Count | None = None
    parts: Annotated[list[Part], Field(min_length=1, max_length=len(PARTS))] | None = None  # None: both
    wait_s: Seconds = 0.0


class ResizeBody(Body):
    blocks: Count
    wait_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """An instance that can be morphed, and the worker that leads it."""

    worker: WorkerCard
    card: InstanceCard


def parse(kind: type[B], data: bytes) -> B:
    """Raises ApiError 400: no JSON object, an unknown field, a value of the wrong type or range."""
    fields = json_object(data)
    for name in fields:
        if name not in kind.model_fields:
            raise invalid(
                f"unknown field {name[:200]!r}; {meant(name, kind.model_fields)}", name[:200], "unknown_field"
            )
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise first_problem(error) from None


def meant(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or all that there is."""
    names = list(known)
    near = get_close_matches(name[:200], names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names) or 'none'}"


def find(cluster: Cluster, instance: str) -> Place:
    """Raises ApiError 404 for an instance that is not there, 503 for one that is still loading, 409 for one
    whose worker drains: it would leave before anybody had something of it."""
    places = {card.id: Place(worker, card) for worker, card in cluster.instances()}
    place = places.get(instance)
    if place is None:
        message = f"no instance {instance[:200]!r}; {_leader(cluster, instance) or meant(instance, places)}"
        raise ApiError(404, message, param="instance", code="instance_not_found")
    if place.worker.state == "loading":
        raise unavailable(f"{instance} is still loading ({place.worker.progress or 'no progress told yet'})")
    for name in place.card.workers or [place.worker.id]:
        worker = cluster.workers.get(name)
        if worker is not None and worker.state == "draining":
            message = (
                f"{name} is draining: it ends what it runs and leaves; {instance} is not changed any more"
            )
            raise ApiError(409, message, param="instance", code="worker_draining")
    return place


def _leader(cluster: Cluster, instance: str) -> str:
    """Of a member of a group: which instance it is now."""
    for worker, card in cluster.instances():
        for member in (cluster.workers.get(name) for name in card.workers):
            if member and any(one.id == instance for one in member.instances):
                return f"{member.id} is a part of {card.id}, which {worker.id} leads"
    return ""


def loss_without(cluster: Cluster, leaving: WorkerCard) -> str:
    """What nobody would serve once `leaving` has left; "" where other workers serve all that it serves."""
    if leaving.state == "draining":
        return ""
    models = {card.model for _, card in cluster.instances() if leaving.id in (card.workers or [leaving.id])}
    models |= {card.model for card in leaving.instances}
    staying = [one for one in cluster.workers.values() if one.id != leaving.id and one.state != "draining"]
    served = {
        card.model
        for worker in staying
        for card in worker.instances
        if card.pp == 1 or leaving.id not in card.workers
    }
    if lost := sorted(models - served):
        return (
            f"{leaving.id} is the last worker that serves {', '.join(lost)}: after it has left, requests "
            "wait for another worker until gateway.queue_timeout_s and then fail"
        )
    return "" if staying else f"{leaving.id} is the last worker: after it has left, nothing can be served"


def swap(place: Place, body: SwapBody, morph_id: str) -> Swap:
    """Raises ApiError 400."""
    card = place.card
    if (body.layers is None) == (body.count is None):
        given = "neither layers nor count is" if body.layers is None else "both layers and count are"
        raise invalid(f"{given} given; send either layers (their numbers) or count (how many more)", "layers")
    if card.pp > 1:
        raise invalid(
            f"{card.id} has stages, and keeps the precision it was deployed in: retire it, and deploy "
            f"{card.model} in another",
            "precision",
        )
    if body.precision not in card.variants:
        raise invalid(
            f"precision is {body.precision!r}, which {card.id} has no variant for; "
            f"its layers can be: {', '.join(card.variants)} (worker.variants)",
            "precision",
        )
    for layer in body.layers or []:
        if layer >= card.num_layers:
            raise invalid(f"layers names {layer}; {card.id} has layers 0 to {card.num_layers - 1}", "layers")
    if body.count is not None and body.count > card.num_layers:
        raise invalid(f"count is {body.count}; {card.id} has {card.num_layers} layers", "count")
    return Swap(
        id=morph_id,
        epoch=place.worker.epoch,
        instance=card.id,
        precision=body.precision,
        layers=sorted(set(body.layers or [])),
        count=body.count or 0,
        parts=[part for part in PARTS if body.parts is None or part in body.parts],
        wait_s=body.wait_s,
    )


def resize(place: Place, body: ResizeBody, morph_id: str) -> Resize:
    """Build the command. Raises ApiError 400 for fewer blocks than the longest sequence takes and for more
    than the memory could ever hold; whether the blocks can be had now is for the worker to say."""
    card = place.card
    if body.blocks < card.min_blocks:
        raise invalid(
            f"blocks is {body.blocks}; {card.id} needs at least {card.min_blocks} KV blocks: the "
            "longest sequence must fit",
            "blocks",
        )
    most = card.max_blocks * card.tp
    if most and body.blocks > most:
        raise invalid(
            f"blocks is {body.blocks}; the memory of {card.id} could hold at most {most} KV blocks, with "
            "every layer in its fewest bits",
            "blocks",
        )
    return Resize(
        id=morph_id,
        epoch=place.worker.epoch,
        instance=place.card.id,
        blocks=body.blocks,
        wait_s=body.wait_s,
    )


def in_words(command: Morph) -> str:
    """What was ordered, for people."""
    if isinstance(command, Transform):
        return f"tp {command.tp} on {', '.join(command.workers)}"
    if isinstance(command, Resize):
        return f"{command.blocks} KV blocks"
    if isinstance(command, Deploy):
        return f"serve {command.path} in {command.precision} precision"
    if isinstance(command, Retire):
        return "serve it no longer"
    which = f"layers {', '.join(map(str, command.layers))}" if command.layers else f"{command.count} more"
    only = "" if len(command.parts) == len(PARTS) else f", {command.parts[0]} only"
    return f"{which} to {command.precision}{only}"

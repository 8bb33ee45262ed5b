"""Orders for instances, from a body's bytes to a command. A refusal names what there is instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from bus.errors import meant
from bus.messages import PARTS, WorkerCard
from bus.morphs import (
    MORPHS,
    ManualOrder,
    Morph,
    MorphEntry,
    Resize,
    ResizeOrder,
    Swap,
    SwapOrder,
)
from gateway.delivery.cluster import Cluster, PlacedInstance
from gateway.errors import ApiError, invalid, not_found, unavailable
from gateway.openai.fields import Body
from gateway.openai.json_body import json_object
from gateway.openai.problems import first_problem
from gateway.operations.bodies import body_type

B = TypeVar("B", bound=Body)
OrderT = TypeVar("OrderT", bound=ManualOrder)


BODIES: Final[dict[type, type[Body]]] = {
    one.order: body_type(f"{one.name.title().replace('_', '')}Body", one.fields)
    for one in MORPHS
    if one.order
}


def parse(kind: type[B], data: bytes) -> B:
    """Validate a body. Raises ApiError 400: no JSON object, an unknown field, a wrong value."""
    return checked(kind, json_object(data))


def checked(kind: type[B], fields: Mapping[str, Any], within: str = "") -> B:
    """Validate fields, which errors name behind `within`. Raises ApiError 400 for a wrong name or value."""
    for name in fields:
        if name not in kind.model_fields:
            path = within + name[:200]
            raise invalid(f"unknown field {path!r}; {meant(name, kind.model_fields)}", path, "unknown_field")
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise first_problem(error, within) from None


def parse_order(kind: type[OrderT], data: bytes) -> OrderT:
    """Return the order that a body has. Raises ApiError 400, as `parse` does."""
    return kind(**parse(BODIES[kind], data).model_dump(exclude_none=True))


def find(cluster: Cluster, instance: str) -> PlacedInstance:
    """Return an instance that can be morphed. Raises ApiError: 404, 503 while it loads, 409 if it drains."""
    places = {one.card.id: one for one in cluster.instances()}
    place = places.get(instance)
    if place is None:
        raise not_found("instance", instance, _leader(cluster, instance) or meant(instance, places))
    if place.worker.state == "loading":
        progress = place.worker.progress or "no progress reported yet"
        raise unavailable(f"{instance} is still loading ({progress})")
    for name in place.members:
        worker = cluster.workers.get(name)
        if worker is not None and worker.state == "draining":
            message = f"{name} is draining: it finishes its requests and exits; {instance} keeps its shape"
            raise ApiError(409, message, param="instance", code="worker_draining")
    return place


def _leader(cluster: Cluster, instance: str) -> str:
    """Return which instance a member of a group is in; "" for a name that is none."""
    for worker, card in cluster.instances():
        for member in (cluster.workers.get(name) for name in card.workers):
            if member and any(one.id == instance for one in member.instances):
                return f"{member.id} is a part of {card.id}, which {worker.id} leads"
    return ""


def loss_without(cluster: Cluster, leaving: WorkerCard) -> str:
    """Return which models no worker would serve after `leaving` has exited; "" if others serve them all."""
    if leaving.state == "draining":
        return ""
    models = {card.model for _, card in cluster.instances() if leaving.id in card.members(leaving.id)}
    models |= {card.model for card in leaving.instances}
    staying = [one for one in cluster.workers.values() if one.id != leaving.id and one.state != "draining"]
    served = {
        card.model
        for worker in staying
        for card in worker.instances
        if not card.is_divided or leaving.id not in card.workers
    }
    if lost := sorted(models - served):
        return (
            f"{leaving.id} is the last worker that serves {', '.join(lost)}: after it has left, requests "
            "wait for another worker, at most gateway.queue_timeout_s, and then fail"
        )
    return "" if staying else f"{leaving.id} is the last worker: after it has left, nothing can be served"


def swap(place: PlacedInstance, body: SwapOrder, morph_id: str) -> Swap:
    """Build the command. Raises ApiError 400 for layers or a precision that the instance does not have."""
    card = place.card
    if (body.layers is None) == (body.count is None):
        given = "neither layers nor count is" if body.layers is None else "both layers and count are"
        raise invalid(f"{given} given; send either layers (their numbers) or count (how many more)", "layers")
    if body.precision not in card.variants:
        is_fixed = "full" not in card.variants
        why = "its checkpoint is quantised and has one precision" if is_fixed else "worker.variants"
        raise invalid(
            f"precision is {body.precision!r}, which {card.id} has no variant for; "
            f"its layers can be: {', '.join(card.variants)} ({why})",
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


def resize(place: PlacedInstance, body: ResizeOrder, morph_id: str) -> Resize:
    """Build the command. Raises ApiError 400 for blocks that can never be right; the worker does the rest."""
    card = place.card
    least, most = card.min_blocks, card.most_blocks
    if body.blocks < least:
        why = f"{card.id} needs at least {least} KV blocks: the longest sequence must fit"
        raise invalid(f"blocks is {body.blocks}; {why}", "blocks")
    if most and body.blocks > most:
        why = f"the memory of {card.id} could hold at most {most} KV blocks"
        raise invalid(f"blocks is {body.blocks}; {why}, with every layer in its fewest bits", "blocks")
    return Resize(
        id=morph_id, epoch=place.worker.epoch, instance=card.id, blocks=body.blocks, wait_s=body.wait_s
    )


# Kinds of morphs whose orders need more than a copy of their fields.
_BUILDERS: Final[dict[str, Callable[[PlacedInstance, Any, str], Morph]]] = {"swap": swap, "resize": resize}


def command_of(kind: MorphEntry, place: PlacedInstance, order: Any, morph_id: str) -> Morph:
    """Build the command. Raises ApiError 400 for an order that can never be carried out."""
    if build := _BUILDERS.get(kind.name):
        return build(place, order, morph_id)
    return kind.command(id=morph_id, epoch=place.worker.epoch, instance=place.card.id, **asdict(order))

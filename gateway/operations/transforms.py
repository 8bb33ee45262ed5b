"""Orders to change tensor parallelism: which workers take part, in which steps, and why not. Pure.

The workers of an order end in groups of one degree, whatever they are in now.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from operator import attrgetter
from typing import Final

from bus.errors import meant
from bus.groups import joined
from bus.messages import InstanceCard, WorkerCard
from bus.morphs import STANDS_S, Swap, Transform, TransformOrder
from bus.policy import Policy
from gateway.delivery.cluster import Cluster, PlacedInstance
from gateway.errors import ApiError, invalid, not_found
from gateway.morphs import MorphRecord
from gateway.operations.levelling import ShapeStep, SwapStep, with_equal_layers
from gateway.operations.steps import DegreeStep, plan_steps


def plan(cluster: Cluster, body: TransformOrder, policy: Policy, now: float) -> tuple[str, list[ShapeStep]]:
    """Return the model and the steps from the groups there are to those of the order.

    Workers whose layers differ get equal ones before they merge.

    An order that changes nothing is one step, so that a worker says so. Raises ApiError: 404 for an unknown
    worker, 409 for one that loads, drains or is changing its group, 400 for what makes no group.
    """
    named = _members(cluster, body)
    places, names = list(named.values()), list(named)
    groups = _groups(cluster, named)
    _check_alike(places)
    _check_links([place for place in places if body.tp > len(place.members)], body.tp)
    degrees = _check_degree([place.card for place in places], body.tp)
    _check_count(groups, names, body.tp)
    steps = plan_steps(groups, names, body.tp, degrees, places[0].card.kv_heads)
    model = places[0].card.model
    if not steps:
        return model, [DegreeStep(joined(groups), body.tp)]
    return model, with_equal_layers(cluster, named, groups, steps, policy, now)


def command(
    cluster: Cluster, model: str, step: ShapeStep, body: TransformOrder, morph_id: str
) -> tuple[PlacedInstance, Transform | Swap]:
    """Return the order of one step and where it goes. Raises ApiError 404, 409 if a worker is gone."""
    places = [place_of(cluster, name, model) for name in step.workers]
    leader = places[0]
    if isinstance(step, SwapStep):
        epoch, halves = leader.worker.epoch, list(step.halves)
        return leader, Swap(
            id=morph_id,
            epoch=epoch,
            instance=leader.card.id,
            halves=halves,
            wait_s=body.wait_s,
            stands_s=STANDS_S,
        )
    return leader, Transform(
        id=morph_id,
        epoch=leader.worker.epoch,
        instance=leader.card.id,
        workers=list(step.workers),
        epochs={place.worker.id: place.worker.epoch for place in places},
        tp=step.tp,
        layers_per_step=body.layers_per_step or 0,
        wait_s=body.wait_s,
    )


def place_of(cluster: Cluster, name: str, model: str) -> PlacedInstance:
    worker = _worker(cluster, name)
    return PlacedInstance(worker, _card(worker, model))


def layer_degrees(card: InstanceCard, transform: MorphRecord | None) -> list[int]:
    """Return the degree of every layer: during a transform as last reported, the last layers first."""
    numbers = transform.numbers if transform else {}
    if not {"layers_done", "tp_before", "tp_after"} <= numbers.keys():
        return [card.tp] * card.num_layers
    num_done = int(numbers["layers_done"])
    return [int(numbers["tp_before"])] * (card.num_layers - num_done) + [int(numbers["tp_after"])] * num_done


def _members(cluster: Cluster, body: TransformOrder) -> dict[str, PlacedInstance]:
    """Return the named workers with their instances, in the order of the body."""
    names = body.workers or []
    if twice := [name for name in names if names.count(name) > 1]:
        raise _wrong_workers(f"workers names {twice[0][:200]!r} more than once")
    workers = [_worker(cluster, name) for name in names]
    _check_stages(cluster, body)
    model = body.model or _common_model(workers)
    return {worker.id: PlacedInstance(worker, _card(worker, model)) for worker in workers}


def _check_stages(cluster: Cluster, body: TransformOrder) -> None:
    """Refuse workers of a pipeline, which keeps the shape it was deployed in."""
    for _, card in cluster.instances():
        theirs = {worker for stage in card.stages for worker in stage.workers} & set(body.workers or ())
        if card.is_divided and theirs and body.model in (None, card.model):
            raise _wrong_workers(
                f"{', '.join(sorted(theirs))}: there are stages of {card.id}, which keeps the shape it was "
                f"deployed in: retire it, and deploy {card.model} in another"
            )


def _worker(cluster: Cluster, name: str) -> WorkerCard:
    worker = cluster.workers.get(name)
    if worker is None:
        raise not_found("worker", name, meant(name, cluster.workers), "workers")
    if worker.state != "serving":
        how_far = f" ({worker.progress})" if worker.state == "loading" and worker.progress else ""
        message = f"{name} is {worker.state}{how_far}; only workers that serve change their degree"
        raise ApiError(409, message, param="workers", code=f"worker_{worker.state}")
    return worker


def _common_model(workers: Sequence[WorkerCard]) -> str:
    served = [{card.model for card in worker.instances} for worker in workers]
    common = sorted(set.intersection(*served))
    if len(common) == 1:
        return common[0]
    if common:
        raise invalid(f"these workers serve {', '.join(common)}; say which as model", "model")
    each = zip(workers, served, strict=True)
    serves = (f"{worker.id} serves {', '.join(sorted(models)) or 'none'}" for worker, models in each)
    raise _wrong_workers(f"these workers have no model in common: {'; '.join(serves)}")


def _card(worker: WorkerCard, model: str) -> InstanceCard:
    for card in worker.instances:
        if card.model == model:
            return card
    served = sorted({card.model for card in worker.instances})
    raise invalid(f"{worker.id} does not serve {model[:200]!r}; {meant(model, served)}", "model")


def _groups(cluster: Cluster, named: dict[str, PlacedInstance]) -> list[tuple[str, ...]]:
    """Return the groups of the named workers in their order. Raises ApiError 409 if cards differ."""
    groups = []
    for worker, place in named.items():
        groups.append(names := tuple(place.members))
        for name in names:
            if tuple(place_of(cluster, name, place.card.model).members) != names:
                message = (
                    f"the cards of {worker} and {name} show different groups: a change of their degree "
                    "is under way; try again when it has ended"
                )
                raise ApiError(409, message, param="workers", code="shape_changing")
    return list(dict.fromkeys(groups))


def _check_alike(members: Sequence[PlacedInstance]) -> None:
    first = members[0]
    for other, (what, trait) in product(members[1:], _TRAITS.items()):
        if (one := trait(first)) != (another := trait(other)):
            differ = f"{first.worker.id} has {one}, {other.worker.id} has {another}"
            raise _wrong_workers(f"the workers of a group share one {what}: {differ}")


_TRAITS: Final = {
    "host": attrgetter("worker.host"),
    "kind of device": attrgetter("worker.kind"),
    "page size": attrgetter("worker.page_bytes"),
    "dtype": attrgetter("card.dtype"),
    "number of layers": attrgetter("card.num_layers"),
    "vocabulary size": attrgetter("card.vocab_size"),
    "block size": attrgetter("card.block_tokens"),
}


def _check_links(joining: Sequence[PlacedInstance], tp: int) -> None:
    for place in joining:
        worker, model = place.worker, place.card.model
        if worker.link and place.card.degrees != [1]:
            continue
        models = sorted({card.model for card in worker.instances})
        if len(models) > 1:
            raise _wrong_workers(
                f"{worker.id} serves {', '.join(models)}, and a worker of several models joins no group: "
                f"retire the others, or deploy {model} with tp {tp} onto workers without a model"
            )
        if not worker.link:
            raise _wrong_workers(f"{worker.id} joins no group: its worker.group_host is empty")


def _check_degree(cards: Sequence[InstanceCard], tp: int) -> list[int]:
    degrees = sorted(set.intersection(*(set(card.degrees) for card in cards)))
    for card in cards:
        if card.kv_heads and card.kv_heads % tp and tp % card.kv_heads:
            why = f"neither divides the {card.kv_heads} KV heads of {card.model} nor is a multiple of them"
            break
    else:
        if tp in degrees:
            return degrees
        why = (
            "the weights were not laid out for when they were loaded (worker.max_tp, or a number of heads or "
            "experts)"
        )
    raise invalid(f"tp is {tp}, which {why}; allowed is: {', '.join(map(str, degrees))}", "tp")


def _check_count(groups: Sequence[tuple[str, ...]], named: Sequence[str], tp: int) -> None:
    if len(named) % tp == 0:
        return
    if len(groups) == 1 and len(named) > tp:
        why = f"the group of {', '.join(groups[0])} cannot be parted into equal groups"
        raise invalid(f"tp is {tp}; {why}", "tp")
    too = f"{len(named)} are {'too few' if len(named) < tp else 'too many'}: {', '.join(named)}"
    raise _wrong_workers(f"a group of degree {tp} takes {tp} workers; {too}")


def _wrong_workers(message: str) -> ApiError:
    return invalid(message, "workers")

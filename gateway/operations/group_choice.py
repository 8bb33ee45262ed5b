"""The workers of a transform whose order names none: a group to split, or the least loaded ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bus.messages import InstanceCard, WorkerCard
from bus.morphs import TransformOrder
from gateway.delivery.cluster import Cluster, PlacedInstance
from gateway.errors import ApiError, invalid

Load = Callable[[WorkerCard, InstanceCard], float]  # requests; infinite without a report: it is not idle


def with_workers(cluster: Cluster, order: TransformOrder, load: Load) -> TransformOrder:
    """Return the order with its workers and their model. Raises ApiError 400 where the choice is not clear.

    With `instance` it takes part; `model` limits the choice.
    """
    try:
        workers, model = _choose(cluster, order, load)
    except ApiError as problem:
        away = (one for one in cluster.instances() if one.worker.state != "serving")
        others = [f"; {one.card.id} is {one.worker.state}" for one in away]
        raise invalid(f"{problem.message}{''.join(others)}", problem.param) from None
    return replace(order, workers=workers, model=model)


def _choose(cluster: Cluster, order: TransformOrder, load: Load) -> tuple[list[str], str]:
    serving = [one for one in cluster.instances() if one.worker.state == "serving"]
    of_model = [one for one in serving if order.model in (None, one.card.model)]
    there = [one for one in of_model if not one.card.is_divided] or of_model  # stages are refused by the plan
    named = [one for one in there if order.instance in (None, one.card.id)]
    if not named:
        what = f"instance {order.instance}" if of_model else f"instance of {order.model or 'any model'}"
        raise invalid(f"no {what} serves{_names(there or serving)}", "instance" if of_model else "model")
    models = sorted({one.card.model for one in named})
    if len(models) > 1:
        raise invalid(f"say which model; there are: {', '.join(models)}", "model")
    if order.instance is None and all(one.card.tp == order.tp for one in there):
        first = there[0]
    else:
        first = named[0] if order.instance else _most_likely(there, order.tp, load)
    if first.card.tp >= order.tp or order.tp not in first.card.degrees or first.card.is_divided:
        return first.members, first.card.model
    return _joining(there, order.tp, first, load), first.card.model


def _most_likely(there: Sequence[PlacedInstance], tp: int, load: Load) -> PlacedInstance:
    """Return the only group above `tp`, or if all are below, the least loaded of the highest degree."""
    lower = [one for one in there if one.card.tp < tp]
    higher = [one for one in there if one.card.tp > tp]
    if lower and not higher:
        return min(lower, key=lambda one: (-one.card.tp, load(*one), one.card.id))
    if len(higher) == 1 and not lower:
        return higher[0]
    raise invalid(f"say which instance{_names(there)}", "instance")


def _joining(there: Sequence[PlacedInstance], tp: int, first: PlacedInstance, load: Load) -> list[str]:
    """Return the workers of `first` and of the least loaded instances of its host and degree."""
    card, host = first.card, first.worker.host
    alike = (card.model, card.tp, host)
    others = [one for one in there if (one.card.model, one.card.tp, one.worker.host) == alike]
    others = sorted((one for one in others if one != first), key=lambda one: (load(*one), one.card.id))
    taken = [first, *others[: tp // card.tp - 1]]
    if sum(one.card.tp for one in taken) != tp:
        count = f"{len(others)} other instance{'s' if len(others) != 1 else ''}"
        why = f"tp {tp} takes {tp} workers of one host; {host} has {count} of {card.model} at that degree"
        raise invalid(f"{card.id} is at tp {card.tp}, and {why}", "tp")
    return [name for one in sorted(taken, key=lambda one: one.card.id) for name in one.members]


def _names(places: Sequence[PlacedInstance]) -> str:
    listed = ", ".join(f"{one.card.id} (tp {one.card.tp})" for one in places)
    return f"; there are: {listed}" if listed else ""

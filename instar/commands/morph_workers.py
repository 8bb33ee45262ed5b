"""The workers of `instar morph tp` where they are not named.

They are a group to split, or the least loaded instances of one host. The gateway judges the order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instar.errors import InputError
from instar.output.tables import plural

Instance = Mapping[str, Any]  # as /admin/state returns it
SERVING = "serving"


def workers_for(
    state: Mapping[str, Any], tp: int, instance: str | None = None, model: str | None = None
) -> tuple[list[str], str]:
    """Return the workers and their model. `instance` takes part; `model` limits the choice.

    Raises InputError for a degree that cannot be, an ambiguous choice, or too few workers.
    """
    try:
        return _found(state, tp, instance, model)
    except InputError as problem:
        raise InputError(f"{problem}{_left_out(state['instances'])}") from None


def _found(
    state: Mapping[str, Any], tp: int, instance: str | None, model: str | None
) -> tuple[list[str], str]:
    serving = [one for one in state["instances"] if one["state"] == SERVING]
    hosts = {worker["id"]: str(worker["host"]) for worker in state["workers"]}
    candidates = [one for one in serving if model in (None, one["model"])]
    if not candidates:
        raise InputError(f"no instance of {model or 'any model'} serves; there are: {_ids(serving)}")
    candidates = _without_stages(candidates, instance)
    _check_models(candidates, serving, tp, instance)
    if instance is None and all(one["tp"] == tp for one in candidates):
        return list(candidates[0]["workers"]), candidates[0]["model"]
    _check_degree(candidates, tp)
    first = _named(candidates, instance) if instance else _most_likely(candidates, tp)
    if first["tp"] >= tp:
        return list(first["workers"]), first["model"]
    return _joined(candidates, hosts, tp, first), first["model"]


def _without_stages(candidates: Sequence[Instance], instance: str | None) -> list[Instance]:
    """Return the instances without pipeline stages. Raises InputError if only those with stages are meant."""
    left = [one for one in candidates if one.get("pp", 1) == 1]
    meant = [one for one in candidates if instance in (None, one["id"])]
    if meant and not [one for one in meant if one in left]:
        raise InputError(
            f"{meant[0]['id']} has stages and keeps the shape it was deployed in: retire it "
            f"(`instar deployments` shows its id), and deploy {meant[0]['model']} in another"
        )
    return left


def _check_models(
    candidates: Sequence[Instance], serving: Sequence[Instance], tp: int, instance: str | None
) -> None:
    """Raise InputError for an ambiguous model, and for a group of a worker with several models."""
    models = sorted({str(one["model"]) for one in candidates})
    if instance is None and len(models) > 1:
        raise InputError(f"say which model (--model); there are: {', '.join(models)}")
    meant = [one for one in candidates if instance in (None, one["id"])]
    beside = {one["id"]: _beside(one, serving) for one in meant}
    if tp > 1 and meant and all(beside.values()):
        first = meant[0]
        raise InputError(
            f"{first['workers'][0]} serves {', '.join([str(first['model']), *beside[first['id']]])}, and a "
            "worker of several models joins no group: retire the others (`instar deployments` shows what was "
            f"deployed), or deploy {first['model']} with --tp {tp} onto workers without a model"
        )


def _beside(one: Instance, serving: Sequence[Instance]) -> list[str]:
    """Return the other models on the workers of `one`."""
    others = {str(other["model"]) for other in serving if set(other["workers"]) & set(one["workers"])}
    return sorted(others - {str(one["model"])})


def _check_degree(candidates: Sequence[Instance], tp: int) -> None:
    """Raise InputError for a degree that the model's weights do not allow."""
    allowed = sorted({degree for one in candidates for degree in one.get("degrees") or ()})
    if allowed and tp not in allowed:
        model, those = candidates[0]["model"], ", ".join(map(str, allowed))
        raise InputError(f"{model} cannot be served at tp {tp}; allowed is: {those}")


def _left_out(instances: Sequence[Instance]) -> str:
    """Return `; demo@w1 is draining` for instances that are shown but do not count."""
    return "".join(f"; {one['id']} is {one['state']}" for one in instances if one["state"] != SERVING)


def _named(serving: Sequence[Instance], instance: str) -> Instance:
    for one in serving:
        if one["id"] == instance:
            return one
    raise InputError(f"no instance {instance} serves; there are: {_ids(serving)}")


def _most_likely(serving: Sequence[Instance], tp: int) -> Instance:
    """Return the only group above `tp`, or if all are below, the least loaded of the highest degree."""
    lower = [one for one in serving if one["tp"] < tp]
    higher = [one for one in serving if one["tp"] > tp]
    is_one_model = len({one["model"] for one in serving}) == 1
    if is_one_model and lower and not higher:
        return min(lower, key=lambda one: (-one["tp"], _load(one), one["id"]))
    if is_one_model and len(higher) == 1 and not lower:
        return higher[0]
    raise InputError(f"say which instance (--instance); there are: {_ids(serving)}")


def _joined(instances: Sequence[Instance], hosts: Mapping[str, str], tp: int, first: Instance) -> list[str]:
    """Return the workers of `first` and of the least loaded instances of its host and degree."""

    def is_neighbour(one: Instance) -> bool:
        traits = [(each["model"], each["tp"], hosts.get(each["workers"][0])) for each in (one, first)]
        return one["id"] != first["id"] and traits[0] == traits[1]

    neighbours = sorted(filter(is_neighbour, instances), key=lambda one: (_load(one), one["id"]))
    taken = [first, *neighbours[: max(0, tp // first["tp"] - 1)]]
    if sum(one["tp"] for one in taken) != tp:
        host = hosts.get(first["workers"][0], "its host")
        raise InputError(
            f"{first['id']} is at tp {first['tp']}, and tp {tp} takes {tp} workers of one host; {host} has "
            f"{plural(len(neighbours), 'other instance')} of {first['model']} at that degree"
        )
    return [worker for one in sorted(taken, key=lambda one: str(one["id"])) for worker in one["workers"]]


def _load(one: Instance) -> float:
    """Return the requests of `one`. An instance that has not reported is not idle."""
    counts = one.get("running"), one.get("waiting")
    return float("inf") if None in counts else float(sum(count or 0 for count in counts))


def _ids(instances: Sequence[Instance]) -> str:
    return ", ".join(f"{one['id']} (tp {one['tp']})" for one in instances) or "none"

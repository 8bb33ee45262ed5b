"""The workers of `instar morph tp` where none are named: a group to split, or the least loaded ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from instar.errors import InputError
from instar.output.tables import plural

State = Mapping[str, Any]  # the answer of /admin/state
Instance = Mapping[str, Any]  # one of its instances
SERVING = "serving"


def workers_for(
    state: State, tp: int, instance: str | None = None, model: str | None = None
) -> tuple[list[str], str]:
    """Return the workers and their model. `instance` takes part; `model` limits the choice.

    Raises InputError for a degree that cannot be, an ambiguous choice, or too few workers.
    """
    try:
        return _choose(state, tp, instance, model)
    except InputError as problem:
        others = [f"; {one['id']} is {one['state']}" for one in state["instances"] if one["state"] != SERVING]
        raise InputError(f"{problem}{''.join(others)}") from None


def _choose(state: State, tp: int, instance: str | None, model: str | None) -> tuple[list[str], str]:
    serving = [one for one in state["instances"] if one["state"] == SERVING]
    of_model = [one for one in serving if model in (None, one["model"])]
    candidates = [one for one in of_model if one.get("pp", 1) == 1]
    named = [one for one in candidates if instance in (None, one["id"])]
    if not named:
        raise InputError(_nothing_to_change(of_model, serving, instance, model))
    _check_models(named, serving, tp)
    if instance is None and all(one["tp"] == tp for one in candidates):
        return list(candidates[0]["workers"]), candidates[0]["model"]
    allowed = sorted({degree for one in candidates for degree in one.get("degrees") or ()})
    if allowed and tp not in allowed:
        degrees = ", ".join(map(str, allowed))
        raise InputError(f"{candidates[0]['model']} cannot be served at tp {tp}; allowed is: {degrees}")
    first = named[0] if instance else _most_likely(candidates, tp)
    if first["tp"] >= tp:
        return list(first["workers"]), first["model"]
    hosts = {worker["id"]: str(worker["host"]) for worker in state["workers"]}
    return _joined(candidates, hosts, tp, first), first["model"]


def _nothing_to_change(
    of_model: Sequence[Instance], serving: Sequence[Instance], instance: str | None, model: str | None
) -> str:
    """Return why no instance can change its degree: those with pipeline stages keep their shape."""
    if not of_model:
        return f"no instance of {model or 'any model'} serves{_others(serving)}"
    for one in of_model:
        if instance in (None, one["id"]):
            return (
                f"{one['id']} has stages and keeps the shape it was deployed in: retire it "
                f"(`instar deployments` shows its id), and deploy {one['model']} in another"
            )
    return f"no instance {instance} serves{_others([one for one in of_model if one.get('pp', 1) == 1])}"


def _check_models(named: Sequence[Instance], serving: Sequence[Instance], tp: int) -> None:
    """Raise InputError for an ambiguous model, and for a group of workers with several models."""
    models = sorted({str(one["model"]) for one in named})
    if len(models) > 1:
        raise InputError(f"say which model (--model); there are: {', '.join(models)}")

    def others(one: Instance) -> list[str]:
        shared = (other for other in serving if set(other["workers"]) & set(one["workers"]))
        return sorted({str(other["model"]) for other in shared} - {str(one["model"])})

    if tp > 1 and all(map(others, named)):
        first, model = named[0], str(named[0]["model"])
        raise InputError(
            f"{first['workers'][0]} serves {', '.join([model, *others(first)])}, and a worker of several "
            "models joins no group: retire the others (`instar deployments` shows what was deployed), or "
            f"deploy {model} with --tp {tp} onto workers without a model"
        )


def _most_likely(serving: Sequence[Instance], tp: int) -> Instance:
    """Return the only group above `tp`, or if all are below, the least loaded of the highest degree."""
    lower = [one for one in serving if one["tp"] < tp]
    higher = [one for one in serving if one["tp"] > tp]
    if lower and not higher:
        return min(lower, key=lambda one: (-one["tp"], _load(one), one["id"]))
    if len(higher) == 1 and not lower:
        return higher[0]
    raise InputError(f"say which instance (--instance){_others(serving)}")


def _joined(instances: Sequence[Instance], hosts: Mapping[str, str], tp: int, first: Instance) -> list[str]:
    """Return the workers of `first` and of the least loaded instances of its host and degree."""

    def kind(one: Instance) -> tuple[Any, ...]:
        return one["model"], one["tp"], hosts.get(one["workers"][0])

    neighbours = [one for one in instances if one["id"] != first["id"] and kind(one) == kind(first)]
    neighbours.sort(key=lambda one: (_load(one), one["id"]))
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


def _others(instances: Sequence[Instance]) -> str:
    listed = ", ".join(f"{one['id']} (tp {one['tp']})" for one in instances)
    return f"; there are: {listed}" if instances else ""

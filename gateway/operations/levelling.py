"""The swaps before a merge by hand: workers with unlike layers form no group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bus.groups import Members, parted
from bus.messages import InstanceCard, InstanceTelemetry
from bus.morphs import HalfOrder
from bus.policy import Policy
from bus.shapes import common_shape, loss_of_kv
from gateway.delivery.cluster import Cluster, PlacedInstance
from gateway.errors import ApiError
from gateway.operations.steps import DegreeStep


@dataclass(frozen=True, slots=True)
class SwapStep:
    """Halves of one instance that get another precision; the first of `workers` leads it."""

    workers: Members
    halves: tuple[HalfOrder, ...]

    def __str__(self) -> str:
        precisions = ", ".join(dict.fromkeys(one.precision for one in self.halves))
        return f"{len(self.halves)} halves of layers to {precisions} on {', '.join(self.workers)}"


ShapeStep = DegreeStep | SwapStep


def with_equal_layers(
    cluster: Cluster,
    places: dict[str, PlacedInstance],
    groups: Iterable[Members],
    steps: Sequence[DegreeStep],
    policy: Policy,
    now: float,
) -> list[ShapeStep]:
    """Return the steps, with swaps before the first merge where layers differ. Raises ApiError 409.

    Without a report of the layers there is no swap, and the workers refuse to merge if these differ.
    What their KV caches lose in 8 bits is taken off the budget of loss.
    """
    first = next((number for number, step in enumerate(steps) if step.tp == len(step.workers)), len(steps))
    joining = {name for step in steps[first:] for name in step.workers}
    members = [one for one in _parts(groups, steps[:first]) if joining.issuperset(one)]
    places_of = [places[one[0]] for one in members]
    known = [(place.card, found) for place in places_of if (found := _report(cluster, place, now))]
    layers = [report.layers for _, report in known]
    if len(known) < len(members) or not all(layers) or len({tuple(one) for one in layers}) < 2:
        return list(steps)
    card = places_of[0].card
    in_force = policy.in_force() or Policy(loss_budget=policy.loss_budget).in_force() or policy
    resting = card.precision if card.deployed else card.best
    budget = max(0.0, in_force.most_loss - _lost_by_kv(known))
    common = common_shape(layers, card.losses, budget, resting=resting)
    if isinstance(common, str):
        raise ApiError(409, f"these workers form no group: {common}", param="workers", code="shapes_differ")
    swaps = [SwapStep(one, halves) for one, halves in zip(members, common.orders, strict=True) if halves]
    return [*steps[:first], *swaps, *steps[first:]]


def _parts(groups: Iterable[Members], parting: Sequence[DegreeStep]) -> list[Members]:
    """Return the groups after those steps that part some of them."""
    degrees = {step.workers: step.tp for step in parting}
    return [part for group in groups for part in parted(group, degrees.get(group, len(group)))]


def _report(cluster: Cluster, place: PlacedInstance, now: float) -> InstanceTelemetry | None:
    found = cluster.instance_metrics(place.card.id, place.worker.epoch, now)
    return found.last if found else None


def _lost_by_kv(members: Iterable[tuple[InstanceCard, InstanceTelemetry]]) -> float:
    return max(loss_of_kv(report.kv_precision, card.kv_dtype, card.kv_loss) for card, report in members)

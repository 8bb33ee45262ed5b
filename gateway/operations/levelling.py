"""The swaps before a merge by hand: workers with unlike layers form no group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bus.groups import Members, parted
from bus.messages import LayerShape
from bus.morphs import HalfOrder
from bus.policy import Policy
from bus.shapes import common_shape
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
    """
    first = next((number for number, step in enumerate(steps) if step.tp == len(step.workers)), len(steps))
    joining = {name for step in steps[first:] for name in step.workers}
    members = [one for one in _parts(groups, steps[:first]) if joining.issuperset(one)]
    layers = [found for one in members if (found := _layers(cluster, places[one[0]], now))]
    if len(layers) < len(members) or len({tuple(one) for one in layers}) < 2:
        return list(steps)
    card = places[members[0][0]].card
    in_force = policy.in_force() or Policy(loss_budget=policy.loss_budget).in_force() or policy
    resting = card.precision if card.deployed else card.best
    common = common_shape(layers, card.losses, in_force.most_loss, resting=resting)
    if isinstance(common, str):
        raise ApiError(409, f"these workers form no group: {common}", param="workers", code="shapes_differ")
    swaps = [SwapStep(one, halves) for one, halves in zip(members, common.orders, strict=True) if halves]
    return [*steps[:first], *swaps, *steps[first:]]


def _parts(groups: Iterable[Members], parting: Sequence[DegreeStep]) -> list[Members]:
    """Return the groups after those steps that part some of them."""
    degrees = {step.workers: step.tp for step in parting}
    return [part for group in groups for part in parted(group, degrees.get(group, len(group)))]


def _layers(cluster: Cluster, place: PlacedInstance, now: float) -> list[LayerShape]:
    found = cluster.instance_metrics(place.card.id, place.worker.epoch, now)
    return found.last.layers if found else []

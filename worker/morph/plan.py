"""Choose the halves of layers that a Swap is about. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bus.messages import PARTS, LayerShape, Part
from bus.morphs import Swap
from bus.precisions import Precision
from worker.morph.run import NotApplied


class Half(NamedTuple):
    """The attention or the FFN of one layer."""

    layer: int
    part: Part

    def __str__(self) -> str:
        return f"{self.part} of layer {self.layer}"


def order_towards(precision: Precision, order: Sequence[int], swapped: Sequence[int]) -> list[int]:
    """Return the order in which layers go to `precision`; towards full the last swapped goes first."""
    if precision != "full":
        return list(order)
    return [*reversed(swapped), *(layer for layer in order if layer not in swapped)]


def plan_swap(
    command: Swap, shape: Sequence[LayerShape], variants: Sequence[Precision], order: Sequence[int]
) -> dict[Half, Precision]:
    """Return the halves to swap, in order, and the precision of each.

    Halves that are there already are left out. Raises NotApplied for what this instance does not have.
    """
    _check(command, len(shape), variants)
    parts = [part for part in PARTS if part in command.parts]

    def is_there(half: Half, precision: Precision) -> bool:
        return shape[half.layer].of(half.part) == precision

    def missing(layer: int) -> list[Half]:
        halves = (Half(layer, part) for part in parts)
        return [half for half in halves if not is_there(half, command.precision)]

    if command.halves:
        orders = {Half(one.layer, one.part): one.precision for one in command.halves}
        return {half: precision for half, precision in orders.items() if not is_there(half, precision)}
    if command.layers:
        chosen = [layer for layer in order if layer in set(command.layers)]
    else:
        chosen = [layer for layer in order if missing(layer)][: command.count]
    return dict.fromkeys((half for layer in chosen for half in missing(layer)), command.precision)


def _check(command: Swap, num_layers: int, variants: Sequence[Precision]) -> None:
    orders = command.halves
    wanted = {one.precision for one in orders} if orders else {command.precision}
    if unknown := wanted - set(variants):
        raise NotApplied(
            "failed", f"this instance has no {min(unknown)} variant; it has {', '.join(variants)}"
        )
    layers = [*command.layers, *(one.layer for one in orders)]
    if wrong := [layer for layer in layers if not 0 <= layer < num_layers]:
        raise NotApplied("failed", f"there is no layer {wrong[0]}; the layers are 0 to {num_layers - 1}")
    given = bool(command.layers) + bool(command.count) + bool(orders)
    if given != 1 or command.count < 0:
        raise NotApplied(
            "failed",
            f"a swap names layers, halves, or a count of 1 or more; this one has "
            f"{len(command.layers)} layers, {len(orders)} halves and the count {command.count}",
        )
    if not command.parts or set(command.parts) - set(PARTS):
        raise NotApplied("failed", f"the parts are {command.parts}; name some of {', '.join(PARTS)}")

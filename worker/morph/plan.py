"""Choose the halves of layers that a Swap is about. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bus.messages import PARTS, LayerShape, Part, Swap
from bus.precisions import Precision
from worker.engine.shape import precision_of
from worker.morph.run import NotApplied


class Half(NamedTuple):
    """The attention or the FFN of one layer."""

    layer: int
    part: Part

    def __str__(self) -> str:
        return f"{self.part} of layer {self.layer}"


def plan_swap(
    command: Swap, shape: Sequence[LayerShape], variants: Sequence[Precision], order: Sequence[int]
) -> list[Half]:
    """Return the halves not in that precision yet, in `order`. Raises NotApplied for unknown ones."""
    _check(command, len(shape), variants)
    parts = [part for part in PARTS if part in command.parts]

    def missing(layer: int) -> list[Half]:
        wanted = command.precision
        return [Half(layer, part) for part in parts if precision_of(shape[layer], part) != wanted]

    if command.layers:
        chosen = [layer for layer in order if layer in set(command.layers)]
    else:
        chosen = [layer for layer in order if missing(layer)][: command.count]
    return [half for layer in chosen for half in missing(layer)]


def _check(command: Swap, num_layers: int, variants: Sequence[Precision]) -> None:
    if command.precision not in variants:
        raise NotApplied(
            "failed", f"this instance has no {command.precision} variant; it has {', '.join(variants)}"
        )
    if wrong := [layer for layer in command.layers if not 0 <= layer < num_layers]:
        raise NotApplied("failed", f"there is no layer {wrong[0]}; the layers are 0 to {num_layers - 1}")
    if bool(command.layers) == bool(command.count) or command.count < 0:
        raise NotApplied(
            "failed",
            f"a swap names layers or a count of 1 or more; this one has {len(command.layers)} layers and the "
            f"count {command.count}",
        )
    if not command.parts or set(command.parts) - set(PARTS):
        raise NotApplied("failed", f"the parts are {command.parts}; name some of {', '.join(PARTS)}")

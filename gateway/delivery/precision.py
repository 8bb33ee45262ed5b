"""Which precision do layers keep? Pure functions over what workers tell of their layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bus.messages import PRECISIONS, LayerShape, Precision


def lowest(layers: Iterable[LayerShape]) -> Precision:
    """The fewest bits of any half of a layer."""
    halves = (half for layer in layers for half in (layer.attention, layer.ffn))
    return max(halves, key=PRECISIONS.index, default="full")


def keeps(precision: Precision, floor: Precision) -> bool:
    """Whether it has at least as many bits."""
    return PRECISIONS.index(precision) <= PRECISIONS.index(floor)


def layers_below_full(layers: Sequence[LayerShape]) -> int:
    """A layer counts if either half is below."""
    return sum(layer != LayerShape() for layer in layers)

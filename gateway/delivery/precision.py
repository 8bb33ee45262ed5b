"""Which precision do layers keep? Pure functions over what workers tell of their layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from bus.messages import PRECISIONS, LayerShape, Precision

UNKNOWN: Final = "unknown"


def lowest(layers: Iterable[LayerShape]) -> Precision:
    """The fewest bits of any half of a layer."""
    halves = (half for layer in layers for half in (layer.attention, layer.ffn))
    return max(halves, key=PRECISIONS.index, default="full")


@lru_cache(maxsize=1024)  # asked for every token, and there are few shapes
def lowest_named(fingerprint: str) -> str:
    """The fewest bits in the name of a shape: `tp1-int8x1-int4x2.5` -> int4. `unknown` where it names none,
    as that of a worker that says nothing of its shape."""
    return next((name for name in reversed(PRECISIONS) if name in fingerprint), UNKNOWN)


def keeps(precision: Precision, floor: Precision) -> bool:
    """Whether it has at least as many bits."""
    return PRECISIONS.index(precision) <= PRECISIONS.index(floor)


def layers_below_full(layers: Sequence[LayerShape]) -> int:
    """A layer counts if either half is below."""
    return sum(layer != LayerShape() for layer in layers)

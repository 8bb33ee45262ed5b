"""Which precision do layers keep? Pure functions over what workers tell of their layers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from bus.messages import LayerShape
from bus.precisions import PRECISIONS, Precision, lowest

UNKNOWN: Final = "unknown"


def lowest_half(layers: Iterable[LayerShape]) -> Precision:
    """Return the precision with the fewest bits of any half of a layer; "full" without layers."""
    return lowest(half for layer in layers for half in (layer.attention, layer.ffn))


@lru_cache(maxsize=1024)  # asked for every token, and there are few shapes
def lowest_named(fingerprint: str) -> str:
    """The fewest bits in the name of a shape: `tp1-int8x1-int4x2.5` -> int4. `unknown` where it names none,
    as that of a worker that says nothing of its shape."""
    return next((name for name in reversed(PRECISIONS) if name in fingerprint), UNKNOWN)

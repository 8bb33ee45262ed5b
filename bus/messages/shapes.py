"""The nouns that several messages share: what a layer is held in, and where layers are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bus.precisions import Precision

Part = Literal["attention", "ffn"]
Number = int | float

PARTS: tuple[Part, ...] = ("attention", "ffn")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The precision of each half of a layer."""

    attention: Precision = "full"
    ffn: Precision = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [first, end) of a model on `workers`, in the order of their shards.

    The first worker of the first stage leads the pipeline.
    """

    workers: list[str]
    first: int
    end: int


def layers_below_full(layers: Iterable[LayerShape]) -> int:
    """Return the number of layers of which at least one half is below full precision."""
    return sum(layer != LayerShape() for layer in layers)

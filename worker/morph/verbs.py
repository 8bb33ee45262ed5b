"""What swaps ask of a model's variants. `worker.shape.variants` has them; tests have others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bus.messages import PARTS, Part
from bus.precisions import Precision
from worker.shape.copier import CopyJob


class Variants(Protocol):
    """Verbs of the engine's thread, between steps."""

    @property
    def precisions(self) -> Sequence[Precision]:
        """What the halves of this model's layers can be; "full" always, and first."""

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        """How many a variant takes while it is mapped."""

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        """All of its pages or, raising MappingFailed or OutOfPages, none."""

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob: ...

    def check(self, layer: int, part: Part, precision: Precision) -> None:
        """Raises if the mapped variant does not compute what its original does."""

    def install(self, layer: int, part: Part, precision: Precision) -> None:
        """The next step runs on it."""

    def unmap(self, layer: int, part: Part, precision: Precision) -> None:
        """When the device is done with what used it. Raises MappingFailed."""

    def release(self) -> None:
        """At the end: nothing runs on them any more."""


def layer_pages(variants: Variants, num_layers: int, parts: Sequence[Part] = PARTS) -> dict[Precision, int]:
    """Pages of the largest layer, both halves or one, in each precision."""
    return {
        precision: max(
            sum(variants.pages(layer, part, precision) for part in parts) for layer in range(num_layers)
        )
        for precision in variants.precisions
    }


def reserve_pages(variants: Variants, num_layers: int) -> int:
    """With so many pages free any layer can be swapped down: those of the largest in its most bits below
    full."""
    pages = layer_pages(variants, num_layers)
    return max((pages[precision] for precision in pages if precision != "full"), default=0)


class NoVariants:
    """Of a model whose layers are always full; only its KV cache can morph."""

    precisions: Sequence[Precision] = ("full",)

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        return 0

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        raise NotImplementedError

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob:
        raise NotImplementedError

    check = install = unmap = map

    def release(self) -> None:
        pass

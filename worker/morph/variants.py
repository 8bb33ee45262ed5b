"""The interface by which morphs use the variants of a model's layers, and layers without any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bus.messages import PARTS, Part
from bus.precisions import Precision
from worker.shape.copier import CopyJob
from worker.shape.ranges import VariantKey


class Variants(Protocol):
    """The variants of a model's layers, in the engine's thread, between steps."""

    @property
    def precisions(self) -> Sequence[Precision]:
        """The precisions that the halves of this model's layers can have, most bits first.

        The first is "full", except of a quantised checkpoint, which has its own alone.
        """

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        """Return how many pages a variant takes while it is mapped."""

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        """Map all pages of a variant or, raising MappingFailed or OutOfPages, none."""

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob: ...

    def expect(self, variants: Sequence[VariantKey]) -> None:
        """Have these ready, as far as there is room: they are copied next. Replaces what was expected."""

    def check(self, layer: int, part: Part, precision: Precision) -> None:
        """Raise if the mapped variant does not compute what its original does."""

    def install(self, layer: int, part: Part, precision: Precision) -> None:
        """Run on this variant from the next step on."""

    def unmap(self, layer: int, part: Part, precision: Precision) -> None:
        """Unmap a variant when the device is done with what used it. Raises MappingFailed."""

    def release(self) -> None:
        """Release everything at the end; nothing runs on the variants any more."""


def layer_pages(variants: Variants, num_layers: int, parts: Sequence[Part] = PARTS) -> dict[Precision, int]:
    """Return the pages of the largest layer, both halves or one, in each precision."""
    return {
        precision: max(
            sum(variants.pages(layer, part, precision) for part in parts) for layer in range(num_layers)
        )
        for precision in variants.precisions
    }


def reserve_pages(variants: Variants, num_layers: int) -> int:
    """Return the free pages with which any layer can be swapped to its most bits below the best."""
    pages = layer_pages(variants, num_layers)
    return max((pages[precision] for precision in variants.precisions[1:]), default=0)


class NoVariants:
    """Layers that keep full precision; only their KV cache can morph."""

    precisions: Sequence[Precision] = ("full",)

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        return 0

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob:
        raise NotImplementedError

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        raise NotImplementedError

    check = install = unmap = map

    def expect(self, variants: Sequence[VariantKey]) -> None:
        """Do nothing: no variant is copied."""

    def release(self) -> None:
        """Do nothing: the layers' memory is the model's."""

"""Change the tensor-parallel degree of a layer's weights between steps (Gyges, section 4.2).

To a higher degree a rank unmaps the others' pages of the FFN (`narrow`). To a lower one it maps them, fills
them beside the steps and uses them (`map`, `fill`, `widen`). The attention's weights are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bus.messages import PARTS, Part
from worker.memory import PagePool
from worker.model.model import Model
from worker.model.shard import Shard
from worker.morph.variants import Variants
from worker.shape.checks import CheckedPages
from worker.shape.copier import ByteSpan, CopyJob, source_copy
from worker.shape.ranges import PageMask, VariantKey, VariantRanges, checked_pages, variant_name
from worker.shape.variants import LayerVariants

PagesCopy = Callable[[VariantKey, PageMask], CopyJob]  # fills these mapped pages of a variant
Checked = Callable[[VariantKey], CheckedPages]


class Resharder:
    """Changes the shard of each layer, in the engine's thread; none of them may be swapped meanwhile."""

    def __init__(self, model: Model, ranges: VariantRanges, copy: PagesCopy, checked: Checked) -> None:
        self._model, self._ranges = model, ranges
        self._copy, self._checked = copy, checked

    def shard(self, layer: int) -> Shard:
        """Return the shard of a layer that the next step computes."""
        return self._model.layers[layer].shard

    def pages(self, layer: int, shard: Shard) -> int:
        """Return the pages of the layer's variants, both halves, at `shard`."""
        return sum(int(self._ranges.needed(self._resident(layer, part), shard).sum()) for part in PARTS)

    def narrow(self, layer: int, shard: Shard) -> int:
        """Run `shard`, a part of the present one, from the next step on. Returns the pages freed.

        Raises ValueError, having changed nothing, and MappingFailed; then it may be called again.
        """
        _check_nested(wide=self.shard(layer), narrow=shard)
        self._install(layer, shard)
        return sum(self._ranges.unmap_others(self._resident(layer, part), shard) for part in PARTS)

    def map(self, layer: int, shard: Shard) -> int:
        """Map the pages that `shard` has beyond the present one, which is a part of it. Returns how many.

        Raises OutOfPages or MappingFailed, having mapped none.
        """
        _check_nested(wide=shard, narrow=self.shard(layer))
        return self._ranges.map(self._resident(layer, "ffn"), shard)

    def fill(self, layer: int, shard: Shard) -> CopyJob:
        """Return the job that fills the pages of `map`. It raises WrongVariant, OSError and ModelError."""
        place = self._resident(layer, "ffn")
        missing = self._ranges.needed(place, shard) & ~self._ranges.needed(place, self.shard(layer))
        return self._copy(place, missing)

    def spans(self, layer: int, shard: Shard) -> list[ByteSpan]:
        """Return the bytes of the layer's FFN in a shard's pages; no other shard of that degree has them.

        Pages that all of them have, those of biases and of a router, are left out.
        """
        place = self._resident(layer, "ffn")
        pages = self._ranges.needed(place, shard)
        if shard.size > 1:
            other = Shard((shard.rank + 1) % shard.size, shard.size)
            pages = pages & ~self._ranges.needed(place, other)
        return self._ranges.spans(place, pages)

    def ffn(self, layer: int) -> CheckedPages:
        """Return the pages of the layer's FFN, to read the present shard's and to fill those of `map`."""
        return self._checked(self._resident(layer, "ffn"))

    def rehearsal(self) -> CopyJob:
        """Return a job that fills nothing, to measure what precedes every `fill`."""
        place = self._resident(0, "ffn")
        return self._copy(place, np.zeros_like(self._ranges.needed(place, self.shard(0))))

    def widen(self, layer: int, shard: Shard) -> None:
        """Run `shard`, whose pages are filled, from the next step on. Raises ValueError for unmapped ones."""
        _check_nested(wide=shard, narrow=self.shard(layer))
        self._install(layer, shard)

    def unmap_extra(self, layer: int) -> None:
        """Unmap all but the present shard's pages, while no copy runs. Raises MappingFailed."""
        self._ranges.unmap_others(self._resident(layer, "ffn"), self.shard(layer))

    def _install(self, layer: int, shard: Shard) -> None:
        halves = [self._ranges.half(self._resident(layer, part), shard) for part in PARTS]
        for half in halves:
            self._model.install(layer, half)
        self._model.layers[layer].shard = shard

    def _resident(self, layer: int, part: Part) -> VariantKey:
        runs = self._model.layers[layer]
        return layer, part, (runs.attention if part == "attention" else runs.feed_forward).precision


def make_resharder(model: Model, pool: PagePool, variants: Variants) -> Resharder:
    """Make a resharder that fills from the variants' host images, or from the checkpoint without them."""
    if isinstance(variants, LayerVariants):
        return Resharder(model, variants.ranges, variants.copy_pages, variants.checked)
    ranges = VariantRanges(model, pool)

    def copy(place: VariantKey, pages: PageMask) -> CopyJob:
        layer, part, _ = place
        return source_copy(
            variant_name(place),
            model.plan.layers[layer][PARTS.index(part)],
            model.source,
            ranges.memory(place),
            ranges.spans(place, pages),
            pool.backend.device,
        )

    return Resharder(model, ranges, copy, lambda place: checked_pages(place, ranges, None))


def _check_nested(*, wide: Shard, narrow: Shard) -> None:
    if not wide.has(narrow):
        raise ValueError(f"{narrow} is no part of {wide}: a rank keeps what it has, or a part of it")

"""Change the tensor-parallel degree of a layer's weights between steps (Gyges, section 4.2).

Shards nest: a rank keeps a part of what it has, or gets more around it. So to a higher degree the other
ranks' pages of the FFN are unmapped, and nothing is copied; to a lower one they are mapped and filled
beside the steps. The attention's weights are on every rank: only the heads change that it computes. This
holds for whichever variants a layer has at the time, quantised ones too.

::

    up      narrow
    down    map --> fill, in the copying thread,    --> widen        undo of map: unmap_extra
                    or `put` of what others `read`
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bus.messages import PARTS, Part
from worker.memory import PagePool
from worker.model.model import Model
from worker.model.shard import Shard
from worker.morph.verbs import Variants
from worker.shape.checks import CheckedPages
from worker.shape.copier import CopyJob
from worker.shape.copies import ByteSpan, SourceCopy
from worker.shape.ranges import PageMask, VariantKey, VariantRanges, checked_pages, variant_name
from worker.shape.variants import LayerVariants

PagesCopy = Callable[[VariantKey, PageMask], CopyJob]  # fills these mapped pages of a variant
Checked = Callable[[VariantKey], CheckedPages]


class Resharder:
    """Changes the shard of each layer, in the engine's thread, between steps.

    A layer that is being swapped must not be resharded.
    """

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
        """Run `shard`, a part of the present one, from the next step on and free the other ranks' pages.

        Returns how many were freed. Raises ValueError, having changed nothing, and MappingFailed, when the
        layer runs the new shard with pages to spare; then it may be called again.
        """
        _check_nested(wide=self.shard(layer), narrow=shard)
        self._install(layer, shard)
        return sum(self._ranges.unmap_others(self._resident(layer, part), shard) for part in PARTS)

    def map(self, layer: int, shard: Shard) -> int:
        """Map pages for what `shard` has beyond the present one, which is a part of it. Returns how many.

        Raises OutOfPages or MappingFailed, having mapped none.
        """
        _check_nested(wide=shard, narrow=self.shard(layer))
        return self._ranges.map(self._resident(layer, "ffn"), shard)

    def fill(self, layer: int, shard: Shard) -> CopyJob:
        """Return the job that fills the pages of `map`, beside the steps.

        The job raises WrongVariant if they do not hold it then, and OSError or ModelError where it cannot
        be read.
        """
        place = self._resident(layer, "ffn")
        missing = self._ranges.needed(place, shard) & ~self._ranges.needed(place, self.shard(layer))
        return self._copy(place, missing)

    def spans(self, layer: int, shard: Shard) -> list[ByteSpan]:
        """Return the bytes of the layer's FFN that lie in a shard's pages.

        No other shard of that degree has them; all but the last have as many.
        """
        place = self._resident(layer, "ffn")
        return self._ranges.spans(place, self._ranges.needed(place, shard))

    def ffn(self, layer: int) -> CheckedPages:
        """Return the pages of the layer's FFN.

        They read the spans of the present shard, and take others' into the pages of `map`.
        """
        return self._checked(self._resident(layer, "ffn"))

    def rehearsal(self) -> CopyJob:
        """Return a job that does what precedes every `fill`, to measure it; it fills nothing."""
        place = self._resident(0, "ffn")
        return self._copy(place, np.zeros_like(self._ranges.needed(place, self.shard(0))))

    def widen(self, layer: int, shard: Shard) -> None:
        """Run `shard`, whose pages are filled, from the next step on.

        Raises ValueError for pages that were never mapped.
        """
        _check_nested(wide=shard, narrow=self.shard(layer))
        self._install(layer, shard)

    def unmap_extra(self, layer: int) -> None:
        """Unmap all but the pages of the present shard. No copy may run.

        Raises MappingFailed; then it may be tried again.
        """
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
    """Make a resharder that fills from the variants' host images.

    Where there are none it fills from the checkpoint.
    """
    if isinstance(variants, LayerVariants):
        return Resharder(model, variants.ranges, variants.copy_pages, variants.checked)
    ranges = VariantRanges(model, pool)

    def copy(place: VariantKey, pages: PageMask) -> CopyJob:
        layer, part, _ = place
        return SourceCopy(
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

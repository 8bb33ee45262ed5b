"""The address ranges of a model's variants, one for each half and precision, and the pages of a shard.

A rank needs its own pages of the FFN and all pages of the attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import PARTS, Part
from bus.precisions import Precision
from kernels.product import Product
from worker.memory import PagePool, VirtualRange
from worker.memory.backend import NO_PAGE
from worker.memory.pool import runs_of
from worker.model.layer import LayerHalf, Tensors, build_attention, build_feed_forward
from worker.model.layout import RangePlan, degrees
from worker.model.model import Model
from worker.model.shard import Shard
from worker.model.weights import tensors_in, tensors_of
from worker.shape.checks import CheckedPages
from worker.shape.copier import ByteSpan

VariantKey = tuple[int, Part, Precision]
PageMask = npt.NDArray[np.bool_]  # pages of a range


class VariantRanges:
    """The ranges of one model's variants, used in the engine's thread between steps."""

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        quantized: Mapping[tuple[Part, Precision], RangePlan] | None = None,
    ) -> None:
        """Reserve ranges for `quantized` layouts; those of full are the model's. Raises MappingFailed."""
        self._model, self._pool = model, pool
        full = dict(zip(PARTS, model.plan.layers[0], strict=True))  # the layers are alike
        self.plans: dict[tuple[Part, Precision], RangePlan] = {(part, "full"): full[part] for part in PARTS}
        self.plans |= quantized or {}
        self._degrees = degrees(model.config, model.plan.max_tp)
        self._needed: dict[tuple[Part, Precision, Shard], PageMask] = {}
        self._ranges: dict[VariantKey, VirtualRange] = {}
        try:
            for layer in range(len(model.layers)):
                for part, precision in self.plans:
                    self._ranges[layer, part, precision] = self._reserve(layer, part, precision)
        except BaseException:
            self.release()
            raise

    def memory(self, variant: VariantKey) -> VirtualRange:
        return self._ranges[variant]

    def needed(self, variant: VariantKey, shard: Shard) -> PageMask:
        """Return a mask of the pages that a shard needs. Raises ValueError for a degree without a layout."""
        _, part, precision = variant
        key = (part, precision, shard)
        if key not in self._needed:
            if shard.size not in self._degrees:
                raise ValueError(
                    f"{self._model.config.folder.name}: its weights are not laid out for degree {shard.size};"
                    f" they are for {', '.join(map(str, self._degrees))} (worker.max_tp)"
                )
            self._needed[key] = self.plans[part, precision].at(shard).pages(self._pool.page_bytes)
        return self._needed[key]

    def spans(self, variant: VariantKey, pages: PageMask) -> list[ByteSpan]:
        """Return the spans of bytes of the half in these pages."""
        return spans_of(pages, self._pool.page_bytes, self.plans[variant[1:]].nbytes)

    def half(self, variant: VariantKey, shard: Shard) -> LayerHalf:
        """Build the half over its pages; those of the shard must be mapped."""
        memory = self._ranges[variant]
        if np.any(self.needed(variant, shard) & (memory.pages == NO_PAGE)):
            raise ValueError(f"{memory.owner}: pages of {shard} are not mapped")
        tensors = tensors_of(memory, self.plans[variant[1:]].at(shard))
        return build_half(self._model, variant, tensors, shard)

    def map(self, variant: VariantKey, shard: Shard) -> int:
        """Map a shard's missing pages, not zeroed: all or none. Raises OutOfPages and MappingFailed."""
        memory = self._ranges[variant]
        before = memory.pages != NO_PAGE
        try:
            memory.have(before | self.needed(variant, shard), zeroed=False)
        except BaseException:
            memory.have(before)
            raise
        return memory.num_mapped - int(before.sum())

    def claim(self, variant: VariantKey, shard: Shard) -> None:
        """Take pages for what a shard is missing; the copy maps them. Raises OutOfPages and MappingFailed."""
        self._ranges[variant].claim(self.needed(variant, shard))

    def unmap_others(self, variant: VariantKey, shard: Shard) -> int:
        """Unmap the pages that the shard does not need. After MappingFailed call it again."""
        memory = self._ranges[variant]
        before = memory.pages != NO_PAGE
        memory.have(before & self.needed(variant, shard))
        return int(before.sum()) - memory.num_mapped

    def release(self) -> None:
        """Free all pages but those of full, which are the model's."""
        for (_, _, precision), memory in self._ranges.items():
            if precision != "full":
                memory.release()

    def _reserve(self, layer: int, part: Part, precision: Precision) -> VirtualRange:
        if precision == "full":
            weights = self._model.weights[layer]
            return (weights.attention if part == "attention" else weights.feed_forward).memory
        owner = f"{self._model.config.folder.name} layer {layer} {part} {precision}"
        return self._pool.reserve(self.plans[part, precision].nbytes, kind="weights", owner=owner)


def spans_of(pages: PageMask, page_bytes: int, nbytes: int) -> list[ByteSpan]:
    """Return the spans of bytes in these pages of a range of `nbytes`."""
    return [
        (first * page_bytes, min((first + length) * page_bytes, nbytes)) for first, length in runs_of(pages)
    ]


def variant_name(variant: VariantKey) -> str:
    layer, part, precision = variant
    return f"{part} of layer {layer} in {precision}"


def checked_pages(variant: VariantKey, ranges: VariantRanges, sums: torch.Tensor | None) -> CheckedPages:
    """Return the pages of a variant for data from other ranks, checked against `sums` if given."""
    advice = "memory of this device or of another rank, or the link between them, is damaged"
    return CheckedPages(
        variant_name(variant), ranges.memory(variant), ranges.plans[variant[1:]].nbytes, sums, advice
    )


def build_half(model: Model, variant: VariantKey, tensors: Tensors, shard: Shard) -> LayerHalf:
    """Build a half over the tensors of the whole attention, or of the shard's FFN."""
    layer, part, precision = variant
    if part == "attention":
        return build_attention(model.config, tensors, shard, model.config.sliding_windows[layer], precision)
    return build_feed_forward(model.config, tensors, precision, shard)


def products_of(
    model: Model, plans: Mapping[tuple[Part, Precision], RangePlan], shards: Iterable[Shard]
) -> Iterator[Product]:
    """Yield the products of a layer's halves in these layouts, at each of the shards."""
    for shard in shards:
        for (part, precision), plan in plans.items():
            imagined = torch.empty(plan.nbytes, dtype=torch.uint8, device="meta")
            half = build_half(model, (0, part, precision), tensors_in(imagined, plan.at(shard)), shard)
            for each in half.linears:
                yield from each.products()

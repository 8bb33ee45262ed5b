"""Where the variants of a model's halves lie, and which of their pages a shard needs.

Every half of every layer has one range of addresses for each precision. Of the FFN's pages each rank of a
group needs its own, of the attention's all; what nobody reads here is not mapped.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from bus.messages import PARTS, Part
from bus.precisions import Precision
from worker.memory import PagePool, VirtualRange
from worker.memory.backend import NO_PAGE
from worker.memory.pool import runs_of
from worker.model.layer import LayerHalf, Tensors, build_attention, build_feed_forward
from worker.model.layout import RangePlan, degrees
from worker.model.model import Model
from worker.model.shard import Shard
from worker.model.weights import tensors_of
from worker.shape.checks import CheckedPages
from worker.shape.copies import ByteSpan

VariantKey = tuple[int, Part, Precision]
PageMask = npt.NDArray[np.bool_]  # of a range: which of its pages


class VariantRanges:
    """Those of one model; full's are the model's own. In the engine's thread, between steps."""

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        quantized: Mapping[tuple[Part, Precision], RangePlan] | None = None,
    ) -> None:
        """quantized: layouts of the variants below full. Raises MappingFailed."""
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

    def memory(self, place: VariantKey) -> VirtualRange:
        return self._ranges[place]

    def needed(self, place: VariantKey, shard: Shard) -> PageMask:
        """Raises ValueError for a degree that the weights are not laid out for."""
        _, part, precision = place
        key = (part, precision, shard)
        if key not in self._needed:
            if shard.size not in self._degrees:
                raise ValueError(
                    f"{self._model.config.folder.name}: its weights are not laid out for degree {shard.size};"
                    f" they are for {', '.join(map(str, self._degrees))} (worker.max_tp)"
                )
            self._needed[key] = self.plans[part, precision].at(shard).pages(self._pool.page_bytes)
        return self._needed[key]

    def spans(self, place: VariantKey, pages: PageMask) -> list[ByteSpan]:
        """The bytes of the half in these pages."""
        return spans_of(pages, self._pool.page_bytes, self.plans[place[1:]].nbytes)

    def half(self, place: VariantKey, shard: Shard) -> LayerHalf:
        """Over the pages that are mapped; the shard's must be."""
        memory = self._ranges[place]
        if np.any(self.needed(place, shard) & (memory.pages == NO_PAGE)):
            raise ValueError(f"{memory.owner}: pages of {shard} are not mapped")
        tensors = tensors_of(memory, self.plans[place[1:]].at(shard))
        return build_half(self._model, place, tensors, shard)

    def map(self, place: VariantKey, shard: Shard) -> int:
        """What the shard needs and is not mapped yet, not zeroed; returns how many pages. Raises OutOfPages
        and MappingFailed; then none."""
        memory = self._ranges[place]
        before = memory.pages != NO_PAGE
        try:
            memory.have(before | self.needed(place, shard), zeroed=False)
        except BaseException:
            memory.have(before)
            raise
        return memory.num_mapped - int(before.sum())

    def unmap_others(self, place: VariantKey, shard: Shard) -> int:
        """All that the shard does not need; returns how many pages. Raises MappingFailed, perhaps half-way;
        then it may be tried again."""
        memory = self._ranges[place]
        before = memory.pages != NO_PAGE
        memory.have(before & self.needed(place, shard))
        return int(before.sum()) - memory.num_mapped

    def release(self) -> None:
        """Give back all pages but those of full, which are the model's."""
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
    """The bytes in these pages of a range of `nbytes`."""
    return [
        (first * page_bytes, min((first + length) * page_bytes, nbytes)) for first, length in runs_of(pages)
    ]


def variant_name(place: VariantKey) -> str:
    layer, part, precision = place
    return f"{part} of layer {layer} in {precision}"


def checked_pages(place: VariantKey, ranges: VariantRanges, sums: torch.Tensor | None) -> CheckedPages:
    """For what other ranks send."""
    advice = "memory of this device or of another rank is damaged, or the way between them"
    return CheckedPages(
        variant_name(place), ranges.memory(place), ranges.plans[place[1:]].nbytes, sums, advice
    )


def build_half(model: Model, place: VariantKey, tensors: Tensors, shard: Shard) -> LayerHalf:
    """tensors: of the whole attention, or of the shard's FFN."""
    layer, part, precision = place
    if part == "attention":
        return build_attention(model.config, tensors, shard, model.config.sliding_windows[layer], precision)
    return build_feed_forward(model.config, tensors, precision)

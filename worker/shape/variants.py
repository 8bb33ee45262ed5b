"""The variants of a model's layers: their ranges, their host images, and the copies into pages.

Full is mapped at the load; the others are reserved addresses until a swap maps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from bus.messages import PARTS, Part
from bus.precisions import PRECISIONS, QUANTIZED, Precision
from worker.memory import PagePool
from worker.model.layer import LayerHalf
from worker.model.layout import RangePlan
from worker.model.model import Model
from worker.model.shard import Shard
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.model.weights import Tensors, tensors_in
from worker.shape.checks import CheckedPages, check_outputs, expected_outputs, num_outputs, num_rows, row_sums
from worker.shape.copier import CopyJob, Pause, lay_out
from worker.shape.host_images import MatrixSource, find_matrices, kept_tensors, plan_variants, write_half
from worker.shape.host_store import IN_MEMORY, HostMemory, ImagePart, ImageStore, Put
from worker.shape.ranges import PageMask, VariantKey, VariantRanges, build_half, checked_pages, variant_name
from worker.shape.shared_file import OnProgress

ImageKey = tuple[int, Part, Precision, str]  # the last is "weights", their "sums", or the check's "outputs"


class LayerVariants:
    """The variants of a model's layers (`worker.morph.variants.Variants`), called in the engine's thread."""

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        precisions: Sequence[Precision] = QUANTIZED,
        method: str = "",
        memory: HostMemory = IN_MEMORY,
        progress: OnProgress | None = None,
        matrices: Mapping[Precision, MatrixSource] | None = None,
    ) -> None:
        """Reserve the ranges, and open this model's host images, making them if no worker has yet.

        precisions: besides full; a quantised checkpoint has its own alone. method: as in `find_matrices`.
        matrices: found already, for a model without pages; then call `open` for the images. Raises
        ModelError: a set that cannot be used, no room.
        """
        self._model, self._pool = model, pool
        fixed = model.config.fixed_precision
        self.precisions: list[Precision] = (
            [fixed] if fixed else [name for name in PRECISIONS if name in ("full", *precisions)]
        )
        self._proven: set[VariantKey] = set()  # their outputs were right once
        self._is_filled = matrices is None
        if matrices is None:
            matrices = {
                name: find_matrices(model.config, model.source, name, method)
                for name in self.precisions
                if name != "full"
            }
        self._matrices = matrices
        self._opened: ImageStore[ImageKey] | None = None
        plans = plan_variants(model.config, model.plan, pool.page_bytes, matrices)
        self.ranges = VariantRanges(model, pool, plans)
        try:
            if self._is_filled:
                self.open(memory, progress)
        except BaseException:
            self.ranges.release()
            raise

    def open(
        self, memory: HostMemory, progress: OnProgress | None = None, pause: Pause = lambda: None
    ) -> None:
        """Open or make the host images, in any thread, before any copy. Raises ModelError.

        pause: called after each piece of work of some milliseconds.
        """
        model = self._model
        sizes: dict[ImageKey, int] = {}
        for variant in self._places():
            plan = self.ranges.plans[variant[1:]]
            imagined = self._whole(variant, torch.empty(plan.nbytes, dtype=torch.uint8, device="meta"))
            sizes[*variant, "weights"], sizes[*variant, "sums"] = plan.nbytes, 8 * num_rows(plan.nbytes)
            sizes[*variant, "outputs"] = 4 * num_outputs(imagined)
        contents = [identity(model, self._device), *(matrices.name for matrices in self._matrices.values())]
        key = f"{contents} {model.config.norm_eps} {self.ranges.plans}"
        gpu = self._device if self._device.type == "cuda" else None
        make, kept = partial(self._make, pause), [name for name in sizes if name[-1] != "weights"]
        self._opened = memory.open(key, sizes, make, kept=kept, gpu=gpu, progress=progress)

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        """Return the pages that a variant takes while it is mapped."""
        return int(self._needed((layer, part, precision)).sum())

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        """Map what the variant's shard needs: all or none. Raises MappingFailed or OutOfPages.

        On a GPU the pages are only taken; the job that fills them maps them, beside the steps.
        """
        variant = (layer, part, precision)
        if self._pool.beside:
            self.ranges.claim(variant, self._shard(layer))
        else:
            self.ranges.map(variant, self._shard(layer))

    def copy_job(self, layer: int, part: Part, precision: Precision) -> CopyJob:
        """Return the job that fills the mapped pages from the host image, or raises WrongVariant there."""
        variant = (layer, part, precision)
        return self.copy_pages(variant, self._needed(variant))

    def copy_pages(self, variant: VariantKey, pages: PageMask) -> CopyJob:
        """Return the job that fills some of the pages."""
        sums, memory = self.store.image((*variant, "sums")), self.ranges.memory(variant)
        part = self._part(variant, pages)
        return self.store.copy_job(variant_name(variant), part, sums.view(torch.int64), memory, self._device)

    def expect(self, variants: Sequence[VariantKey]) -> None:
        """Read these ahead if they come from a disk: they are copied next, in this order."""
        self.store.expect([self._part(variant, self._needed(variant)) for variant in variants])

    def checked(self, variant: VariantKey) -> CheckedPages:
        """Return a variant's pages for data from elsewhere."""
        sums = self.store.image((*variant, "sums")).view(torch.int64)
        return checked_pages(variant, self.ranges, sums)

    def image(self, layer: int, part: Part, precision: Precision) -> torch.Tensor:
        """Return the variant's bytes: uint8 [n] in host memory, read-only."""
        return self.store.image((layer, part, precision, "weights"))

    def check(self, layer: int, part: Part, precision: Precision) -> None:
        """Check, once, that the mapped variant computes what its host image does. Raises WrongVariant.

        The image has no outputs for a part of a half; copies check the bytes.
        """
        variant = (layer, part, precision)
        if variant not in self._proven and self._shard(layer).size == 1:
            expected = self.store.image((*variant, "outputs")).view(torch.float32)
            check_outputs(variant_name(variant), self._resident(variant), expected, self._model.dtype)
            self._proven.add(variant)

    def install(self, layer: int, part: Part, precision: Precision) -> None:
        """Make the next step run on this variant."""
        self.ranges.memory((layer, part, precision)).settle()
        self._model.install(layer, self._resident((layer, part, precision)))

    def unmap(self, layer: int, part: Part, precision: Precision) -> None:
        """Unmap a variant that no launched work uses. After MappingFailed call it again."""
        self.ranges.memory((layer, part, precision)).resize(0)

    def release(self) -> None:
        """Free all pages but those of full, which are the model's, and leave the host images."""
        self.ranges.release()
        if self._opened:
            self._opened.close()

    @property
    def store(self) -> ImageStore[ImageKey]:
        assert self._opened, "the host images were not opened"
        return self._opened

    def _places(self) -> Iterator[VariantKey]:
        for layer in range(len(self._model.weights)):
            for part in PARTS:
                for precision in self.precisions:
                    yield layer, part, precision

    def _part(self, variant: VariantKey, pages: PageMask) -> ImagePart[ImageKey]:
        return ImagePart((*variant, "weights"), self.ranges.spans(variant, pages))

    def _shard(self, layer: int) -> Shard:
        return self._model.layers[layer].shard

    def _needed(self, variant: VariantKey) -> PageMask:
        return self.ranges.needed(variant, self._shard(variant[0]))

    def _resident(self, variant: VariantKey) -> LayerHalf:
        """Build the half over the pages that are mapped."""
        return self.ranges.half(variant, self._shard(variant[0]))

    def _full(self, layer: int, part: Part, pause: Pause) -> tuple[torch.Tensor, Tensors]:
        """Return the half in full precision, uint8, and its tensors: from filled pages or the source."""
        weights, plan = self._model.weights[layer], self._plan(layer, part)
        if self._is_filled:
            full = weights.attention if part == "attention" else weights.feed_forward
            return full.memory.tensor(torch.uint8, (plan.nbytes,)), full.tensors
        laid_out = lay_out(plan, self._model.source, self._device, pause)
        return laid_out, tensors_in(laid_out, plan)

    def _kept(self, layer: int, part: Part, precision: Precision, pause: Pause) -> Tensors:
        """Return the tensors that a half of a quantised checkpoint keeps as they are."""
        plan, quantized = self._plan(layer, part), self.ranges.plans[part, precision]
        source, device = self._model.source, self._device
        return kept_tensors(plan, quantized, self._matrices[precision], source, device, pause)

    def _plan(self, layer: int, part: Part) -> RangePlan:
        """Return the layout of the half in full precision."""
        return self._model.plan.layers[layer][PARTS.index(part)]

    def _whole(self, variant: VariantKey, image: torch.Tensor) -> LayerHalf:
        """Build the half of all heads and rows over uint8 [n] anywhere."""
        return build_half(self._model, variant, tensors_in(image, self.ranges.plans[variant[1:]]), Shard())

    def _make(self, pause: Pause, put: Put[ImageKey], progress: OnProgress) -> None:
        total, done = sum(self.ranges.plans[variant[1:]].nbytes for variant in self._places()), 0
        for variant in self._places():
            layer, part, precision = variant
            plan = self.ranges.plans[part, precision]
            if precision == "full":  # the first of each half
                made, tensors = self._full(layer, part, pause)
            else:
                if precision == self.precisions[0]:
                    tensors = self._kept(layer, part, precision, pause)
                made = torch.zeros(plan.nbytes, dtype=torch.uint8, device=self._device)
                write_half(
                    self._model.config,
                    tensors_in(made, plan),
                    self._matrices[precision],
                    layer,
                    tensors,
                    pause,
                )
            put((*variant, "weights"), made)
            put((*variant, "sums"), row_sums(made).view(torch.uint8))
            outputs = expected_outputs(self._whole(variant, made), self._model.dtype)  # reference outputs
            put((*variant, "outputs"), outputs.view(torch.uint8))
            done += plan.nbytes
            progress(done, total)

    @property
    def _device(self) -> torch.device:
        return self._pool.backend.device


def identity(model: Model, device: torch.device) -> str:
    """Return a name for these layers: the same wherever a checkpoint lies, with or without ends."""
    source, cut = model.source, model.config.cut
    rank = f" rank {cut.rank.rank} of {cut.rank.size}" if cut else ""
    if isinstance(source, CheckpointWeights):
        return checkpoint_digest(replace(model.config, has_ends=False), source) + rank
    return f"{source}, layers from {model.config.first_layer}, on {device.type}{rank}"

"""The variants of a model's layers: which there are, in which pages they go, and how they get there.

Every half of every layer has one range for each precision. Full is mapped when the model is loaded; the
others are addresses until a swap maps them. All of them wait in host memory (`HostStore`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bus.messages import PARTS, Part
from bus.precisions import PRECISIONS, QUANTIZED, Precision
from worker.memory import PagePool
from worker.model.layer import LayerHalf
from worker.model.layout import RangePlan
from worker.model.model import Model
from worker.model.quantized_layout import plan_quantized
from worker.model.shard import Shard
from worker.model.sources import CheckpointWeights, checkpoint_digest
from worker.model.weights import Tensors, tensors_in
from worker.shape.checks import CheckedPages, check_outputs, expected_outputs, num_outputs, num_rows, row_sums
from worker.shape.copies import HostCopy, lay_out
from worker.shape.host_images import MatrixSource, find_matrices, write_half
from worker.shape.host_store import HostStore, Images
from worker.shape.ranges import PageMask, VariantKey, VariantRanges, build_half, checked_pages, variant_name
from worker.shape.shared_file import OnProgress

ImageKey = tuple[int, Part, Precision, str]  # the last: "weights", their "sums", or "outputs" of the check


class LayerVariants:
    """What swaps ask of a model (`worker.morph.verbs.Variants`). Verbs of the engine's thread."""

    def __init__(
        self,
        model: Model,
        pool: PagePool,
        *,
        precisions: Sequence[Precision] = QUANTIZED,
        method: str = "",
        host_dir: Path = Path("/dev/shm"),
        progress: OnProgress | None = None,
        matrices: Mapping[Precision, MatrixSource] | None = None,
    ) -> None:
        """Reserve the ranges, and have the host images of this model, made if no worker has yet.

        precisions: besides full. method: whose quantisation, as in `find_matrices`. progress: bytes of the
        images done and in all. matrices: what was found already, of a model without pages; then the images
        are for `open` to have. Raises ModelError: a set that cannot be used, no room on the host.
        """
        self._model, self._pool = model, pool
        self.precisions: list[Precision] = [name for name in PRECISIONS if name in ("full", *precisions)]
        self._proven: set[VariantKey] = set()  # the products of these were right once
        self._is_filled = matrices is None
        if matrices is None:
            matrices = {
                name: find_matrices(model.config, model.source, name, method) for name in self.precisions[1:]
            }
        self._matrices = matrices
        self._opened: HostStore[ImageKey] | None = None
        self.ranges = VariantRanges(model, pool, self._lay_out())
        try:
            if self._is_filled:
                self.open(host_dir, progress)
        except BaseException:
            self.ranges.release()
            raise

    def open(self, host_dir: Path, progress: OnProgress | None = None) -> None:
        """Have the host images, made if no worker has yet. In any thread, before anything is copied; raises
        ModelError and what `progress` raises."""
        self._opened = self._open_store(host_dir, progress)

    def pages(self, layer: int, part: Part, precision: Precision) -> int:
        """How many a variant takes while it is mapped."""
        return int(self._needed((layer, part, precision)).sum())

    def map(self, layer: int, part: Part, precision: Precision) -> None:
        """All that its shard needs, for the copy to fill. Raises MappingFailed or OutOfPages; then none."""
        self.ranges.map((layer, part, precision), self._shard(layer))

    def copy_job(self, layer: int, part: Part, precision: Precision) -> HostCopy:
        """Fills the mapped pages from the host image, in another thread, and raises WrongVariant there if
        they do not hold it then."""
        place = (layer, part, precision)
        return self.copy_pages(place, self._needed(place))

    def copy_pages(self, place: VariantKey, pages: PageMask) -> HostCopy:
        """The same for some pages."""
        image, sums = (self._store.image((*place, kind)) for kind in ("weights", "sums"))
        spans = self.ranges.spans(place, pages)
        memory = self.ranges.memory(place)
        return HostCopy(variant_name(place), image, sums.view(torch.int64), memory, self._device, spans)

    def checked(self, place: VariantKey) -> CheckedPages:
        """A variant's pages, for bytes that come from elsewhere."""
        sums = self._store.image((*place, "sums")).view(torch.int64)
        return checked_pages(place, self.ranges, sums)

    def image(self, layer: int, part: Part, precision: Precision) -> torch.Tensor:
        """What is copied: uint8 [n] in host memory, for reading only."""
        return self._store.image((layer, part, precision, "weights"))

    def check(self, layer: int, part: Part, precision: Precision) -> None:
        """Raises WrongVariant unless the mapped variant computes what its host image does. Once: the same
        bytes at the same addresses give the same products, and that they are the same the copy sees to. Of a
        part of a half the image has no outputs."""
        place = (layer, part, precision)
        if place not in self._proven and self._shard(layer).size == 1:
            expected = self._store.image((*place, "outputs")).view(torch.float32)
            check_outputs(variant_name(place), self._resident(place), expected, self._model.dtype)
            self._proven.add(place)

    def install(self, layer: int, part: Part, precision: Precision) -> None:
        """The next step runs on it."""
        self._model.install(layer, self._resident((layer, part, precision)))

    def unmap(self, layer: int, part: Part, precision: Precision) -> None:
        """Give its pages back, when the device is done with what used them. Raises MappingFailed, perhaps
        half-way; then it may be tried again."""
        self.ranges.memory((layer, part, precision)).resize(0)

    def release(self) -> None:
        """Give back all pages but those of full, which are the model's, and leave the host images."""
        self.ranges.release()
        if self._opened:
            self._opened.close()

    @property
    def _store(self) -> HostStore[ImageKey]:
        assert self._opened, "the host images were not opened"
        return self._opened

    # ----------------------------------------------------------------------------- ranges and halves

    def _places(self) -> Iterator[VariantKey]:
        for layer in range(len(self._model.weights)):
            for part in PARTS:
                for precision in self.precisions:
                    yield layer, part, precision

    def _lay_out(self) -> dict[tuple[Part, Precision], RangePlan]:
        """Those below full; the layers are alike."""
        model = self._model
        pairs: dict[Precision, tuple[RangePlan, RangePlan]] = {
            name: plan_quantized(
                model.config,
                model.plan,
                self._pool.page_bytes,
                name,
                group=matrices.group,
                has_input_scale=matrices.has_input_scale,
            )
            for name, matrices in self._matrices.items()
        }
        return {
            (part, name): plan for name, pair in pairs.items() for part, plan in zip(PARTS, pair, strict=True)
        }

    def _shard(self, layer: int) -> Shard:
        return self._model.layers[layer].shard

    def _needed(self, place: VariantKey) -> PageMask:
        return self.ranges.needed(place, self._shard(place[0]))

    def _resident(self, place: VariantKey) -> LayerHalf:
        """Over the pages that are mapped."""
        return self.ranges.half(place, self._shard(place[0]))

    def _full(self, layer: int, part: Part) -> tuple[torch.Tensor, Tensors]:
        """The half in full precision: uint8 [its bytes], and the tensors in them. From the model's pages or,
        of a model that is not filled yet, from where it is loaded from."""
        weights, plan = self._model.weights[layer], self._model.plan.layers[layer][PARTS.index(part)]
        if self._is_filled:
            full = weights.attention if part == "attention" else weights.feed_forward
            return full.memory.tensor(torch.uint8, (plan.nbytes,)), full.tensors
        source = self._model.source
        where = self._device if source.depends_on_device else torch.device("cpu")
        laid_out = lay_out(plan, source, where).to(self._device)
        return laid_out, tensors_in(laid_out, plan)

    def _whole(self, place: VariantKey, image: torch.Tensor) -> LayerHalf:
        """Of all heads and rows, over uint8 [n] anywhere."""
        return build_half(self._model, place, tensors_in(image, self.ranges.plans[place[1:]]), Shard())

    # ----------------------------------------------------------------------------- host images

    def _open_store(self, folder: Path, progress: OnProgress | None) -> HostStore[ImageKey]:
        model = self._model
        sizes: dict[ImageKey, int] = {}
        for place in self._places():
            plan = self.ranges.plans[place[1:]]
            imagined = self._whole(place, torch.empty(plan.nbytes, dtype=torch.uint8, device="meta"))
            sizes[*place, "weights"], sizes[*place, "sums"] = plan.nbytes, 8 * num_rows(plan.nbytes)
            sizes[*place, "outputs"] = 4 * num_outputs(imagined)
        contents = [identity(model, self._device), *(matrices.name for matrices in self._matrices.values())]
        return HostStore(
            folder,
            f"{contents} {model.config.rms_norm_eps} {self.ranges.plans}",
            sizes,
            self._make,
            pin=self._device.type == "cuda",
            progress=progress,
        )

    def _make(self, images: Images[ImageKey], progress: OnProgress) -> None:
        total, done = sum(self.ranges.plans[place[1:]].nbytes for place in self._places()), 0
        for place in self._places():
            layer, part, precision = place
            plan = self.ranges.plans[part, precision]
            if precision == "full":  # the first of each half
                made, tensors = self._full(layer, part)
            else:
                made = torch.zeros(plan.nbytes, dtype=torch.uint8, device=self._device)
                write_half(tensors_in(made, plan), self._matrices[precision], layer, tensors)
            images[*place, "weights"].copy_(made)
            images[*place, "sums"].view(torch.int64).copy_(row_sums(made))
            images[*place, "outputs"].view(torch.float32).copy_(
                self._expected(place, images[*place, "weights"])
            )
            done += plan.nbytes
            progress(done, total)

    def _expected(self, place: VariantKey, image: torch.Tensor) -> torch.Tensor:
        """By the plain reference, from what is in host memory."""
        return expected_outputs(self._whole(place, image.to(self._device)), self._model.dtype)

    @property
    def _device(self) -> torch.device:
        return self._pool.backend.device


def identity(model: Model, device: torch.device) -> str:
    """Which layers these are: the same for a checkpoint wherever it lies, and with the ends or without them:
    of the ranks of a first stage one alone has them, and they share the images."""
    source = model.source
    if isinstance(source, CheckpointWeights):
        return checkpoint_digest(replace(model.config, has_ends=False), source)
    return f"{source}, layers from {model.config.first_layer}, on {device.type}"

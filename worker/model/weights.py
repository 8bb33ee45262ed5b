"""The weights of one model in the page pool: mapped, filled and released range by range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.memory import PagePool, VirtualRange
from worker.model.config import ModelConfig, ModelError
from worker.model.layout import ModelPlan, RangePlan
from worker.model.sources import WeightSource

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)
Tensors = dict[str, torch.Tensor]  # by the names of the layout, padding included

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class LoadedRange:
    """One range with its pages mapped and its weights in them.

    Of an FFN at a shard only some pages stay mapped (`worker.morph.reshard`); touching the rest of its
    tensors faults.
    """

    memory: VirtualRange
    tensors: Tensors


@dataclass(slots=True)
class LayerWeights:
    """The resident variants of one layer."""

    attention: LoadedRange
    feed_forward: LoadedRange


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """The bytes of a model alone in full precision: weights, padding for TP, pages of both."""

    weights: int
    padding: int
    mapped: int

    @property
    def padding_share(self) -> float:
        return self.padding / self.weights


@dataclass(slots=True)
class ModelWeights:
    """All ranges of a model, or of a stage of it, on this device."""

    embedding: LoadedRange | None  # None, like head, in a later stage of a pipeline
    layers: list[LayerWeights]
    head: LoadedRange | None
    size: WeightBytes

    def release(self) -> None:
        """Free every page; the tensors must not be used any more."""
        for loaded in self.ranges():
            loaded.memory.release()
            loaded.tensors.clear()

    def ranges(self) -> list[LoadedRange]:
        layers = [part for layer in self.layers for part in (layer.attention, layer.feed_forward)]
        return [part for part in (self.embedding, *layers, self.head) if part]


def load_weights(
    config: ModelConfig,
    plan: ModelPlan,
    pool: PagePool,
    source: WeightSource,
    progress: OnProgress | None = None,
) -> ModelWeights:
    """Map and fill every range, tensor by tensor, straight into place.

    Everything that can be known is checked before a page is mapped. Raises ModelError, and MappingFailed from
    the system; then nothing stays mapped.
    """
    source.check([tensor for part in plan.ranges() for tensor in part.sources])
    pages = sum(pool.pages_for(part.nbytes) for part in plan.ranges())
    _check_budget(config, plan, pool, pages)
    loader = _Loader(f"{config.folder.name}", pool, source, plan, progress)
    try:
        return ModelWeights(
            embedding=loader.load(plan.embedding) if plan.embedding else None,
            layers=[LayerWeights(loader.load(attention), loader.load(ffn)) for attention, ffn in plan.layers],
            head=loader.load(plan.head) if plan.head else None,
            size=WeightBytes(
                weights=plan.weight_bytes, padding=plan.padding_bytes, mapped=pages * pool.page_bytes
            ),
        )
    except BaseException:
        loader.undo()
        raise


class _Loader:
    """Loads ranges one after the other and can release all of them."""

    def __init__(
        self, owner: str, pool: PagePool, source: WeightSource, plan: ModelPlan, progress: OnProgress | None
    ) -> None:
        self._owner, self._pool, self._source = owner, pool, source
        self._total, self._done = plan.weight_bytes, 0
        self._progress = progress
        self._made: list[VirtualRange] = []

    def load(self, part: RangePlan) -> LoadedRange:
        memory = self._pool.reserve(part.nbytes, kind="weights", owner=f"{self._owner} {part.name}")
        self._made.append(memory)
        memory.map(0, memory.num_pages)  # padding needs no filling: a new page is zeros
        tensors = tensors_of(memory, part)
        for source in part.sources:
            target = source.target(tensors)
            self._source.fill(target, source)
            self._done += target.numel() * target.itemsize
            if self._progress:
                self._progress(self._done, self._total)
        return LoadedRange(memory, tensors)

    def undo(self) -> None:
        for memory in self._made:
            memory.release()


def tensors_of(memory: VirtualRange, plan: RangePlan) -> Tensors:
    """Return the tensors of a range whose pages are mapped, as views."""
    return {
        name: memory.tensor(param.dtype, param.shape, param.strides, param.offset_bytes)
        for name, param in plan.params.items()
    }


def tensors_in(buffer: torch.Tensor, plan: RangePlan) -> Tensors:
    """Return the tensors of a range that lies in `buffer`, uint8 [plan.nbytes] anywhere, as views."""
    return {
        name: buffer[param.offset_bytes :][: (plan.nbytes - param.offset_bytes) // size * size]
        .view(param.dtype)
        .as_strided(param.shape, param.strides)
        for name, param in plan.params.items()
        for size in [param.dtype.itemsize]
    }


def _check_budget(config: ModelConfig, plan: ModelPlan, pool: PagePool, pages: int) -> None:
    free = pool.num_free
    if pages > free:
        raise ModelError(
            f"{config.folder}: too big for the device's budget: it needs {_mib(pages, pool)} MiB"
            f" ({plan.padding_bytes / _MIB:.1f} MiB of it padding) and {_mib(free, pool)} of"
            f" {_mib(pool.num_pages, pool)} MiB are free; raise memory_mb or take a smaller dtype"
        )


def _mib(pages: int, pool: PagePool) -> str:
    return f"{pages * pool.page_bytes / _MIB:.1f}"

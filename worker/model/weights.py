"""The weights of one model in the page pool: mapped, filled and released range by range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.memory import PagePool, VirtualRange
from worker.model.config import ModelConfig, ModelError
from worker.model.layout import ModelPlan, RangePlan

OnProgress = Callable[[int, int], None]  # (bytes done, bytes in all)
Tensors = dict[str, torch.Tensor]  # tensors by the names of the layout, with padding

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
    """The mapped variants of one layer."""

    attention: LoadedRange
    feed_forward: LoadedRange


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """The bytes of a model alone in full precision: weights, padding for TP, pages of both."""

    weights: int
    padding: int
    mapped: int


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


def reserve_weights(owner: str, plan: ModelPlan, pool: PagePool) -> ModelWeights:
    """Reserve the addresses of all ranges without mapping a page; the tensors are on device "meta".

    Raises MappingFailed, and then keeps nothing.
    """
    made: list[VirtualRange] = []

    def reserve(part: RangePlan) -> LoadedRange:
        made.append(pool.reserve(part.nbytes, kind="weights", owner=f"{owner} {part.name}"))
        imagined = torch.empty(part.nbytes, dtype=torch.uint8, device="meta")
        return LoadedRange(made[-1], tensors_in(imagined, part))

    pages = sum(int(part.pages(pool.page_bytes).sum()) for part in plan.ranges())
    try:
        return ModelWeights(
            embedding=reserve(plan.embedding) if plan.embedding else None,
            layers=[LayerWeights(reserve(attention), reserve(ffn)) for attention, ffn in plan.layers],
            head=reserve(plan.head) if plan.head else None,
            size=WeightBytes(
                weights=plan.weight_bytes, padding=plan.padding_bytes, mapped=pages * pool.page_bytes
            ),
        )
    except BaseException:
        for memory in made:
            memory.release()
        raise


def view_mapped(loaded: LoadedRange, plan: RangePlan) -> None:
    """Replace the tensors of a range by views of its pages, now that all pages of `plan` are mapped."""
    loaded.tensors.update(tensors_of(loaded.memory, plan))


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


def check_budget(
    config: ModelConfig,
    plan: ModelPlan,
    pool: PagePool,
    pages: int,
    advice: str = "raise memory_mb or take a smaller dtype",
) -> None:
    """Raise ModelError if the weights, `pages` in all, exceed the free pages."""
    free = pool.num_free
    if pages > free:
        raise ModelError(
            f"{config.folder}: too big for the device's budget: it needs {_mib(pages, pool)} MiB"
            f" ({plan.padding_bytes / _MIB:.1f} MiB of it padding) and {_mib(free, pool)} of"
            f" {_mib(pool.num_pages, pool)} MiB are free; {advice}"
        )


def _mib(pages: int, pool: PagePool) -> str:
    return f"{pages * pool.page_bytes / _MIB:.1f}"

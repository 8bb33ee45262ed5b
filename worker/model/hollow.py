"""A model without pages: addresses for everything, and nothing there yet.

Whoever brings it in maps what is wanted, in which precision it is wanted, and fills it beside the steps.
"""

from __future__ import annotations

import torch

from worker.memory import PagePool, VirtualRange
from worker.model.config import ModelConfig
from worker.model.layout import ModelPlan, RangePlan
from worker.model.model import Model
from worker.model.shard import ALONE, Shard
from worker.model.sources import Weights
from worker.model.weights import LayerWeights, LoadedRange, ModelWeights, WeightBytes, tensors_in, tensors_of


def hollow_model(
    config: ModelConfig, plan: ModelPlan, source: Weights, pool: PagePool, shard: Shard = ALONE
) -> Model:
    """Its tensors are on the device "meta". shard: the part of every layer that it is to compute; of the FFN
    nothing else need ever have pages. In the engine's thread. Raises MappingFailed, and keeps nothing then.
    """
    made: list[VirtualRange] = []

    def reserve(part: RangePlan) -> LoadedRange:
        made.append(pool.reserve(part.nbytes, kind="weights", owner=f"{config.folder.name} {part.name}"))
        imagined = torch.empty(part.nbytes, dtype=torch.uint8, device="meta")
        return LoadedRange(made[-1], tensors_in(imagined, part.at(shard)))

    pages = sum(int(part.at(shard).pages(pool.page_bytes).sum()) for part in plan.ranges())
    try:
        weights = ModelWeights(
            embedding=reserve(plan.embedding) if plan.embedding else None,
            layers=[LayerWeights(reserve(attention), reserve(ffn)) for attention, ffn in plan.layers],
            head=reserve(plan.head) if plan.head else None,
            size=WeightBytes(
                weights=plan.weight_bytes, padding=plan.padding_bytes, mapped=pages * pool.page_bytes
            ),
        )
        return Model(config, plan, weights, source, shard)
    except BaseException:
        for memory in made:
            memory.release()
        raise


def mapped(loaded: LoadedRange, plan: RangePlan) -> None:
    """All pages of `plan`, the shard's, are there now: its tensors are views of them."""
    loaded.tensors.update(tensors_of(loaded.memory, plan))

"""A model folder, or some of its layers, loaded into the page pool and ready to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from bus.messages import LayerShape
from kernels import AttentionPlan
from kernels.product import Product
from worker.memory import KVCache, PagePool
from worker.model.config import ModelConfig
from worker.model.expert_use import ExpertUse
from worker.model.experts import Experts
from worker.model.layer import Attention, Layer, LayerHalf, build_layer
from worker.model.layout import ModelPlan
from worker.model.linear import dense_product
from worker.model.shard import RankGroup, ReduceGroup
from worker.model.sources import WeightSource
from worker.model.step_parts import Part, StepMemory, StepSize
from worker.model.transformer import Ends, Segment, Transformer
from worker.model.weights import (
    LayerWeights,
    LoadedRange,
    ModelWeights,
    WeightBytes,
    reserve_weights,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Model:
    """Weights in the pool and the transformer over them. One thread runs it."""

    def __init__(
        self,
        config: ModelConfig,
        plan: ModelPlan,
        weights: ModelWeights,
        source: WeightSource,
    ) -> None:
        """Build the layers over the weights."""
        self.config, self.plan, self.dtype = config, plan, plan.dtype
        self.source = source
        self._weights = weights
        layers = [
            build_layer(config, i, layer.attention.tensors, layer.feed_forward.tensors)
            for i, layer in enumerate(weights.layers)
        ]
        self.use: ExpertUse | None = None  # of its experts, if it has some
        if config.mixture:
            self.use = ExpertUse(config.mixture, len(layers), layers[0].attention.input_norm.device)
        self._transformer = Transformer(config, layers, ends=_ends(weights))
        for i, layer in enumerate(layers):
            self._count_use(i, layer.feed_forward)

    @property
    def size(self) -> WeightBytes:
        return self._weights.size

    @property
    def layers(self) -> list[Layer]:
        """The layers that the next step runs."""
        return self._transformer.layers

    @property
    def weights(self) -> list[LayerWeights]:
        """The ranges of every layer in full precision."""
        return self._weights.layers

    @property
    def ranges(self) -> list[LoadedRange]:
        """All ranges in full precision: embedding, halves of layers, head."""
        return self._weights.ranges()

    def complete(self) -> None:
        """Finish a model made by `reserve_model`, once its layers, embedding and head have pages."""
        self.source.close()
        self._transformer = Transformer(self.config, self.layers, ends=_ends(self._weights))

    def shape(self) -> list[LayerShape]:
        """Return the present precision of each layer's halves."""
        return [
            LayerShape(attention=layer.attention.precision, ffn=layer.feed_forward.precision)
            for layer in self.layers
        ]

    def products(self) -> Iterator[Product]:
        """Yield the products of a step."""
        for layer in self.layers:
            for each in (*layer.attention.linears, *layer.feed_forward.linears):
                yield from each.products()
        if ends := _ends(self._weights):
            yield dense_product("linear", ends.head)

    def install(self, layer: int, half: LayerHalf) -> None:
        """Replace the attention or FFN of a layer, between two steps."""
        if isinstance(half, Attention):
            self.layers[layer].attention = half
        else:
            self._count_use(layer, half)
            self.layers[layer].feed_forward = half

    def expert_use(self) -> list[list[float]]:
        """Return the shares of use of the experts of each layer, as `ExpertUse.look`; empty without any."""
        return self.use.look() if self.use else []

    def _count_use(self, layer: int, half: LayerHalf) -> None:
        if self.use and isinstance(half, Experts):
            half.use = self.use.counts[layer]

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        kv: KVCache,
        logit_rows: torch.Tensor,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run one step alone: token_ids int64 [T], packed as `plan` says, to float32 [R, vocab].

        logit_rows int64 [R] are the rows whose logits are returned. The keys and values of the step go to
        `kv`. hidden: gets the states of these rows before the head, [R, H].
        """
        alone = Segment(0, len(self.layers), plan)
        return self._transformer.forward(token_ids, [alone], lambda _: kv.layers, logit_rows, hidden=hidden)

    def step_memory(
        self, sizes: Sequence[StepSize], table_width: int, max_context_len: int
    ) -> dict[StepSize, StepMemory]:
        """Make the memory of recorded steps, as `Transformer.step_memory`."""
        return self._transformer.step_memory(sizes, table_width, max_context_len)

    def step_parts(self, memory: StepMemory, kv: KVCache) -> Iterator[Part]:
        """Yield the parts of a step alone, as `Transformer.parts`."""
        return self._transformer.parts(memory, kv.layers)

    def embed(self, token_ids: torch.Tensor, group: ReduceGroup | None = None) -> torch.Tensor:
        """Run the embedding of a first stage, as `Transformer.embed`."""
        return self._transformer.embed(token_ids, group)

    def run(
        self,
        residual: torch.Tensor,
        plan: AttentionPlan,
        kv: KVCache,
        rows: torch.Tensor | None = None,
        group: ReduceGroup | None = None,
    ) -> torch.Tensor:
        """Run the layers of a stage, as `Transformer.run`; the keys and values go to `kv`."""
        return self._transformer.run(residual, plan, kv.layers, rows, group)

    def logits(
        self,
        residual: torch.Tensor,
        group: RankGroup | None = None,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run norm and head of a first stage on the last stage's output, as `Transformer.logits`."""
        return self._transformer.logits(residual, group, hidden)

    def forward_segments(
        self,
        token_ids: torch.Tensor,
        segments: Sequence[Segment],
        kv: KVCache,
        logit_rows: torch.Tensor,
        own: slice,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run one step of a group, which all members run together, as `Transformer.forward`.

        Each member passes its own planner's rows in `own`.
        """
        return self._transformer.forward(token_ids, segments, kv.layers_at, logit_rows, own, hidden)

    def release(self) -> None:
        """Free all pages; variants must have freed theirs. The model cannot run any more."""
        del self._transformer
        self._weights.release()


def _ends(weights: ModelWeights) -> Ends | None:
    if weights.embedding is None or weights.head is None:
        return None
    return Ends.of(weights.embedding.tensors, weights.head.tensors)


def reserve_model(config: ModelConfig, plan: ModelPlan, source: WeightSource, pool: PagePool) -> Model:
    """Reserve the addresses of a model without mapping a page; its tensors are on device "meta".

    The caller maps and fills the pages beside the steps. Runs in the engine's thread. Raises MappingFailed,
    and then keeps nothing.
    """
    return Model(config, plan, reserve_weights(config.folder.name, plan, pool), source)

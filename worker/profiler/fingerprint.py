"""A fingerprint: the first layers of a model with its embedding and head, in every precision at once.

Precisions are installed side by side and measured in turns. Two layers of a small model would stay in the
device's caches from step to step, so as many are loaded as the caches hold, and they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from bus.deployments import RankSize
from bus.messages import PARTS, LayerShape
from bus.pages import pages_for
from bus.precisions import KVPrecision, Precision
from kernels import AttentionPlan
from worker.memory import KVCache, PagePool
from worker.model import Model, ModelConfig, ModelError, Segment
from worker.model.layer import Attention, FeedForward, Layer
from worker.model.layout import RangePlan, degrees, plan_model
from worker.model.ready_weights import open_checkpoint
from worker.model.shard import Shard
from worker.model.sources import RandomWeights, WeightSource
from worker.model.weights import LoadedRange, reserve_weights, tensors_of, view_mapped
from worker.shape.copier import Pause
from worker.shape.host_images import MatrixSource, find_matrices, kept_tensors, plan_variants, write_half
from worker.shape.ranges import VariantKey, VariantRanges

DEPTHS = (1, 2)
SHARES = (2,)  # degrees of which one rank's share is measured
GROUP = 128  # the largest group of a quantised matrix that is usual


class CutPlan:
    """The layout of a fingerprint: pure arithmetic, before anything is loaded."""

    def __init__(
        self,
        config: ModelConfig,
        precisions: Sequence[Precision],
        *,
        dtype: torch.dtype,
        page_bytes: int,
        max_tp: int = 1,
        load_format: str = "safetensors",
        method: str = "",
        depths: Sequence[int] = DEPTHS,
        cache_bytes: int = 0,
    ) -> None:
        """Plan the fingerprint of the whole model's `config`.

        depths: the numbers of layers to measure, as far as the model has them. cache_bytes: of the device; so
        many bytes of layers take turns. The rest as the worker that measures would load the model. Raises
        ModelError: no checkpoint, a quantised set that cannot be used.
        """
        self.depths = sorted({min(depth, config.num_layers) for depth in depths})
        self.whole, self.config = config, config.part(0, self.depths[-1])
        self.all_precisions = list(dict.fromkeys(precisions))
        self.precisions: list[Precision] = [name for name in self.all_precisions if name != "full"]
        self.page_bytes = page_bytes
        self.model = plan_model(self.config, dtype, page_bytes, max_tp)
        is_dummy = load_format == "dummy"
        self.source: WeightSource = RandomWeights() if is_dummy else open_checkpoint(config)
        self.matrices: dict[Precision, MatrixSource] = {
            name: find_matrices(config, self.source, name, method) for name in self.precisions
        }
        self.quantized = plan_variants(self.config, self.model, page_bytes, self.matrices)
        names: list[Precision] = self.precisions if config.fixed_precision else ["full", *self.precisions]
        self.turns = {name: self._num_turns(name, cache_bytes) for name in names}
        self.config = config.part(0, max(self.turns.values()))
        self.model = plan_model(self.config, dtype, page_bytes, max_tp)

    @property
    def num_pages(self) -> int:
        """The pages of the weights in all precisions."""
        turns = self.turns.items()
        return self._end_pages + sum(n * self._layer_pages(name, Shard(0, 1)) for name, n in turns)

    def weight_bytes(self, num_layers: int, precision: Precision, tp: int = 1) -> int:
        """Return the whole pages of a model of so many layers in this precision, on all ranks of a degree.

        Each rank has both ends, and of a layer the pages that hold some of its shard.
        """
        of_layer = sum(self._layer_pages(precision, Shard(rank, tp)) for rank in range(tp))
        return self.page_bytes * (tp * self._end_pages + num_layers * of_layer)

    @property
    def degrees(self) -> list[int]:
        """The degrees of the groups that may part again."""
        return degrees(self.whole, self.model.max_tp)

    def rank_sizes(self, block_tokens: int, kv_dtype: KVPrecision) -> Iterator[RankSize]:
        """Yield what a rank of each degree that stays takes at most, by the layout."""
        for tp in self.whole.cut_sizes.degrees():
            ranks = [self.whole.part(0, 1).of_rank(Shard(rank, tp)) for rank in range(tp)]
            for precision in self.all_precisions if tp > 1 else ():
                with suppress(ModelError):  # the quantised weights cannot be cut so
                    yield self._rank_size(_unlike(ranks), precision, block_tokens, kv_dtype)

    def _rank_size(
        self, ranks: list[ModelConfig], precision: Precision, block_tokens: int, kv_dtype: KVPrecision
    ) -> RankSize:
        dtype, layers, ends = self.model.dtype, list[int](), list[int]()
        for config in ranks:
            plan = plan_model(config, dtype, self.page_bytes, 1)
            halves: Iterable[RangePlan] = plan.layers[0]
            if precision != "full":
                only: dict[Precision, MatrixSource] = {precision: self.matrices[precision]}
                halves = plan_variants(config, plan, self.page_bytes, only).values()
            layers.append(sum(self._pages(half) for half in halves))
            ends.append(sum(self._pages(part) for part in (plan.embedding, plan.head) if part))
        return RankSize(
            tp=ranks[0].own.rank.size,
            precision=precision,
            layer_bytes=max(layers) * self.page_bytes,
            lead_bytes=max(ends) * self.page_bytes,
            block_bytes_per_layer=max(one.kv_block_bytes(block_tokens, dtype, kv_dtype) for one in ranks),
        )

    @property
    def shares(self) -> list[int]:
        """The degrees of which one rank's share is measured."""
        return [tp for tp in self.degrees if tp in SHARES]

    def _num_turns(self, precision: Precision, cache_bytes: int) -> int:
        """Return how many layers of this precision take turns."""
        of_layer = sum(part.nbytes for part in self.layer_ranges(precision))
        return min(self.whole.num_layers, max(self.depths[-1], -(-cache_bytes // of_layer)))

    def layer_ranges(self, precision: Precision) -> list[RangePlan]:
        if precision == "full":
            return list(self.model.layers[0])
        return [self.quantized[part, precision] for part in PARTS]

    @property
    def _end_pages(self) -> int:
        """The pages of embedding and head."""
        return sum(self._pages(part) for part in (self.model.embedding, self.model.head) if part)

    def _layer_pages(self, precision: Precision, shard: Shard) -> int:
        parts = self.layer_ranges(precision)
        if shard.size == 1:
            return sum(self._pages(part) for part in parts)
        return sum(int(part.at(shard).pages(self.page_bytes).sum()) for part in parts)

    def _pages(self, part: RangePlan) -> int:
        return pages_for(part.nbytes, self.page_bytes)


def _unlike(ranks: list[ModelConfig]) -> list[ModelConfig]:
    """Return one rank of each layout: by its sizes, biases of outputs, and where quantised groups begin."""
    found: dict[tuple[int, ...], ModelConfig] = {}
    for one in ranks:
        own = one.own
        sizes = map(len, (own.heads, own.kv_heads, own.ffn_rows, own.vocab))
        starts = (own.heads.start * one.head_dim % GROUP, own.ffn_rows.start % GROUP)
        found[int(own.rank.rank == 0), *sizes, *starts] = one
    return list(found.values())


class Fingerprint:
    """The layers of a `CutPlan`: `map`, `fill`, `build`; then `use` selects those that run."""

    def __init__(self, plan: CutPlan, pool: PagePool) -> None:
        """Reserve addresses. Raises ModelError and MappingFailed."""
        plan.source.check([tensor for part in plan.model.ranges() for tensor in part.sources])
        weights, turns = reserve_weights("fingerprint", plan.model, pool), plan.turns.get("full", 0)
        # A layer that takes turns in fewer bits only shares the full pages of another. A quantised checkpoint
        # has no full pages.
        for index in range(turns, len(weights.layers) if turns else 0):
            weights.layers[index].attention.memory.release()
            weights.layers[index].feed_forward.memory.release()
            weights.layers[index] = weights.layers[index % turns]
        self.plan, self.model = plan, Model(plan.config, plan.model, weights, plan.source)
        try:
            self._ranges = VariantRanges(self.model, pool, plan.quantized)
        except BaseException:
            self.model.release()
            raise
        full = dict[int, tuple[LoadedRange, RangePlan]]()
        ends = (plan.model.embedding, plan.model.head)
        for loaded, part in zip(weights.ranges(), plan.model.ranges(), strict=True):
            if turns or any(part is end for end in ends):
                full.setdefault(id(loaded), (loaded, part))
        self._full = list(full.values())
        self._device = pool.backend.device
        self._group: SilentGroup | None = None
        self._layers: dict[tuple[Precision, int], list[Layer]] = {}
        self._used: tuple[list[Layer], int] = [], 0
        self._next = 0

    def map(self) -> Iterator[bool]:
        """Map all pages, a range at a time, in the engine's thread. Raises OutOfPages and MappingFailed."""
        for loaded, part in self._full:
            loaded.memory.map(0, loaded.memory.num_pages)
            view_mapped(loaded, part)
            yield True
        for variant in self._below_full():
            memory = self._ranges.memory(variant)
            memory.map(0, memory.num_pages)
            yield True

    def fill(self, say: Callable[[str], None] = lambda progress: None, pause: Pause = lambda: None) -> None:
        """Fill the pages, in any thread. Reads only the tensors of these layers. Raises ModelError."""
        plan = self.plan
        say("loading")
        for loaded, part in self._full:
            for tensor in part.sources:
                plan.source.fill(tensor.targets(loaded.tensors), tensor, pause)
        for variant in self._below_full():
            index, part_name, precision = variant
            say(f"making {precision}")
            weights = self.model.weights[index]
            tensors = tensors_of(self._ranges.memory(variant), plan.quantized[part_name, precision])
            matrices = plan.matrices[precision]
            if "full" in plan.turns:
                loaded = weights.attention if part_name == "attention" else weights.feed_forward
                full = loaded.tensors
            else:
                of_full = plan.model.layers[index][PARTS.index(part_name)]
                layout = plan.quantized[part_name, precision]
                full = kept_tensors(of_full, layout, matrices, plan.source, self._device, pause)
            write_half(plan.config, tensors, matrices, index, full, pause)

    def build(self) -> None:
        """Build the layers over their pages, once these are filled."""
        self.model.complete()
        for precision in self.plan.turns:
            self._take(precision)
        self.use(self.plan.depths[-1], next(iter(self.plan.turns)))

    def _below_full(self) -> Iterator[VariantKey]:
        for precision in self.plan.precisions:
            for index in range(self.plan.turns[precision]):
                yield from ((index, part, precision) for part in PARTS)

    def use(self, num_layers: int, precision: Precision, tp: int = 1) -> None:
        """Select the layers of the next steps. tp above 1 (`CutPlan.shares`) selects rank 0's share."""
        self._used = self._layers[precision, tp], num_layers
        self._group = SilentGroup(tp) if tp > 1 else None
        self.turn()

    def turn(self) -> None:
        """Make the next step run the layers whose turn it is."""
        layers, num_layers = self._used
        self.model.layers[:] = [layers[(self._next + i) % len(layers)] for i in range(num_layers)]
        self._next = (self._next + num_layers) % len(layers)

    def forward(
        self,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        kv: KVCache,
        logit_rows: torch.Tensor,
        hidden: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run a step as `Model.forward`. The logits of a share mean nothing: no other rank adds to them."""
        if self._group is None:
            return self.model.forward(token_ids, plan, kv, logit_rows, hidden)
        part = Segment(0, len(self.model.layers), plan, self._group.size, self._group)
        return self.model.forward_segments(token_ids, [part], kv, logit_rows, slice(None), hidden)

    def shape(self) -> list[LayerShape]:
        return self.model.shape()

    def expert_use(self) -> list[list[float]]:
        """Return nothing: layers that take turns are not used as a model's are."""
        return []

    def _take(self, precision: Precision) -> None:
        """Build the layers of one precision.

        A rank's are other views of the same pages. The parts of all ranks take turns as rank 0's: its own
        alone would stay in the caches.
        """
        for tp in (1, *self.plan.shares):
            self._layers[precision, tp] = [
                self._layer(index, precision, shard)
                for shard in (Shard(rank, tp) for rank in range(tp))
                for index in range(self.plan.turns[precision])
            ]

    def _layer(self, index: int, precision: Precision, shard: Shard) -> Layer:
        """Build a layer over a rank's share of its pages, which runs as rank 0's."""
        attention = self._ranges.half((index, "attention", precision), shard)
        feed_forward = self._ranges.half((index, "ffn", precision), shard)
        assert isinstance(attention, Attention)
        assert isinstance(feed_forward, FeedForward)
        return Layer(attention, feed_forward, Shard(0, shard.size))

    def release(self) -> None:
        """Free every page."""
        self._ranges.release()
        self.model.release()


@dataclass(slots=True)
class SilentGroup:
    """A group of `size` ranks of which only this one is here: a step takes the time of its own work."""

    size: int
    rank: int = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        """Leave x as this rank made it."""

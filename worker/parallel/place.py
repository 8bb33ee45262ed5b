"""What a worker brings into a group, and what it would have there."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import Number
from worker.engine.instance import Instance
from worker.memory import KVCache
from worker.model import Model
from worker.model.shard import Shard
from worker.morph.copier import Copier
from worker.morph.resizer import KVResizer
from worker.parallel.filling import Weights

ALONE = Shard()


@dataclass(frozen=True, slots=True)
class Place:
    """One instance and all that belongs to it. stage_bytes: buffers of one stage of an exchange."""

    name: str  # of the model
    instance: Instance
    model: Model
    resizer: KVResizer
    weights: Weights
    copier: Copier
    stage_bytes: int

    @property
    def cache(self) -> KVCache:
        return self.resizer.cache

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def numbers(self, shard: Shard) -> dict[str, Number]:
        """What it has, and what it would have with all layers at `shard`: KV pages of each layer, and blocks
        of that degree in them. The reserve for swaps stays."""
        blocks = self.instance.scheduler.blocks
        weights = range(self.num_layers)
        gained = sum(
            self.weights.pages(layer, self.weights.shard(layer)) - self.weights.pages(layer, shard)
            for layer in weights
        )
        spare = self.resizer.num_spare_pages
        # Rounded down either way: what is missing takes a page of every layer.
        change = (gained + max(0, spare) if gained >= 0 else gained + spare) // self.num_layers
        if gained < 0:
            change = min(0, change)
        pages_after = max(0, self.cache.pages_per_layer + change)
        return {
            "blocks": blocks.capacity,
            "blocks_used": blocks.num_used,
            "pages_per_layer": self.cache.pages_per_layer,
            "pages_after": pages_after,
            "blocks_after": self.blocks_in(pages_after, shard.size),
        }

    def blocks_in(self, pages_per_layer: int, degree: int) -> int:
        """Blocks that a group of `degree` has in so many pages of each layer of every member."""
        cache = self.cache
        most = cache.max_blocks * degree
        return min(most, pages_per_layer * cache.pool.page_bytes * degree // cache.block_bytes)

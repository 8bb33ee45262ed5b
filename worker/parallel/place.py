"""What a worker brings into a group, and what it would have there."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.messages import Number
from worker.engine.core import EngineCore
from worker.memory import BlockAllocator, KVCache
from worker.model import Model
from worker.model.shard import Shard
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.parallel.filling import Weights
from worker.parallel.rows import RowCosts
from worker.parallel.share import BlockShare
from worker.shape.copier import Copier, Rate

ALONE = Shard()


@dataclass(frozen=True, slots=True)
class Place:
    """One instance and all that belongs to it. stage_bytes: buffers of one stage of an exchange. exchanges:
    what groups of this worker sent each other, KV or weights."""

    name: str  # of the model
    target: Target
    model: Model
    weights: Weights
    copier: Copier
    stage_bytes: int
    exchanges: Rate = field(default_factory=Rate)

    @property
    def instance(self) -> EngineCore:
        return self.target.instance

    @property
    def resizer(self) -> KVResizer:
        return self.target.resizer

    @property
    def cache(self) -> KVCache:
        return self.resizer.cache

    @property
    def num_layers(self) -> int:
        return len(self.model.layers)

    def enter_with(self, blocks: int) -> BlockShare:
        """Into a group, from alone, with so many blocks: live ones above move below. The share has the truth
        from here on. Raises OutOfBlocks if they do not find room; then nothing has changed."""
        self.resizer.vacate(blocks)
        held = self.cache.allocator
        share = BlockShare(range(blocks), held.used, blocks)
        self.cache.allocator = BlockAllocator(held.capacity)
        return share

    def leave_with(self, share: BlockShare) -> None:
        """Alone, from a group, with the blocks of the share."""
        cache = self.cache
        cache.allocator = BlockAllocator(cache.blocks_in(cache.pages_per_layer))
        cache.allocator.claim(share.used)
        self.instance.scheduler.blocks = cache.allocator
        self.resizer.leave_group(self.target.saved_pages)

    def numbers(self, shard: Shard, pages_alone: int | None = None) -> dict[str, Number]:
        """What it has, and what it would have with all layers at `shard`: KV pages of each layer, and blocks
        of that degree in them. The reserve for swaps stays. pages_alone: of each layer, as alone no more are
        wanted."""
        blocks, pages = self.instance.scheduler.blocks, self.cache.pages_per_layer
        gained = sum(
            self.weights.pages(layer, self.weights.shard(layer)) - self.weights.pages(layer, shard)
            for layer in range(self.num_layers)
        )
        # Rounded down either way: what is missing takes a page of every layer.
        after = max(0, pages + (gained + self.resizer.num_spare_pages) // self.num_layers)
        if gained >= 0:
            after = max(pages, min(after, self.resizer.useful_pages_per_layer))
        elif shard == ALONE and pages_alone is not None:
            after = min(after, pages_alone)
        return {
            "blocks": blocks.capacity,
            "blocks_used": blocks.num_used,
            "pages_per_layer": pages,
            "pages_after": after,
            "blocks_after": self.blocks_in(after, shard.size),
        }

    def row_costs(self, shard: Shard) -> RowCosts:
        """Of the FFN rows that are missing for all layers at `shard`. ValueError for a degree that the
        weights are not laid out for."""
        fills = [
            self.weights.fill(layer, shard)
            for layer in range(self.num_layers)
            if self.weights.shard(layer) != shard
        ]
        return RowCosts(
            rows_missing_bytes=sum(fill.nbytes for fill in fills),
            rows_host_bytes=sum(fill.read_bytes for fill in fills),
            rows_host_bytes_per_s=self.copier.rate.bytes_per_s,
            rows_peer_bytes_per_s=self.exchanges.bytes_per_s,
        )

    def tokens_at(self, degree: int) -> int:
        """KV of a group of `degree` workers like this one; a sequence ends with its context."""
        blocks = int(self.numbers(Shard(0, degree))["blocks_after"])
        if degree == 1:
            blocks = self.cache.num_blocks
        return blocks * self.cache.block_tokens

    def blocks_in(self, pages_per_layer: int, degree: int) -> int:
        """Blocks that a group of `degree` has in so many pages of each layer of every member."""
        cache = self.cache
        most = cache.max_blocks * degree
        return min(most, pages_per_layer * cache.pool.page_bytes * degree // cache.block_bytes)

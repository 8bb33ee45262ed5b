"""The instance that a worker brings into a group, and what it would have there."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.messages import Number
from worker.engine.core import EngineCore
from worker.memory import BlockAllocator, KVCache
from worker.model import Model
from worker.model.shard import ALONE, Shard
from worker.morph.reshard import Resharder
from worker.morph.resizer import KVResizer
from worker.morph.target import Target
from worker.parallel.formation import Formation
from worker.parallel.rows import RowCosts
from worker.shape.copier import Copier, Rate


@dataclass(frozen=True, slots=True)
class LocalInstance:
    """The only instance of a worker, and all that a group does with it."""

    name: str  # model's name
    target: Target
    model: Model
    weights: Resharder
    copier: Copier
    stage_bytes: int  # bytes of the buffers of one stage of an exchange
    exchanges: Rate = field(default_factory=Rate)  # rate of KV and weights between members

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

    def enter_group(self, blocks: int) -> BlockAllocator:
        """Move live blocks below `blocks` and return these as a share. OutOfBlocks: nothing has changed."""
        self.resizer.vacate(blocks)
        held = self.cache.allocator
        share = BlockAllocator(blocks, range(blocks), held.used)
        self.cache.allocator = BlockAllocator(held.capacity)
        return share

    def leave_group(self, share: BlockAllocator) -> None:
        """Take the blocks of `share` back into the cache's own allocator."""
        cache = self.cache
        cache.allocator = BlockAllocator(cache.blocks_in(cache.pages_per_layer), used=share.used)
        self.instance.scheduler.blocks = cache.allocator
        self.resizer.leave_group(self.target.saved_pages)

    def numbers(self, shard: Shard, pages_alone: int | None = None) -> dict[str, Number]:
        """Return KV blocks and pages per layer, now and at `shard`. pages_alone: the most without a group."""
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
            "blocks_after": self.cache.blocks_in(after, shard.size),
        }

    def blocks_between(self, formation: Formation, pages_per_layer: int) -> int:
        """Return the blocks of a subgroup in so many pages while layers run at both degrees.

        Its block c must have memory as block c * n + j of the group, too: fewer than it has at the low degree
        where the members of a group have the same KV heads.
        """
        return self.cache.blocks_in(pages_per_layer, formation.size) // formation.num_subgroups

    def row_costs(self, shard: Shard) -> RowCosts:
        """Return the costs of the FFN rows missing at `shard`. Raises ValueError: no such layout."""
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
        """Return the tokens of KV of a group of `degree` workers like this one."""
        blocks = int(self.numbers(Shard(0, degree))["blocks_after"])
        if degree == 1:
            blocks = self.cache.num_blocks
        return blocks * self.cache.block_tokens

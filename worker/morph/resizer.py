"""Grow and shrink the KV cache of one instance while its sequences live in it (MorphServe §4.4).

Shrinking moves the live blocks out of the pages that are to go, renumbers them, and unmaps the pages.
Nothing is recomputed, and no sequence loses a block.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import torch

from kernels import copy_blocks
from worker.engine.core import EngineCore
from worker.memory import KVCache, plan_moves_below

# A shrink that nobody asked for by number leaves every running sequence room for so many tokens more:
# without it the next steps would preempt what the step before admitted.
HEADROOM_TOKENS = 64


class KVResizer:
    """The size of one KV cache. Only in the engine's thread, between steps.

    Pages per layer are the pages that the cache has of each of its layers, all alike; a block may straddle
    two.
    """

    def __init__(
        self,
        instance: EngineCore,
        cache: KVCache,
        *,
        reserve_pages: int,
        useful_pages: int,
        owns_rest: bool = True,
    ) -> None:
        """Take charge of the size of `cache`.

        reserve_pages: free pages that the pool keeps for swaps. useful_pages: of all layers together; more
        would lie idle. owns_rest: the pages left when the cache was filled are its own.
        """
        self.cache = cache
        self.reserve_pages = reserve_pages
        self.num_layers = cache.num_layers
        self.num_blocks_moved = 0  # since the start
        self.num_lent = 0  # pages per layer that other models have of it; below 0: that it has of others
        # For people, behind a reason: whose KV lies beside it, and how an order that misses so many pages
        # gets at it. "": nobody's.
        self.kv_beside: Callable[[int], str] = lambda missing: ""
        self._instance = instance
        # Free pages that are the cache's own: what swaps set free, and what was left when it was filled, too
        # few for a page of every layer. Below 0: so many of its pages swaps took that were nobody's.
        is_rest = owns_rest and self.num_spare_pages < self.num_layers
        self._own_pages = max(0, self.num_spare_pages) if is_rest else 0
        self._useful = useful_pages // self.num_layers
        self.longest_blocks = -(-instance.limits.max_model_len // cache.block_tokens)  # of one sequence
        self.min_blocks = min(self.longest_blocks, cache.num_blocks)

    @property
    def own_pages(self) -> int:
        """Free pages that belong to the cache; below 0: so many of its pages swaps have borrowed."""
        return self._own_pages

    @property
    def most_pages_per_layer(self) -> int:
        """Pages per layer that the cache could have if no other model had any KV."""
        counts = self.cache.pool.counts()
        return max(0, counts.free + counts.kv - self.reserve_pages) // self.num_layers

    @property
    def useful_pages_per_layer(self) -> int:
        """Pages per layer beyond which more would lie idle."""
        return self._useful

    def pages_for(self, num_blocks: int, degree: int = 1) -> int:
        """Return the pages per layer for `num_blocks` of a group of `degree`, up to the addresses."""
        return self.cache.pages_for(min(num_blocks, self.cache.max_blocks * degree), degree)

    def blocks_in(self, pages_per_layer: int, degree: int = 1) -> int:
        """Return the blocks, of a group of `degree`, in so many pages per layer."""
        return self.cache.blocks_in(max(0, pages_per_layer), degree)

    def blocks_without(self, num_pages: int) -> int:
        """Return the blocks that are left when the cache gives up to so many pages."""
        pages_per_layer = self.cache.pages_per_layer - -(-num_pages // self.num_layers)
        return max(self.needed_blocks(), self.cache.blocks_in(max(0, pages_per_layer)))

    @property
    def num_spare_pages(self) -> int:
        """Free pages of the pool beyond its reserve; below 0: so many are missing from it."""
        return self.cache.pool.num_free - self.reserve_pages

    def growable(self) -> int:
        """Return the pages per layer by which the cache can grow without touching the reserve."""
        return max(0, min(self.num_spare_pages // self.num_layers, self.cache.growable_pages))

    def grow(self, pages_per_layer: int) -> None:
        """Add pages to every layer. Raises MappingFailed and OutOfPages, having changed nothing."""
        self.cache.grow(pages_per_layer)

    def lend(self, pages_per_layer: int) -> None:
        """Lend pages to another model, until it goes. Raises as `shrink` does."""
        self.shrink(pages_per_layer)
        self.num_lent += pages_per_layer

    def borrow(self, pages_per_layer: int) -> None:
        """Take pages of another model, or its own again. Raises as `grow` does."""
        self.grow(pages_per_layer)
        self.num_lent -= pages_per_layer

    def wanted_blocks(self) -> int:
        """Return how many blocks more would admit the whole queue, as far as the batch has rows.

        Running sequences keep their headroom. 0 while no sequence waits for blocks.
        """
        scheduler, limits = self._instance.scheduler, self._instance.limits
        if not scheduler.num_blocks_wanted:
            return 0
        places = max(0, limits.max_num_seqs - len(scheduler.running))
        waiting = islice(scheduler.waiting, places)
        needed = sum(seq.num_blocks_needed(self.cache.block_tokens) + 1 for seq in waiting)
        return max(0, needed + self.headroom() - scheduler.blocks.num_free)

    def own(self, num_pages: int) -> None:
        """Count so many free pages as the cache's own (below 0: a swap has mapped them)."""
        self._own_pages += num_pages

    def grow_own(self) -> None:
        """Give the cache its own free pages, as far as they are of use and make a page of every layer."""
        useful = self._useful - self.cache.pages_per_layer
        pages_per_layer = min(self._own_pages // self.num_layers, self.growable(), useful)
        if pages_per_layer > 0:
            self.grow(pages_per_layer)
            self._own_pages -= pages_per_layer * self.num_layers

    def leave_group(self, saved_pages: int) -> None:
        """Count the cache's own pages anew after it was part of a group, and grow by them.

        saved_pages: pages by which the swapped halves are smaller than in full precision.
        """
        spare = self.num_spare_pages
        self._own_pages = min(spare, saved_pages)
        self.grow_own()

    def needed_blocks(self) -> int:
        """Blocks below which only an order may shrink the cache: those in use, and headroom."""
        return max(self.min_blocks, self.cache.allocator.num_used + self.headroom())

    def can_take(self, pages_per_layer: int, num_blocks: int) -> bool:
        """Return whether so many pages per layer can go while `num_blocks` blocks stay."""
        left = self.cache.pages_per_layer - pages_per_layer
        return left >= 0 and self.cache.blocks_in(left) >= num_blocks

    def shrink(self, pages_per_layer: int) -> None:
        """Take the last pages of every layer; live blocks in them move to free ones below.

        Raises OutOfBlocks if they do not find room, and MappingFailed. Sequences keep all they had, either
        way.
        """
        self.vacate(self.cache.blocks_in(self.cache.pages_per_layer - pages_per_layer))
        self.cache.shrink(pages_per_layer)

    def vacate(self, capacity: int) -> None:
        """Move live blocks below `capacity`. Raises OutOfBlocks if they do not find room."""
        moves = plan_moves_below(self.cache.allocator.live_from(0), capacity)
        if not moves:
            return
        pairs = torch.tensor(list(moves.items()), device=self.cache.layers[0].device)
        sources, targets = pairs.unbind(1)
        for layer in self.cache.layers:
            copy_blocks(layer, sources, targets)
        self.cache.allocator.relocate(moves)
        self._instance.renumber_blocks(moves)
        self.num_blocks_moved += len(moves)

    def headroom(self) -> int:
        """Count the blocks that the running sequences may fill within HEADROOM_TOKENS each."""
        limits, block_tokens = self._instance.limits, self.cache.block_tokens
        total = 0
        for seq in self._instance.scheduler.running:
            longest = min(limits.max_model_len, seq.num_prompt + seq.request.sampling.max_tokens)
            tokens = min(len(seq.token_ids) + HEADROOM_TOKENS, longest)
            total += max(0, -(-tokens // block_tokens) - len(seq.block_ids))
        return total

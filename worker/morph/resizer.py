"""The KV cache of one instance, grown and shrunk while its sequences live in it.

Shrinking moves the live blocks out of the pages that are to go, tells everybody who knows their numbers, and
unmaps; nothing is recomputed, nothing is taken from a sequence (MorphServe §4.4).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from itertools import islice

import torch

from bus.messages import Number
from kernels import copy_blocks
from worker.engine.core import EngineCore
from worker.memory import KVCache
from worker.morph.outcome import NotApplied
from worker.morph.run import Clock, Patience

# A shrink that nobody asked for by number leaves every running sequence room for so many tokens more:
# without it the next steps would preempt what the step before admitted.
HEADROOM_TOKENS = 64
# Pages per layer that a Resize maps or unmaps between two steps: so the calls' own cost is shared (8 layers,
# pages of 64 KiB: one takes 0.3 ms, eight 0.6), and no step waits for all of a large change.
PAGES_AT_ONCE = 8


class KVResizer:
    """Pages per layer are what a cache has of each of its layers, all alike; a block may straddle two pages.
    Only in the thread that owns the engine, between steps."""

    def __init__(
        self,
        instance: EngineCore,
        cache: KVCache,
        *,
        reserve_pages: int,
        useful_pages: int,
        owns_rest: bool = True,
    ) -> None:
        """reserve_pages: free pages that the pool keeps for swaps. useful_pages: more of them, of all layers
        together, would lie idle. owns_rest: what was left when the cache was filled is its own."""
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
        longest = -(-instance.limits.max_model_len // cache.block_tokens)
        self.min_blocks = min(longest, cache.num_blocks)

    @property
    def max_blocks(self) -> int:
        """What would fit if no other model had a page of KV."""
        counts = self.cache.pool.counts()
        pages = max(0, counts.free + counts.kv - self.reserve_pages)
        return self.cache.blocks_in(pages // self.num_layers)

    @property
    def useful_pages_per_layer(self) -> int:
        """More would lie idle."""
        return self._useful

    def pages_for(self, num_blocks: int) -> int:
        """Pages per layer."""
        return self.cache.pages_for(min(num_blocks, self.cache.max_blocks))

    def blocks_without(self, num_pages: int) -> int:
        """What is left of the cache when it gives so many pages, or all that it does not need."""
        pages_per_layer = self.cache.pages_per_layer - -(-num_pages // self.num_layers)
        return max(self.needed_blocks(), self.cache.blocks_in(max(0, pages_per_layer)))

    @property
    def num_spare_pages(self) -> int:
        """Free pages of the pool beyond its reserve; below 0: so many are missing from it."""
        return self.cache.pool.num_free - self.reserve_pages

    def growable(self) -> int:
        """Pages per layer by which it can grow without touching the reserve."""
        return max(0, min(self.num_spare_pages // self.num_layers, self.cache.growable_pages))

    def grow(self, pages_per_layer: int) -> None:
        """Raises MappingFailed and OutOfPages; then nothing has changed."""
        self.cache.grow(pages_per_layer)

    def lend(self, pages_per_layer: int) -> None:
        """To another model, until it goes. Raises as `shrink` does."""
        self.shrink(pages_per_layer)
        self.num_lent += pages_per_layer

    def borrow(self, pages_per_layer: int) -> None:
        """From another model, or its own again. Raises as `grow` does."""
        self.grow(pages_per_layer)
        self.num_lent -= pages_per_layer

    def wanted_blocks(self) -> int:
        """How many blocks more would let in all that wait, as far as there is a place in the batch, with room
        for those that run; 0 while nobody waits for blocks."""
        scheduler, limits = self._instance.scheduler, self._instance.limits
        if not scheduler.num_blocks_wanted:
            return 0
        places = max(0, limits.max_num_seqs - len(scheduler.running))
        waiting = islice(scheduler.waiting, places)
        needed = sum(seq.num_blocks_needed(self.cache.block_tokens) + 1 for seq in waiting)
        return max(0, needed + self._headroom() - scheduler.blocks.num_free)

    def spend(self, num_pages: int) -> None:
        """A swap mapped so many free pages."""
        self._own_pages -= num_pages

    def gain(self, num_pages: int) -> None:
        """A swap set so many pages free. The cache has what is its own of the free pages, as far as that is
        of use there, makes a page of every layer, and the reserve is whole."""
        self._own_pages += num_pages
        useful = self._useful - self.cache.pages_per_layer
        pages_per_layer = min(self._own_pages // self.num_layers, self.growable(), useful)
        if pages_per_layer > 0:
            self.grow(pages_per_layer)
            self._own_pages -= pages_per_layer * self.num_layers

    def settle(self) -> None:
        """Alone again, after swaps of a group: what swapped layers left free is the cache's own."""
        spare = self.num_spare_pages
        self._own_pages = spare if self._instance.layers_below_full else min(0, spare)
        self.gain(0)

    def shrink_for_swap(self, pages_per_layer: int) -> None:
        """As `shrink`; what the swap does not take is given back by the next `gain`."""
        self.shrink(pages_per_layer)
        self._own_pages += pages_per_layer * self.num_layers

    def needed_blocks(self) -> int:
        """Below this nothing may shrink it but a command that says so: what is used, and headroom."""
        return max(self.min_blocks, self.cache.allocator.num_used + self._headroom())

    def can_take(self, pages_per_layer: int, num_blocks: int) -> bool:
        """Whether so many pages per layer can go and `num_blocks` blocks stay."""
        left = self.cache.pages_per_layer - pages_per_layer
        return left >= 0 and self.cache.blocks_in(left) >= num_blocks

    def shrink(self, pages_per_layer: int) -> None:
        """Give the last so many pages of every layer back; live blocks in them move to free ones below.

        Raises OutOfBlocks if they do not find room and MappingFailed from the system. Sequences keep all
        they had, either way.
        """
        self.vacate(self.cache.blocks_in(self.cache.pages_per_layer - pages_per_layer))
        self.cache.shrink(pages_per_layer)

    def vacate(self, capacity: int) -> None:
        """Move live blocks below `capacity`. Raises OutOfBlocks if they do not find room."""
        moves = self.cache.allocator.moves_below(capacity)
        if not moves:
            return
        sources, targets = torch.tensor(moves, device=self.cache.layers[0].device).unbind(1)
        for layer in self.cache.layers:
            copy_blocks(layer, sources, targets)
        self.cache.allocator.relocate(moves)
        self._instance.renumber_blocks(dict(moves))
        self.num_blocks_moved += len(moves)

    def _headroom(self) -> int:
        """Blocks that the running sequences may fill within HEADROOM_TOKENS each."""
        limits, block_tokens = self._instance.limits, self.cache.block_tokens
        total = 0
        for seq in self._instance.scheduler.running:
            longest = min(limits.max_model_len, seq.num_prompt + seq.request.sampling.max_tokens)
            tokens = min(len(seq.token_ids) + HEADROOM_TOKENS, longest)
            total += max(0, -(-tokens // block_tokens) - len(seq.block_ids))
        return total


class ResizeRun:
    """One Resize, some pages of every layer at a time. Where it ends before its goal, it goes back to where
    it began, as far as nobody has taken the pages."""

    def __init__(
        self, resizer: KVResizer, num_blocks: int, *, wait_s: float, clock: Clock = time.monotonic
    ) -> None:
        """Raises NotApplied for sizes that can never be, or not as long as the layers are what they are."""
        self._resizer, self._num_blocks = resizer, num_blocks
        self._patience = Patience(wait_s, clock)
        self._goal = resizer.pages_for(num_blocks)
        self._pages_before = resizer.cache.pages_per_layer
        self._blocks_before = resizer.cache.num_blocks
        self._moved_before = resizer.num_blocks_moved
        least, most = resizer.min_blocks, resizer.max_blocks
        if not least <= num_blocks <= most:
            raise NotApplied(
                "failed" if num_blocks < least else "deferred",  # fewer bits in a layer make room for more
                f"this instance needs at least {least} KV blocks, since the longest sequence must fit"
                if num_blocks < least
                else f"this instance can have at most {most} KV blocks: the device's budget less the weights",
                blocks_asked=num_blocks,
                min_blocks=least,
                max_blocks=most,
            )

    progress, is_beyond_return = "", False

    @property
    def deadline(self) -> float | None:
        return self._patience.deadline

    def numbers(self) -> dict[str, Number]:
        cache = self._resizer.cache
        return {
            "blocks_before": self._blocks_before,
            "blocks_after": cache.num_blocks,
            "blocks_used": cache.allocator.num_used,
            "blocks_moved": self._resizer.num_blocks_moved - self._moved_before,
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Generator[bool, None, None]:
        cache, is_done = self._resizer.cache, False
        try:
            while missing := self._goal - cache.pages_per_layer:
                if obstacle := self._obstacle(missing):
                    if not self._patience.wait():
                        raise obstacle
                    yield False
                    continue
                self._patience.get_on()
                if missing > 0:
                    self._resizer.grow(min(missing, PAGES_AT_ONCE))
                else:
                    self._resizer.shrink(min(-missing, PAGES_AT_ONCE))
                yield True
            is_done = True
            self._resizer.num_lent = 0  # as ordered, it is its own
        finally:
            if not is_done:
                self._go_back()

    def _obstacle(self, missing: int) -> NotApplied | None:
        """Why it cannot go on now."""
        resizer, cache = self._resizer, self._resizer.cache
        if missing > resizer.growable():
            return NotApplied(
                "deferred",
                f"{self._num_blocks} KV blocks need {missing * resizer.num_layers} pages more; "
                f"{cache.pool.num_free} are free, and {resizer.reserve_pages} of them are kept for swaps"
                f"{resizer.kv_beside(missing * resizer.num_layers - resizer.num_spare_pages)}",
                pages_needed=missing * resizer.num_layers,
                pages_free=cache.pool.num_free,
                pages_reserved=resizer.reserve_pages,
            )
        used = cache.allocator.num_used
        if not resizer.can_take(-missing, used):
            return NotApplied(
                "deferred",
                f"{used} KV blocks are in use, {self._num_blocks} were asked for",
                blocks_used=used,
                blocks_asked=self._num_blocks,
            )
        return None

    def _go_back(self) -> None:
        cache = self._resizer.cache
        missing = self._pages_before - cache.pages_per_layer
        if missing > 0:
            self._resizer.grow(min(missing, self._resizer.growable()))
        elif self._resizer.can_take(-missing, cache.allocator.num_used):
            self._resizer.shrink(-missing)

"""Grow and shrink the KV cache of one instance while its sequences live in it (MorphServe §4.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from bus.precisions import KVPrecision
from worker.distributed.messages import ConvertKV, CountKV, GrowKV, MoveBlocks, ShrinkKV
from worker.engine.core import EngineCore
from worker.engine.sequence import Limits, Sequence
from worker.memory import KVCache, MappingFailed, plan_moves_below

# Room of every running sequence that only an order may take: else the next steps would preempt it.
HEADROOM_TOKENS = 64


class KVResizer:
    """The size of one KV cache, of which all layers have the same number of pages. Only between steps."""

    def __init__(
        self,
        instance: EngineCore | None,
        cache: KVCache,
        *,
        reserve_pages: int,
        useful_blocks: int,
        owns_rest: bool = True,
        is_stage: bool = False,
    ) -> None:
        """Take charge of the size of `cache`.

        instance: None at a later stage of a pipeline, whose requests are at its leader. is_stage: of a
        pipeline, all stages of which have room for the same blocks.
        reserve_pages: free pages that the pool keeps for swaps. useful_blocks: more would lie idle.
        owns_rest: the pages left when the cache was filled are its own; never at a stage.
        """
        self.cache = cache
        self.reserve_pages = reserve_pages
        self.num_layers = cache.num_layers
        self.num_blocks_moved = 0  # since the start
        self.num_lent = 0  # pages per layer that other models have of it; below 0: that it has of others
        # Returns, for the reason of an order that misses so many pages, who else has KV here, or "".
        self.kv_beside: Callable[[int], str] = lambda missing: ""
        self._instance, self._is_stage = instance, is_stage
        self._growing = 0  # pages per layer that another thread maps
        # Free pages that are the cache's own: what swaps set free, and what was left when it was filled, too
        # few for a page of every layer. Below 0: so many of its pages swaps have borrowed.
        is_rest = owns_rest and not is_stage and self.num_spare_pages < self.num_layers
        self.own_pages = max(0, self.num_spare_pages) if is_rest else 0
        self._useful_blocks = useful_blocks
        longest = instance.limits.max_model_len if instance else 1
        self.longest_blocks = -(-longest // cache.block_tokens)  # of one sequence
        self.min_blocks = min(self.longest_blocks, cache.num_blocks)

    @property
    def _led(self) -> EngineCore:
        assert self._instance, "a later stage has no requests"
        return self._instance

    @property
    def _degree(self) -> int:
        """The number of members whose blocks these are."""
        return self._instance.executor.num_members if self._instance else 1

    @property
    def useful_pages_per_layer(self) -> int:
        """Pages per layer above which more would lie idle, in the precision of the cache."""
        return self.pages_for(self._useful_blocks)

    @property
    def most_pages_per_layer(self) -> int:
        """Pages per layer that the cache could have if no other model had any KV."""
        counts = self.cache.pool.counts()
        return max(0, counts.free + counts.kv - self.reserve_pages) // self.num_layers

    def pages_for(self, num_blocks: int, degree: int = 1) -> int:
        """Return the pages per layer for `num_blocks` of a group of `degree`, up to the addresses."""
        return self.cache.pages_for(min(num_blocks, self.cache.most_blocks(degree)), degree)

    def blocks_in(self, pages_per_layer: int, degree: int = 1, precision: KVPrecision | None = None) -> int:
        """Return the blocks, of a group of `degree`, in so many pages per layer."""
        return self.cache.blocks_in(max(0, pages_per_layer), degree, precision)

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

    @property
    def useful_alone(self) -> int:
        """Pages per layer of use here if nothing changes elsewhere: no more than the other stages have."""
        pages = self.cache.pages_per_layer
        return pages + max(0, self.num_lent) if self._is_stage else max(pages, self.useful_pages_per_layer)

    def pages_at_once(self) -> int:
        """Return the pages per layer by which the cache can grow now without a wait.

        On a GPU these are none that a step in flight may use.
        """
        pool = self.cache.pool
        if not self.grows_beside:
            return self.growable()
        try:
            pool.reclaim()
        except MappingFailed:  # as soon as they are needed, it is told
            return self.growable()
        return min(self.growable(), (pool.num_free - pool.num_leaving) // self.num_layers)

    @property
    def grows_beside(self) -> bool:
        """True if another thread maps what the cache grows by: where no other member waits for it."""
        return self.cache.pool.beside is not None and self._degree == 1 and not self._is_stage

    @property
    def is_growing(self) -> bool:
        """True while another thread maps pages for the cache."""
        return self.cache.is_growing

    def end_growth(self) -> None:
        """Count the blocks of the growth that was begun, if any, and wait for it. Raises MappingFailed."""
        pages, self._growing = self._growing, 0
        try:
            self.cache.end_growth()
        except MappingFailed:
            self.own_pages += pages * self.num_layers
            raise

    def _settled(self) -> KVCache:
        """Return the cache, which may change: a growth that was begun has ended. Raises MappingFailed."""
        self.end_growth()
        return self.cache

    def own_all(self) -> None:
        """Count all its pages as its own, after an order; a stage goes on to miss what the others have."""
        if not self._is_stage:
            self.num_lent = 0

    def keep(self, num_blocks: int) -> None:
        """Unmap what is not needed for `num_blocks`; the pages stay its own."""
        cache = self._settled()
        pages = max(0, cache.pages_per_layer - cache.pages_for(num_blocks))
        cache.shrink(pages)
        self.own_pages += pages * self.num_layers

    def lend(self, pages_per_layer: int) -> None:
        """Lend pages to another model, until it goes. Raises OutOfBlocks and MappingFailed.

        Sequences keep all they had.
        """
        cache = self._settled()
        self.vacate(cache.blocks_in(cache.pages_per_layer - pages_per_layer))
        cache.shrink(pages_per_layer)
        self.num_lent += pages_per_layer

    def borrow(self, pages_per_layer: int) -> None:
        """Take pages of another model, or its own again. Raises as `KVCache.grow` does."""
        self._settled().grow(pages_per_layer)
        self.num_lent -= pages_per_layer

    def wanted_blocks(self) -> int:
        """Return how many blocks more would admit the queue, as far as the batch has rows; 0 without one."""
        scheduler = self._led.scheduler
        if not scheduler.num_blocks_wanted:
            return 0
        return max(scheduler.num_blocks_wanted, scheduler.num_blocks_needed - self.cache.num_blocks)

    def leave_group(self, saved_pages: int) -> None:
        """Count the cache's own pages anew after it was part of a group, and grow by what is of use.

        saved_pages: pages by which the swapped halves are smaller than in full precision.
        """
        self.own_pages = min(self.num_spare_pages, saved_pages)
        useful = self.useful_pages_per_layer - self.cache.pages_per_layer
        pages_per_layer = min(self.own_pages // self.num_layers, self.growable(), useful)
        if pages_per_layer > 0:
            self.cache.grow(pages_per_layer)
            self.own_pages -= pages_per_layer * self.num_layers

    def needed_blocks(self) -> int:
        """Blocks below which only an order may shrink the cache: those in use, and headroom."""
        return max(self.min_blocks, self.cache.allocator.num_used + self.headroom())

    def can_take(self, pages_per_layer: int, num_blocks: int) -> bool:
        """Return whether so many pages per layer can go while `num_blocks` blocks stay."""
        left = self.cache.pages_per_layer - pages_per_layer
        return left >= 0 and self.cache.blocks_in(left) >= num_blocks

    def carry_out(self, action: GrowKV | ShrinkKV | MoveBlocks) -> None:
        """Give pages to every layer, or take the last ones; live blocks in them move as the action says.

        The pages of a swap are the cache's own, those of an order are not.
        """
        cache = self._settled()
        if isinstance(action, GrowKV) and action.purpose == "swap" and self.grows_beside:
            cache.begin_growth(action.pages)
            self._growing = action.pages
        elif isinstance(action, GrowKV):
            cache.grow(action.pages)
        else:
            self._move(action.moves)
        if isinstance(action, ShrinkKV):
            cache.shrink(action.pages)
        if not isinstance(action, MoveBlocks) and action.purpose == "swap":
            pages = action.pages * self.num_layers
            self.own_pages += pages if isinstance(action, ShrinkKV) else -pages

    def carry_out_conversion(self, action: CountKV | ConvertKV) -> None:
        """Convert a layer, or count blocks anew after or before all layers are converted."""
        cache = self._settled()
        if isinstance(action, CountKV):
            self._move(action.moves)
            cache.count_as(action.precision)
            return
        cache.convert(action.layer, action.precision, action.blocks, self._degree)
        if self._instance:
            self._instance.kv_converted()

    def vacate(self, capacity: int) -> None:
        """Move live blocks below `capacity`. Raises OutOfBlocks if they do not find room."""
        blocks = self.cache.allocator
        moves = plan_moves_below(blocks.used, capacity, blocks.index)
        if moves:
            self._led.executor.collective(MoveBlocks(moves=moves))

    def _move(self, moves: Mapping[int, int]) -> None:
        """Move blocks (from -> to) on this device, and rename them in the books and in the sequences."""
        instance = self._instance
        self.cache.copy_blocks(moves, self._degree)
        if instance:
            instance.scheduler.blocks.relocate(moves)
            instance.renumber_blocks(moves)
        self.num_blocks_moved += len(moves)

    def headroom(self) -> int:
        """Count the blocks that the running sequences may fill within HEADROOM_TOKENS each."""
        return headroom(self._led.scheduler.running, self._led.limits)


def headroom(running: Iterable[Sequence], limits: Limits) -> int:
    """Count the blocks that running sequences may fill within HEADROOM_TOKENS each."""
    total = 0
    for seq in running:
        tokens = min(len(seq.token_ids) + HEADROOM_TOKENS, seq.most_tokens(limits))
        total += max(0, -(-tokens // limits.block_tokens) - len(seq.block_ids))
    return total

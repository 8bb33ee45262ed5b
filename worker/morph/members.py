"""The members of an instance, as its leader sees them: a worker alone, a group, the stages of a pipeline.

Morphs are written once against this: `do` has all members carry out an action between the same two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from bus.precisions import KVPrecision, Precision, is_below
from worker.distributed.messages import (
    Actions,
    CompileKV,
    ConvertKV,
    CountKV,
    GrowKV,
    KVPurpose,
    MemberStatus,
    ShrinkKV,
)
from worker.memory import OutOfBlocks, plan_moves_below
from worker.morph.plan import Half
from worker.morph.run import NotApplied, Steps
from worker.morph.target import Target


class Members:
    """The members of an instance when a morph begins; it fails when they part."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._executor = target.instance.executor
        self._ticket = 0
        self._is_counting = False  # blocks in use, to take pages from them

    @property
    def size(self) -> int:
        """The number of members that share each layer."""
        return self._executor.num_members

    def begin(self, action: Actions) -> None:
        """Have all members carry out `action` after the next step, without waiting for it."""
        self._ticket = self._executor.collective(action)

    @property
    def is_lost(self) -> bool:
        """True if the group fell apart."""
        return self._executor.is_lost

    @property
    def has_settled(self) -> bool:
        """True if nothing that was begun is outstanding: the statuses are of now."""
        return not self._is_counting and self._executor.is_done(self._ticket)

    def settle(self) -> Steps:
        """Wait until every member has carried out what was begun."""
        while not self.has_settled:
            self._executor.raise_lost()
            yield False

    def do(self, action: Actions) -> Steps:
        """Have all members carry out `action`, and wait for it."""
        self.begin(action)
        yield from self.settle()

    @property
    def num_workers(self) -> int:
        """The number of members, of all stages."""
        return len(self.statuses())

    def holding(self, half: Half) -> list[MemberStatus]:
        """Return the status of the members that have `half`: all, or those of a stage of a pipeline."""
        return [each for each in self.statuses() if each.first <= half.layer < each.end]

    def pool_of(self, half: Half) -> Hashable:
        """Return a name for the pool of `half`: None for this worker's own."""
        first = self.holding(half)[0].first
        return (self.target.instance.id, first) if first else None

    def statuses(self) -> list[MemberStatus]:
        """Return the latest status of every member. Raises PeerLost if the group fell apart."""
        self._executor.raise_lost()
        return self._executor.statuses()

    @property
    def blocks(self) -> int:
        """KV blocks of the instance."""
        return self.target.instance.scheduler.blocks.capacity

    @property
    def num_used(self) -> int:
        """KV blocks in use by all members."""
        return sum(each.num_used for each in self.statuses())

    def needed_blocks(self) -> int:
        """Blocks below which only an order may shrink the cache: those in use, and headroom."""
        needed = sum(each.num_used + each.headroom for each in self.statuses())
        return max(self.min_blocks, needed)

    @property
    def min_blocks(self) -> int:
        """Blocks below which the cache never shrinks: the longest sequence must fit."""
        if self.size == 1:
            return self.target.resizer.min_blocks
        return min(self.target.resizer.longest_blocks, self.blocks)

    @property
    def most_blocks(self) -> int:
        """Blocks that the instance could have if no other model had any KV."""
        return self.target.resizer.blocks_in(min(each.most_pages for each in self.statuses()), self.size)

    def blocks_after(self, pages: int) -> int:
        """Return the blocks with `pages` more (below 0: fewer) in each layer."""
        least = min(each.kv_pages for each in self.statuses())
        return self.target.resizer.blocks_in(least + pages, self.size)

    def pages_missing(self, num_blocks: int) -> int:
        """Return the pages by which each layer must grow to hold `num_blocks`; negative: shrink."""
        least = min(each.kv_pages for each in self.statuses())
        return self.target.resizer.pages_for(num_blocks, self.size) - least

    def num_held_above(self, precision: Precision) -> int:
        """Count the requests that must not run in `precision`."""
        floors = (item for each in self.statuses() for item in each.floors.items())
        return sum(count for floor, count in floors if is_below(precision, floor))

    def have_copied(self, half: Half) -> bool:
        """Return whether all members have copied the variant of `half`. Raises NotApplied if one failed."""
        statuses = self.statuses()
        if error := next((each.copy_error for each in statuses if each.copy_error), ""):
            raise NotApplied("failed", error)
        return all(tuple(half) in map(tuple, each.copied) for each in self.holding(half))

    def grow(self, pages: int, purpose: KVPurpose) -> Steps:
        """Add pages to each layer of the KV cache."""
        if pages > 0:
            yield from self.do(GrowKV(pages=pages, blocks=self.blocks_after(pages), purpose=purpose))

    def shrink(self, pages: int, purpose: KVPurpose, then: Actions | None = None) -> Steps:
        """Take pages from each layer of the KV cache, moving live blocks out of the way (MorphServe §4.4).

        then: an action that needs the pages, between the same two steps. Raises NotApplied where the blocks
        in use do not fit into the rest.
        """
        yield from self._after_count(lambda used: self.plan_shrink(pages, used, purpose), then)

    def blocks_as(self, precision: KVPrecision) -> int:
        """Return the blocks that the present pages hold in a precision of the KV cache."""
        least = min(each.kv_pages for each in self.statuses())
        return self.target.resizer.blocks_in(least, self.size, precision)

    def compile_kv(self) -> Steps:
        """Have all members compile what KV in 8 bits needs, beside the steps. Raises NotApplied."""
        yield from self.do(CompileKV())
        while not all(each.is_kv_compiled for each in self.statuses()):
            yield False
        if error := next((each.kv_error for each in self.statuses() if each.kv_error), ""):
            raise NotApplied("failed", error)

    def convert_kv(self, layer: int, precision: KVPrecision) -> Steps:
        """Hold the KV of a layer in a precision, with all that any member has in it."""
        yield from self._after_count(
            lambda held: ConvertKV(layer=layer, precision=precision, blocks=sorted(set(held))),
            with_found=True,
        )

    def count_kv(self, precision: KVPrecision) -> Steps:
        """Count KV blocks as a precision has them, moving live blocks that would be beyond."""
        yield from self._after_count(lambda used: self._plan_count(precision, used))

    def _plan_count(self, precision: KVPrecision, used: Sequence[int]) -> CountKV:
        blocks = self.blocks_as(precision)
        return CountKV(precision=precision, blocks=blocks, moves=self._plan_moves(used, blocks))

    def _after_count(
        self, plan: Callable[[list[int]], Actions], then: Actions | None = None, *, with_found: bool = False
    ) -> Steps:
        """Carry out what `plan` makes of the blocks of all members, before any of them takes another."""
        self._is_counting = True
        try:
            with self._executor.counting_blocks(with_found=with_found) as count:
                counted = [block for each in (yield from count()) for block in each]
                self.begin(plan(counted))
                if then:
                    self.begin(then)
        finally:
            self._is_counting = False
        yield from self.settle()

    def _plan_moves(self, used: Sequence[int], blocks: int) -> dict[int, int]:
        """Return the moves of blocks in use below `blocks`. Raises NotApplied where they do not fit."""
        try:
            return plan_moves_below(used, blocks, self.target.instance.scheduler.blocks.index)
        except OutOfBlocks as error:
            raise self.in_use(len(used), blocks) from error

    def plan_shrink(self, pages: int, used: Sequence[int], purpose: KVPurpose) -> ShrinkKV:
        """Return the action that takes pages from each layer; raises as `shrink` does. used: blocks.

        Moves spare what the prefix cache of the leader holds; it does not know the others'.
        """
        blocks = self.blocks_after(-pages)
        return ShrinkKV(pages=pages, blocks=blocks, moves=self._plan_moves(used, blocks), purpose=purpose)

    def grow_own(self) -> bool:
        """Give the KV cache the free pages that are its own, as far as they make a page of every layer.

        The member with the fewest sets the number for all. Return True if a worker alone has more of them,
        for later boundaries (`KVResizer.pages_at_once`), or maps some in another thread.
        """
        if self.is_lost or not self.has_settled:  # the statuses do not show yet what an action takes
            return False
        resizer = self.target.resizer
        if resizer.is_growing:
            return True
        resizer.end_growth()
        pages = min(
            min(each.own_pages // each.num_layers, each.growable_pages, each.useful_pages - each.kv_pages)
            for each in self.statuses()
        )
        now = pages if self.num_workers > 1 else min(pages, resizer.pages_at_once())
        if now > 0:
            self.begin(GrowKV(pages=now, blocks=self.blocks_after(now), purpose="swap"))
        return now < pages or resizer.is_growing

    def in_use(self, num_used: int, num_asked: int) -> NotApplied:
        """Make the refusal of a size that the blocks in use do not fit into."""
        reason = f"{num_used} KV blocks are in use, {num_asked} were asked for"
        return NotApplied("deferred", reason, blocks_used=num_used, blocks_asked=num_asked)

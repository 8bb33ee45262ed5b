"""One member of a group: what its steps run on, and how its memory changes between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from worker.distributed.communicator import Communicator
from worker.distributed.messages import GrowKV, ShrinkKV
from worker.memory import BlockAllocator
from worker.model.shard import ALONE
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance
from worker.parallel.rows import RowSource


@dataclass(slots=True)
class Costs:
    """The costs of the transformation in progress at this rank."""

    moving_s: float = 0.0  # between steps, for layers that change their degree
    rows_s: float = 0.0  # spent on the FFN rows of layers that go back to the low degree
    bytes_exchanged: int = 0
    pages_freed: int = 0
    peak_bytes: int = 0


@dataclass(slots=True)
class Member:
    """This worker's state in one group; ends when the group splits or falls apart."""

    formation: Formation
    rank: int
    local: LocalInstance
    high: Communicator
    low: Communicator | None  # communicator of the subgroup; None: a subgroup of one
    share: BlockAllocator  # share of the KV, in the low degree's numbers unless uniform
    pages_alone: int  # pages of each cache layer after the group
    on_progress: Callable[[], None] = lambda: None  # called in the middle of what takes long, and is no hang
    next_low: Communicator | None = None  # communicator of the subgroup after a split
    rows: RowSource | None = None  # rows of layers that go back to the low degree
    costs: Costs = field(default_factory=Costs)
    tp: int = 0  # the degree; while it changes, the old one
    is_over: bool = False  # this worker has left the group

    def __post_init__(self) -> None:
        self.tp = self.tp or self.formation.low

    @property
    def filled(self) -> int:
        """The layer from which on the low degree has its weights, or pages for those of peers."""
        return self.rows.filled if self.rows else self.local.num_layers

    @property
    def tokens_alone(self) -> int:
        """Tokens of KV that this worker has outside of any group."""
        return self.local.cache.blocks_in(self.pages_alone) * self.local.cache.block_tokens

    def use(self, share: BlockAllocator) -> None:
        """Let the scheduler allocate from `share` from here on."""
        if self.formation.is_uniform:
            share.index.open()
        else:
            share.index.close()
        self.share = self.local.instance.scheduler.blocks = share

    def take_new_blocks(self, first: int, blocks: int) -> None:
        """Note that there are `blocks` in all; the leader has those from `first` on, and lends them."""
        if self.rank == 0:
            self.share.take(range(first, blocks))
        self.share.capacity = blocks

    def reshaped(self, tp: int) -> None:
        """Note that the degree is `tp` from here on."""
        self.tp = tp
        self.local.instance.reshaped()

    def take_next_low(self, communicator: Communicator) -> None:
        """Keep the communicator of the subgroup that the group will split into."""
        self.drop_next_low()
        self.next_low = communicator

    def drop_next_low(self) -> None:
        """Close it, since the group will not split, or not so."""
        if self.next_low:
            self.next_low.close()
        self.next_low = None

    def close(self) -> None:
        """Close the communicators, so that nothing waits in one of them."""
        for each in (self.high, self.low, self.next_low):
            if each:
                each.close()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Count what is done within as time that the transformation takes between steps."""
        began = time.monotonic()
        yield
        self.costs.moving_s += time.monotonic() - began

    def have_blocks(self, blocks: int) -> None:
        """Note that there are so many blocks in all. Raises BlocksInUse where one beyond is in use."""
        if blocks > self.share.capacity:
            self.take_new_blocks(self.share.capacity, blocks)
        else:
            self.share.truncate(blocks)

    def resized(self, action: GrowKV | ShrinkKV) -> None:
        """Divide the blocks anew; an operator's size holds when the group splits, too."""
        pages = action.pages if isinstance(action, GrowKV) else -action.pages
        self.have_blocks(action.blocks)
        if action.purpose == "order":
            self.pages_alone = max(self.pages_alone + pages, self.local.cache.pages_for(1))

    def fall_apart(self) -> None:
        """Serve alone again, with all weights and as many KV pages as before, as far as there are.

        All sequences are recomputed. Raises what makes the worker useless.
        """
        self.is_over = True
        self.close()
        if self.rows:
            self.rows.stop()
            self.rows = None
        local, cache = self.local, self.local.cache
        local.target.drop_all()
        cache.allocator = BlockAllocator(cache.blocks_in(cache.pages_per_layer))
        local.instance.recompute_all(cache.allocator)
        cache.shrink(max(0, cache.pages_per_layer - self.pages_alone))
        self._fill_all_weights()
        cache.grow(max(0, min(self.pages_alone - cache.pages_per_layer, cache.growable_pages)))
        local.resizer.leave_group(local.target.saved_pages)
        self.reshaped(1)

    def _fill_all_weights(self) -> None:
        weights = self.local.weights
        for layer in range(self.local.num_layers):
            if weights.shard(layer) != ALONE:
                weights.map(layer, ALONE)
                weights.fill(layer, ALONE)(self.on_progress)
                weights.widen(layer, ALONE)
                self.on_progress()

    def check_integrity(self) -> None:
        """Raise BrokenInvariant or AssertionError if a block is lost or owned twice."""
        self.share.check_integrity()
        self.local.instance.check_integrity()

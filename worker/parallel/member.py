"""One member of a group: what its steps run on, and what is done between two of them changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kernels import copy_blocks
from worker.distributed.communicator import Communicator
from worker.parallel.filling import Rows
from worker.parallel.formation import Formation
from worker.parallel.place import Place
from worker.parallel.share import BlockShare, in_parts


@dataclass(slots=True)
class Costs:
    """Of the transformation that runs, at this rank."""

    moving_s: float = 0.0  # between steps, for layers that change their degree
    rows_s: float = 0.0  # spent on the FFN rows of layers that go back to the low degree
    bytes_exchanged: int = 0
    pages_freed: int = 0
    peak_bytes: int = 0


@dataclass(slots=True)
class Member:
    """`share`: of this planner, in the numbers of the low degree unless all layers are at one; its capacity
    is what every subgroup has. `pages_alone`: of each layer of the cache, to go back to."""

    formation: Formation
    rank: int
    place: Place
    high: Communicator
    low: Communicator | None  # of its subgroup; None for one of one
    share: BlockShare
    pages_alone: int
    clock: Callable[[], float] = time.monotonic
    on_progress: Callable[[], None] = lambda: None  # in the middle of what takes long, and is no hang
    next_low: Communicator | None = None  # of the subgroup that it will part into
    rows: Rows | None = None  # of layers that go back to the low degree
    costs: Costs = field(default_factory=Costs)
    tp: int = 0  # the degree; while it changes, the old one
    is_over: bool = False  # it is in this group no more

    def __post_init__(self) -> None:
        self.tp = self.tp or self.formation.low

    @property
    def filled(self) -> int:
        """Layers from here on have the weights that the low degree needs, or pages for those of peers."""
        return self.rows.filled if self.rows else self.place.num_layers

    @property
    def tokens_alone(self) -> int:
        """KV of this worker where it is in no group."""
        return self.place.blocks_in(self.pages_alone, 1) * self.place.cache.block_tokens

    def use(self, share: BlockShare) -> None:
        """This planner allocates from it from here on."""
        self.share = self.place.instance.scheduler.blocks = share

    def take_new_blocks(self, first: int, blocks: int) -> None:
        """There are so many in all; those from `first` on are the leader's, who lends them to who wants
        them."""
        if self.rank == 0:
            self.share.take(range(first, blocks))
        self.share.capacity = blocks

    def copy_blocks(self, moves: Mapping[int, int]) -> None:
        """From -> to, all at once: a target may be a source, too. All members have the same numbers: each
        copies its part of each block."""
        layers = self.place.cache.layers_at(self.formation.size)
        most = max(1, self.place.stage_bytes // (layers[0][0].numel() * layers[0].itemsize))
        for part in in_parts(moves, most):
            sources, targets = torch.tensor(list(part.items()), device=layers[0].device).unbind(1)
            for layer in layers:
                if part.keys().isdisjoint(part.values()):
                    copy_blocks(layer, sources, targets)
                else:
                    layer[targets] = layer[sources]

    def reshaped(self, tp: int) -> None:
        self.tp = tp
        self.place.instance.reshaped()

    def take_next_low(self, communicator: Communicator) -> None:
        """Of the subgroup that it will part into."""
        self.drop_next_low()
        self.next_low = communicator

    def drop_next_low(self) -> None:
        """It will not part, or not so."""
        if self.next_low:
            self.next_low.close()
        self.next_low = None

    def close(self) -> None:
        """Its communicators: nobody waits in one of them any longer."""
        for each in (self.high, self.low, self.next_low):
            if each:
                each.close()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """What is done within it costs the transformation time between steps."""
        began = self.clock()
        yield
        self.costs.moving_s += self.clock() - began

    def check_integrity(self) -> None:
        """Raises BrokenInvariant and AssertionError."""
        self.share.check_integrity()
        self.place.instance.check_integrity()

"""A simulated group as its reflex and its morphs see it: one shape, and the KV blocks of all members.

A member has its shard of each layer: its attention whole and `1/tp` of its FFN, as in the service. A block of
the group takes `1/tp` of a block's pages at each member.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from instar.simulate.calibration import EngineCalibration
from instar.simulate.engine import SimulatedInstance
from instar.simulate.shape import SimulatedShape
from worker.engine.sequence import Sequence as EngineSequence
from worker.memory import BlockAllocator
from worker.memory.prefix_index import PrefixIndex


def calibration_at(calibration: EngineCalibration, tp: int) -> EngineCalibration:
    """Return a calibration whose memory is that of a member of a group of degree `tp`."""
    memory, tokens = calibration.memory, calibration.tokens_at[tp]
    blocks = tokens // calibration.limits.block_tokens
    shard = {
        name: memory.attention_pages[name] + math.ceil((pages - memory.attention_pages[name]) / tp)
        for name, pages in memory.layer_pages.items()
    }
    pages_per_block = memory.kv_pages / memory.kv_blocks / tp
    found = msgspec.structs.replace(
        memory,
        kv_pages=max(1, round(blocks * pages_per_block)),
        kv_blocks=max(1, blocks),
        layer_pages=shard,
    )
    return msgspec.structs.replace(calibration, memory=found)


class GroupInstance:
    """A group as `SimulatedMorphs` sees an instance; the first member leads."""

    def __init__(
        self, members: Sequence[SimulatedInstance], calibration: EngineCalibration, capacity: int
    ) -> None:
        """calibration: of a member, by `calibration_at`. capacity: blocks in full precision."""
        self.members, leader = members, members[0]
        self.name, self.limits = leader.name, leader.limits
        self.shape = SimulatedShape(calibration, leader.shape.losses)
        extra = capacity - self.shape.kv_blocks  # whole pages of every layer hold a few blocks less
        self.shape.follow(leader.shape)
        self.shape.fit()
        self.blocks = GroupBlocks(self, extra)
        self.scheduler = GroupScheduler(self)
        self.is_at_ease = False

    @property
    def has_work(self) -> bool:
        return any(one.has_work for one in self.members)

    def reshaped(self, now_s: float) -> None:
        """Let all members run in the precisions of the group."""
        for one in self.members:
            one.shape.follow(self.shape)
            one.reshaped(now_s)


class GroupBlocks:
    """The blocks of all members. extra: those beyond the pages of the shape."""

    def __init__(self, group: GroupInstance, extra: int) -> None:
        self._group, self._extra = group, extra

    @property
    def _shares(self) -> list[BlockAllocator]:
        return [one.scheduler.blocks for one in self._group.members]

    @property
    def capacity(self) -> int:
        return self._group.shape.kv_blocks + self._extra

    @property
    def num_used(self) -> int:
        return sum(one.num_used for one in self._shares)

    @property
    def used(self) -> list[int]:
        return sorted(block for one in self._shares for block in one.used)

    @property
    def index(self) -> PrefixIndex:
        return self._shares[0].index

    def extend(self, blocks: int) -> None:
        """Grow to so many blocks in the pages of the shape, a share of the new ones for each member."""
        shares, capacity = self._shares, blocks + self._extra
        for i, one in enumerate(shares):
            one.take(range(one.capacity + i, capacity, len(shares)))
            one.capacity = max(one.capacity, capacity)

    def relocate(self, moves: Mapping[int, int]) -> None:
        for one in self._shares:
            one.relocate(moves)

    def truncate(self, blocks: int) -> None:
        for one in self._shares:
            one.truncate(blocks + self._extra)


class GroupScheduler:
    """The sequences of all members."""

    def __init__(self, group: GroupInstance) -> None:
        self._group = group

    @property
    def running(self) -> Iterator[EngineSequence]:
        return (seq for one in self._group.members for seq in one.scheduler.running)

    @property
    def waiting(self) -> list[EngineSequence]:
        return [seq for one in self._group.members for seq in one.scheduler.waiting]

    @property
    def num_preemptions(self) -> int:
        return sum(one.scheduler.num_preemptions for one in self._group.members)

    def renumber(self, moves: Mapping[int, int]) -> None:
        for one in self._group.members:
            one.scheduler.renumber(moves)

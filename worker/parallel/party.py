"""This worker's part in a group: plan its own, run everybody's, publish its own. The engine's thread owns it.

Whatever the group does between two steps, all members do after the same one: the leader says so with the
step. A member that raises, dies or hangs costs the group, never a request: everyone left is alone again and
computes its own sequences anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kernels import copy_blocks
from worker.engine.instance import Output, Planned
from worker.engine.work import merge, no_work
from worker.memory import BlockAllocator, OutOfBlocks
from worker.parallel.canary import Canary
from worker.parallel.chair import Chair
from worker.parallel.communicator import Communicator, PeerLost
from worker.parallel.exchange import exchange
from worker.parallel.filling import Filling
from worker.parallel.formation import Formation
from worker.parallel.half_swap import HalfSwap
from worker.parallel.merged import MergedStep
from worker.parallel.place import ALONE, Place
from worker.parallel.share import BlockShare
from worker.parallel.wire import (
    Actions,
    Census,
    DropHalf,
    EnterNext,
    Grow,
    InstallHalf,
    Lend,
    MoveBoundary,
    PackedWork,
    Parted,
    PartingBegins,
    PrepareHalf,
    Ready,
    Settle,
    Show,
    Shrink,
    Step,
    pack,
    unpack,
)


@dataclass(slots=True)
class Costs:
    """Of the transformation that runs, at this rank."""

    moving_s: float = 0.0  # between steps, for layers that change their degree
    bytes_exchanged: int = 0
    pages_freed: int = 0
    peak_bytes: int = 0


class Party:
    """`tick` until `is_over`; `fall_apart` when it raises."""

    def __init__(
        self,
        group: str,
        formation: Formation,
        rank: int,
        place: Place,
        high: Communicator,
        low: Communicator | None,
        share: BlockShare,
        pages_alone: int,
        *,
        send: Callable[[Ready], None],
        broadcast: Callable[[Step], None],
        on_settled: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Enter: from here on this instance steps with the others. low: None for subgroups of one. share: of
        this planner, in the numbers of the low degree unless all are at one; its capacity is what every
        subgroup has. pages_alone: of each layer of the cache, to go back to. send: a Ready to the leader;
        broadcast: the leader's, a Step to the others. on_settled: it is to be known
        that all layers are at the high degree."""
        self.group, self.formation, self.rank = group, formation, rank
        self.chair = Chair(group, formation.size) if rank == 0 else None
        self.costs = Costs()
        self.is_over = self.has_fallen = False
        self.has_news = False  # at the last tick this member told something: morphs may go on
        self.place, self._high, self._low = place, high, low
        self._send, self._broadcast, self._clock = send, broadcast, clock
        self._on_settled = on_settled
        self.pages_alone = pages_alone
        self._blocks = share.capacity
        self._filling: Filling | None = None
        self._step = 0
        self._called: Step | None = None
        self._planned: Planned | None = None
        self._told: tuple[object, ...] | None = None
        self._swap: HalfSwap | None = None
        self._canary: Canary | None = None
        self.heard: torch.Tensor | None = None  # of the canary that was sent last
        self._next_low: Communicator | None = None
        self._outputs: list[Output] = []
        self._given: dict[int, list[int]] = {}
        self._is_counted = False
        self.enters_next: EnterNext | None = None  # this was its last step in this group
        self._share = share
        place.instance.scheduler.blocks = share

    @property
    def step(self) -> int:
        """The next one."""
        return self._step

    @property
    def communicators(self) -> list[Communicator]:
        """Of all members, and of its subgroup if that has several; whole as long as nothing was raised."""
        return [self._high, self._low] if self._low else [self._high]

    @property
    def filled(self) -> int:
        return self._filling.filled if self._filling else self.place.num_layers

    # ----------------------------------------------------------------------------- at every boundary

    def raise_fallen(self) -> None:
        """Raises PeerLost if the group fell apart."""
        if self.has_fallen:
            raise PeerLost("the group fell apart; its members serve alone")

    @property
    def _has_prepared(self) -> bool:
        return self._swap is not None and self._swap.is_ready

    @property
    def share(self) -> BlockShare:
        return self._share

    def send_canary(self) -> bool:
        """It goes with the next step; `heard` is its log-probabilities then. False where no block is free."""
        try:
            self._canary = Canary(self.place)
        except OutOfBlocks:
            return False
        self.heard = None
        return True

    def take_low(self, communicator: Communicator) -> None:
        """Of the subgroup that it will part into."""
        self._next_low = communicator

    def drop_low(self) -> None:
        """It will not part, or not so."""
        if self._next_low:
            self._next_low.close()
        self._next_low = None

    @property
    def is_in_last_step(self) -> bool:
        """It was called: after it the members part, whoever has made it already is gone."""
        return self._called is not None and any(isinstance(action, Parted) for action in self._called.after)

    def take_step(self, step: Step) -> None:
        """The leader calls it."""
        self._called = step

    def tick(self, may_plan: bool) -> None:
        """Tell what there is to run, and run the step when it is called. may_plan: else this planner has
        nothing. Raises PeerLost, and whatever makes a step or a change fail; then `fall_apart`. Either way
        `take_outputs`: a step may have made tokens before what came after it failed."""
        if self._filling:
            self._filling.advance()
        self._tell(may_plan)
        if self.chair and self._called is None and (called := self.chair.call()):
            self._broadcast(called)
            self._called = called
        if self._called is None:
            return
        step, self._called = self._called, None
        if step.step != self._step:
            raise RuntimeError(f"step {step.step} was called, this rank is at {self._step}")
        self._run(step)

    def take_outputs(self) -> list[Output]:
        """What this planner's requests got since this was asked last."""
        outputs, self._outputs = self._outputs, []
        return outputs + self.place.instance.take_unsent()

    def _tell(self, may_plan: bool) -> None:
        """Once for each step, and again when there is news: work that came meanwhile, layers filled."""
        instance = self.place.instance
        # A plan takes blocks: none is made after the count was told, since moves are decided by that.
        has_told_count = self._is_counted and self._told is not None and self._told[0] == self._step
        if self._planned is None and may_plan and instance.has_work and not has_told_count:
            self._planned = instance.plan()
        # While layers run at two degrees a number means another block in each subgroup: nothing is lent.
        may_borrow = may_plan and self.formation.is_uniform
        wanted = instance.scheduler.num_blocks_wanted if may_borrow else 0
        mine = [each.work for each in (self._planned and self._planned.inputs, self._canary) if each]
        told = (self._step, len(mine), wanted, self.filled, self._has_prepared)
        self.has_news = told != self._told
        if not self.has_news:
            return
        self._told = told
        must_count = self._is_counted or not self.formation.is_uniform
        ready = Ready(
            group=self.group,
            rank=self.rank,
            step=self._step,
            work=pack(merge(mine)) if mine else None,
            spare=instance.scheduler.num_blocks_spare,
            wanted=wanted,
            wanting_s=instance.wanting_seconds(),
            used=self._share.used if must_count else [],
            num_used=self._share.num_used,
            filled=self.filled,
            has_prepared=self._has_prepared,
            pages=self.place.cache.pages_per_layer,
            spare_pages=self.place.resizer.num_spare_pages,
            floor=instance.highest_floor(),
            given=self._given,
        )
        if self.chair:
            self.chair.take(ready)
        else:
            self._send(ready)
        self._given = {}

    def _run(self, step: Step) -> None:
        began = self._clock()
        self._step += 1
        self._is_counted = False
        self._share.take(step.grants.get(self.rank, []))
        with_me = self.formation.ranks_of(self.formation.subgroup(self.rank))
        others = (rank for rank in with_me if rank != self.rank)
        self._share.num_used_by_others = sum(step.num_used[rank] for rank in others)
        # A plan that came too late for this step is forgotten; the next one is as if it had not been made.
        planned = self._planned if step.works[self.rank] else None
        canary = self._canary if step.works[self.rank] else None
        self._planned = None
        if any(step.works):
            logits = self._forward(step.works)
            if canary:
                self.heard, logits = logits[-1].log_softmax(0), logits[:-1]
                canary.close()
                self._canary = None
            if planned:
                self._outputs += self.place.instance.finish(planned, logits, began)
        for action in step.after:
            self._do(action, step)

    def _forward(self, packed: Sequence[PackedWork | None]) -> torch.Tensor:
        step = MergedStep(self.place, self.formation, self.rank, self._high, self._low)
        return step.forward([unpack(each) if each else no_work() for each in packed])

    # ----------------------------------------------------------------------------- after a step

    def _do(self, action: Actions, step: Step) -> None:
        match action:
            case Show():
                self._on_settled()
            case PrepareHalf():
                self._swap = HalfSwap(self.place, action)
            case InstallHalf() | DropHalf():
                self._end_swap(is_wanted=isinstance(action, InstallHalf))
            case Grow():
                self._grow(action)
            case Shrink():
                self._shrink(action)
            case EnterNext():
                self.enters_next = action
                self._share.drop_free_from(action.blocks)
            case MoveBoundary():
                self._move_boundary(action.to, step)
            case Settle():
                self._settle(action)
            case Census():
                self._is_counted = True
            case PartingBegins():
                self._begin_parting(action, step)
            case Parted():
                self._part()
            case Lend():
                if action.giver == self.rank:
                    self._given = {action.taker: self._share.give(action.blocks)}
            case _:
                raise RuntimeError(f"{type(action).__name__} is nothing that this member can do")

    def _move_boundary(self, to: int, step: Step) -> None:
        began = self._clock()
        formation, weights, costs = self.formation, self.place.weights, self.costs
        live = self._live(step.used)
        for layer in reversed(range(to, formation.boundary)):
            if formation.grows:
                costs.pages_freed += weights.narrow(layer, formation.high_shard(self.rank))
                self._exchange(layer, live)
            else:
                self._exchange(layer, live)
                weights.widen(layer, formation.low_shard(self.rank))
        self.formation = formation.moved(to)
        costs.moving_s += self._clock() - began

    def _live(self, used: Sequence[Sequence[int]]) -> list[list[int]]:
        """By subgroup, in its own numbers."""
        formation = self.formation
        return [
            sorted(block for rank in formation.ranks_of(j) for block in used[rank])
            for j in range(formation.num_subgroups)
        ]

    def _exchange(self, layer: int, live: Sequence[Sequence[int]]) -> None:
        formation = self.formation
        moved = exchange(
            self.place.cache.layers_at(formation.size)[layer],
            live,
            formation.subgroup(self.rank),
            self._high,
            formation.peers(self.rank),
            self.place.stage_bytes,
            formation.grows,
        )
        self.costs.bytes_exchanged += moved.bytes
        self.costs.peak_bytes = max(self.costs.peak_bytes, moved.peak_bytes)

    def _end_swap(self, *, is_wanted: bool) -> None:
        if swap := self._swap:
            self._swap = None
            if is_wanted:
                swap.install()
            else:
                swap.drop()

    def _grow(self, action: Grow) -> None:
        self.place.cache.grow(action.pages)
        self._take_new_blocks(self._blocks, action.blocks)

    def _take_new_blocks(self, first: int, blocks: int) -> None:
        """They are the leader's, who lends them to who wants them."""
        if self.rank == 0:
            self._share.take(range(first, blocks))
        self._share.capacity = self._blocks = blocks

    def _shrink(self, action: Shrink) -> None:
        moves = action.moves
        self._copy_blocks(moves)

        def number(block: int) -> int:
            return moves.get(block, block)

        self._share.move(moves, action.blocks)
        self.place.instance.renumber_all_blocks(number)
        self.place.cache.shrink(action.pages)
        self._blocks = action.blocks

    def _copy_blocks(self, moves: Mapping[int, int]) -> None:
        """All members have the same numbers: each copies its part of each block."""
        if moves:
            sources, targets = torch.tensor(list(moves.items()), device=self.place.instance.device).unbind(1)
            for layer in self.place.cache.layers_at(self.formation.size):
                copy_blocks(layer, sources, targets)

    def _settle(self, action: Settle) -> None:
        n, subgroup = self.formation.num_subgroups, self.formation.subgroup(self.rank)

        def number(block: int) -> int:
            return block * n + subgroup

        self._share.renumber(number)
        self.place.instance.renumber_all_blocks(number)
        cache = self.place.cache
        cache.grow(max(0, action.pages[self.rank] - cache.pages_per_layer))
        self._take_new_blocks(self._blocks * n, action.blocks)
        self.formation = self.formation.grown()
        self._reshaped(self.formation.size)

    def _begin_parting(self, action: PartingBegins, step: Step) -> None:
        """Blocks that finished in this very step are still counted, and free again where they come to lie."""
        began = self._clock()
        cache, moves = self.place.cache, action.moves
        self._copy_blocks(moves)
        formation = self.formation.beginning(action.low, self.place.num_layers, grows=False)
        n, subgroup = formation.num_subgroups, formation.subgroup(self.rank)

        def number(block: int) -> int:
            return moves.get(block, block) // n

        ranks = formation.ranks_of(subgroup)
        counted = {rank: {number(block) for block in step.used[rank]} for rank in ranks}
        nobodys = sorted(set(range(action.blocks)).difference(*counted.values()))
        own = counted[self.rank].union(nobodys[ranks.index(self.rank) :: len(ranks)])
        self._share = BlockShare(own, map(number, self._share.used), action.blocks)
        self.place.instance.scheduler.blocks = self._share
        self.place.instance.renumber_all_blocks(number)
        cache.shrink(cache.pages_per_layer - action.pages[self.rank])
        self.formation, self._blocks = formation, action.blocks
        if self._low:
            self._low.close()
        self._low, self._next_low = self._next_low, None
        self._filling = Filling(
            self.place.weights, formation.low_shard(self.rank), self.place.num_layers, self.place.copier
        )
        self.costs.moving_s += self._clock() - began

    def _part(self) -> None:
        self._filling = None
        self.is_over = True
        if self.formation.low == 1:
            self.place.leave_with(self._share)
        self._reshaped(self.formation.low)

    def _reshaped(self, tp: int) -> None:
        self.place.instance.tp = tp
        self.place.instance.reshaped()

    # ----------------------------------------------------------------------------- the end nobody wanted

    def fall_apart(self) -> None:
        """Alone again, whatever the others do: with all weights and as many KV pages as before, as far as
        there are; what ran is computed anew. Raises what makes the worker useless."""
        self.is_over = self.has_fallen = True
        for group in (self._high, self._low, self._next_low):
            if group:
                group.close()
        if self._filling:
            self._filling.stop()
            self._filling = None
        self._end_swap(is_wanted=False)
        place, cache = self.place, self.place.cache
        cache.allocator = BlockAllocator(cache.blocks_in(cache.pages_per_layer))
        place.instance.recompute_all(cache.allocator)
        cache.shrink(max(0, cache.pages_per_layer - self.pages_alone))
        for layer in range(place.num_layers):
            if place.weights.shard(layer) != ALONE:
                place.weights.map(layer, ALONE)
                place.weights.fill(layer, ALONE)(lambda: True)
                place.weights.widen(layer, ALONE)
        cache.grow(max(0, min(self.pages_alone - cache.pages_per_layer, cache.growable_pages)))
        place.resizer.settle()
        self._reshaped(1)

    def check_integrity(self) -> None:
        """Raises BrokenInvariant and AssertionError."""
        self._share.check_integrity()
        self.place.instance.check_integrity()

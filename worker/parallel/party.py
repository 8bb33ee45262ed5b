"""This worker's part in a group: plan its own, run everybody's, publish its own. The engine's thread owns it.

Whatever the group does between two steps, all members do after the same one: the leader says so with the
step. A member that raises, dies or hangs costs the group, never a request: everyone left is alone again and
computes its own sequences anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.distributed.communicator import PeerLost
from worker.distributed.messages import (
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
from worker.engine.instance import Output, Planned
from worker.engine.work import Work, merge, no_work
from worker.memory import OutOfBlocks
from worker.parallel.actions import boundary, cache, falling_apart, halves, parting
from worker.parallel.budget import even
from worker.parallel.canary import Canary
from worker.parallel.chair import Chair
from worker.parallel.formation import Formation
from worker.parallel.member import Member
from worker.parallel.merged import MergedStep
from worker.parallel.place import Place


class Party:
    """`tick` until `is_over`; `fall_apart` when it raises."""

    def __init__(
        self,
        group: str,
        member: Member,
        *,
        send: Callable[[Ready], None],
        broadcast: Callable[[Step], None],
        on_settled: Callable[[], None],
    ) -> None:
        """Enter: from here on this instance steps with the others. send: a Ready to the leader; broadcast:
        the leader's, a Step to the others. on_settled: it is to be known that all layers are at the high
        degree."""
        self.group, self.member = group, member
        self.chair = Chair(group, member.formation.size) if member.rank == 0 else None
        self.has_fallen = False
        self.has_news = False  # at the last tick this member told something: morphs may go on
        self.enters_next: EnterNext | None = None  # this was its last step in this group
        self.heard: torch.Tensor | None = None  # of the canary that was sent last
        self.step_s = 0.0  # that the last step took; nothing is done after it yet
        self._send, self._broadcast, self._on_settled = send, broadcast, on_settled
        self._step = 0
        self._called: Step | None = None
        self._planned: Planned | None = None
        self._told: tuple[object, ...] | None = None
        self._canary: Canary | None = None
        self._outputs: list[Output] = []
        self._given: dict[int, list[int]] = {}
        self._is_counted = False
        self._max_tokens = member.place.instance.limits.max_num_batched_tokens
        self._allowed = even(self._max_tokens, member.formation.size)  # tokens of this planner's next step
        member.use(member.share)

    @property
    def formation(self) -> Formation:
        return self.member.formation

    @property
    def place(self) -> Place:
        return self.member.place

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def is_over(self) -> bool:
        return self.member.is_over

    @property
    def step(self) -> int:
        """The next one."""
        return self._step

    @property
    def is_in_last_step(self) -> bool:
        """It was called: after it the members part, whoever has made it already is gone."""
        return self._called is not None and any(isinstance(action, Parted) for action in self._called.after)

    def raise_fallen(self) -> None:
        """Raises PeerLost if the group fell apart."""
        if self.has_fallen:
            raise PeerLost("the group fell apart; its members serve alone")

    def send_canary(self) -> bool:
        """It goes with the next step; `heard` is its log-probabilities then. False where no block is free."""
        try:
            self._canary = Canary(self.place)
        except OutOfBlocks:
            return False
        self.heard = None
        return True

    def fall_apart(self) -> None:
        """Alone again, whatever the others do. Raises what makes the worker useless."""
        self.has_fallen = True
        falling_apart.fall_apart(self.member)

    def check_integrity(self) -> None:
        """Raises BrokenInvariant and AssertionError."""
        self.member.check_integrity()

    # ----------------------------------------------------------------------------- at every boundary

    def take_step(self, step: Step) -> None:
        """The leader calls it."""
        self._called = step

    def tick(self, may_plan: bool) -> None:
        """Tell what there is to run, and run the step when it is called. may_plan: else this planner has
        nothing. Raises PeerLost, and whatever makes a step or a change fail; then `fall_apart`. Either way
        `take_outputs`: a step may have made tokens before what came after it failed."""
        if self.member.rows:
            self.member.rows.advance()
        self._tell(may_plan)
        if self.chair and self._called is None and (called := self.chair.call()):
            self._broadcast(called)
            self._called = called
        if self._called is None:
            return
        step, self._called = self._called, None
        if step.step != self._step:
            raise RuntimeError(f"step {step.step} was called, this rank is at {self._step}")
        began = self.member.clock()
        self._run(step)
        self.step_s = self.member.clock() - began
        for action in step.after:
            self._do(action, step)

    def take_outputs(self) -> list[Output]:
        """What this planner's requests got since this was asked last."""
        outputs, self._outputs = self._outputs, []
        return outputs + self.place.instance.take_unsent()

    # ----------------------------------------------------------------------------- before a step

    def _tell(self, may_plan: bool) -> None:
        """Once for each step, and again when there is news: work that came meanwhile, layers filled."""
        member, scheduler = self.member, self.place.instance.scheduler
        self._plan(may_plan)
        # While layers run at two degrees a number means another block in each subgroup: nothing is lent.
        may_borrow = may_plan and self.formation.is_uniform
        wanted = scheduler.num_blocks_wanted if may_borrow else 0
        mine = [each.work for each in (self._planned and self._planned.inputs, self._canary) if each]
        told = (self._step, len(mine), wanted, member.filled, member.is_swap_ready)
        self.has_news = told != self._told
        if not self.has_news:
            return
        self._told = told
        ready = self._ready(mine, wanted)
        if self.chair:
            self.chair.take(ready)
        else:
            self._send(ready)
        self._given = {}

    def _plan(self, may_plan: bool) -> None:
        """A plan takes blocks: none is made after the count was told, since moves are decided by that."""
        instance = self.place.instance
        has_told_count = self._is_counted and self._told is not None and self._told[0] == self._step
        if self._planned is None and may_plan and instance.has_work and not has_told_count:
            self._planned = instance.plan(self._allowed)

    def _ready(self, mine: list[Work], wanted: int) -> Ready:
        member, place, instance = self.member, self.place, self.place.instance
        must_count = self._is_counted or not self.formation.is_uniform
        return Ready(
            group=self.group,
            rank=self.rank,
            step=self._step,
            work=pack(merge(mine)) if mine else None,
            spare=instance.scheduler.num_blocks_spare,
            wanted=wanted,
            wanting_s=instance.wanting_seconds(),
            used=member.share.used if must_count else [],
            num_used=member.share.num_used,
            filled=member.filled,
            has_prepared=member.is_swap_ready,
            pages=place.cache.pages_per_layer,
            spare_pages=place.resizer.num_spare_pages,
            floor=instance.highest_floor(),
            max_tokens=self._max_tokens,
            running=len(instance.scheduler.running),
            long_remaining=instance.most_remaining(member.tokens_alone),
            given=self._given,
        )

    # ----------------------------------------------------------------------------- the step

    def _run(self, step: Step) -> None:
        member = self.member
        began = member.clock()
        self._step += 1
        self._allowed = step.allowed[self.rank]
        self._is_counted = False
        member.share.take(step.grants.get(self.rank, []))
        with_me = self.formation.ranks_of(self.formation.subgroup(self.rank))
        member.share.num_used_by_others = sum(step.num_used[rank] for rank in with_me if rank != self.rank)
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

    def _forward(self, packed: Sequence[PackedWork | None]) -> torch.Tensor:
        member = self.member
        step = MergedStep(member.place, member.formation, member.rank, member.high, member.low)
        return step.forward([unpack(each) if each else no_work() for each in packed])

    # ----------------------------------------------------------------------------- after a step

    def _do(self, action: Actions, step: Step) -> None:
        """What changes this loop is done here, what changes the member in `worker.parallel.actions`."""
        member = self.member
        match action:
            case Show():
                self._on_settled()
            case Census():
                self._is_counted = True
            case Lend():
                if action.giver == self.rank:
                    self._given = {action.taker: member.share.give(action.blocks)}
            case EnterNext():
                self.enters_next = action
                member.share.drop_free_from(action.blocks)
            case MoveBoundary():
                boundary.move(member, action.to, step.used)
            case Settle():
                boundary.settle(member, action)
            case PartingBegins():
                parting.begin(member, action, step.used)
            case Parted():
                parting.end(member)
            case Grow():
                cache.grow(member, action)
            case Shrink():
                cache.shrink(member, action)
            case PrepareHalf():
                halves.prepare(member, action)
            case InstallHalf():
                halves.install(member)
            case DropHalf():
                halves.drop(member)
            case _:
                raise RuntimeError(f"{type(action).__name__} is nothing that this member can do")

"""Run batches with the other members of a tensor-parallel group.

Every member keeps its own scheduler, requests and stream. A step of the group runs the batches of all members
as one merged batch, and each member gets its own rows of the logits. Changes of shape happen between two
steps: the leader sends them with the step, and all members carry them out after it. A member that raises,
dies or hangs costs the group, never a request: each remaining member serves alone again and recomputes its
own sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bus.messages import LayerShape
from worker.distributed.communicator import PeerLost
from worker.distributed.messages import (
    Actions,
    Announce,
    BeginSplit,
    CountBlocks,
    DropHalf,
    EndSplit,
    EnterGroup,
    FinishMerge,
    GrowKV,
    InstallHalf,
    LendBlocks,
    MoveBoundary,
    PackedInput,
    PrepareHalf,
    Ready,
    ShrinkKV,
    Step,
    pack,
    unpack,
)
from worker.engine.executor import BlockCounter, Executor, FinishedBatch
from worker.engine.input_batch import ModelInput, ScheduledBatch, empty_input, merge_inputs
from worker.memory import OutOfBlocks
from worker.morph.manager import FATAL
from worker.parallel.coordinator import StepCoordinator, even_share
from worker.parallel.formation import Formation
from worker.parallel.local_instance import LocalInstance
from worker.parallel.member import Member
from worker.parallel.merged_step import Canary, MergedStep
from worker.parallel.transition import begin_split, end_split, finish_merge, move_boundary

log = logging.getLogger(__name__)


class TensorParallelExecutor(Executor):
    """One member's part in a group, until `is_over` or `has_fallen`."""

    has_peers = True

    def __init__(
        self,
        group: str,
        member: Member,
        *,
        send: Callable[[Ready], None],
        broadcast: Callable[[Step], None],
        on_settled: Callable[[], None],
        after_step: Callable[[], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Make the executor of a member that has just entered the group.

        send: a Ready to the leader. broadcast: a Step to the others, at the leader. on_settled: called when
        all layers are at the high degree and the new shape was tried. after_step: called after every step.
        on_failed: called with the reason when the group cannot go on.
        """
        self.group, self.member = group, member
        self.coordinator = StepCoordinator(group, member.formation.size) if member.rank == 0 else None
        self.has_fallen = False
        self.enters_next: EnterGroup | None = None  # set after the last step in this group
        self.heard: torch.Tensor | None = None  # of the canary that was sent last
        self.step_s = 0.0  # of the last step; nothing is done after it yet
        self._send, self._broadcast, self._on_settled = send, broadcast, on_settled
        self._after_step, self._on_failed = after_step, on_failed
        self._step = 0
        self._called: Step | None = None
        self._ran: Step | None = None  # the actions that follow it are still to be done
        self._proposed: ScheduledBatch | None = None
        self._told: tuple[object, ...] | None = None
        self._has_news = False
        self._canary: Canary | None = None
        self._given: dict[int, list[int]] = {}
        self._is_counted = False
        self._max_tokens = member.local.instance.limits.max_num_batched_tokens
        self._allowed = even_share(
            self._max_tokens, member.formation.size
        )  # tokens of this member's next batch
        member.use(member.share)

    # ----------------------------------------------------------------------------- what others ask

    @property
    def formation(self) -> Formation:
        """Which degree each layer runs at, and the rank of each member."""
        return self.member.formation

    @property
    def local(self) -> LocalInstance:
        """The instance and its memory at this member."""
        return self.member.local

    @property
    def rank(self) -> int:
        """This member's rank; the leader has rank 0."""
        return self.member.rank

    @property
    def is_over(self) -> bool:
        """True when this member has left the group."""
        return self.member.is_over

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._step

    @property
    def tp(self) -> int:  # type: ignore[override]
        """The degree; while it changes, the old one."""
        return self.member.tp

    @property
    def is_in_last_step(self) -> bool:
        """True if the step after which the members part was called: a peer that has made it is gone."""
        return self._called is not None and any(isinstance(action, EndSplit) for action in self._called.after)

    def send_canary(self) -> bool:
        """Send a canary with the next step; then `heard` is its log-probabilities.

        Returns False where no block is free for it.
        """
        try:
            self._canary = Canary(self.local)
        except OutOfBlocks:
            return False
        self.heard = None
        return True

    def fall_apart(self) -> None:
        """Make this member serve alone again. Raises what makes the worker useless."""
        self.has_fallen = True
        self.member.fall_apart()

    def take_step(self, step: Step) -> None:
        """Note the step that the leader has called."""
        self._called = step

    # ----------------------------------------------------------------------------- morphs, at the leader

    @property
    def num_members(self) -> int:  # type: ignore[override]
        """The number of ranks."""
        return self.formation.size

    def collective(self, action: Any) -> int:
        """Send `action` with the next step."""
        assert self.coordinator, "only the leader of a group begins a morph"
        self.coordinator.add(action)
        return self.coordinator.step + 1

    def is_done(self, ticket: int) -> bool:
        """Return whether every member has made the step and told of the next one."""
        assert self.coordinator
        ranks = range(self.coordinator.size)
        return self._step >= ticket and all(self.coordinator.ready_of(rank).step >= ticket for rank in ranks)

    def statuses(self) -> list[Any]:
        """Return what each member told last."""
        assert self.coordinator
        return [self.coordinator.ready_of(rank).status for rank in range(self.coordinator.size)]

    @contextmanager
    def counting_blocks(self) -> Iterator[BlockCounter]:
        """Count the blocks in use at every member; no step is called after the count until it is decided."""
        coordinator = self.coordinator
        assert coordinator
        coordinator.add(CountBlocks())
        counted_in = coordinator.step + 1

        def count() -> Generator[bool, None, list[list[int]]]:
            while coordinator.step != counted_in or not coordinator.is_everyone_ready:
                self.raise_lost()
                yield False
            return [coordinator.ready_of(rank).used for rank in range(coordinator.size)]

        try:
            yield count
        finally:
            coordinator.stop_counting()

    @property
    def is_lost(self) -> bool:
        """True if the group fell apart."""
        return self.has_fallen

    def raise_lost(self) -> None:
        """Raise PeerLost if the group fell apart."""
        if self.has_fallen:
            raise PeerLost("the group fell apart; its members serve alone")

    def check_integrity(self) -> None:
        """Raise BrokenInvariant or AssertionError if a block is lost or owned twice."""
        self.member.check_integrity()

    # ----------------------------------------------------------------------------- the executor

    @property
    def has_news(self) -> bool:
        """True if the last `collect` made a step or told the leader something: the next one is due."""
        return self._has_news and not self.is_over

    @property
    def has_room(self) -> bool:
        """False once the blocks in use were counted for this step: a new batch would change the count."""
        has_told_count = self._is_counted and self._told is not None and self._told[0] == self._step
        return self._proposed is None and not has_told_count

    @property
    def max_tokens(self) -> int:
        """This member's part of the next step's tokens."""
        return self._allowed

    @property
    def num_blocks_used_elsewhere(self) -> int:
        """Blocks in use by the other members."""
        return self.member.share.num_used_by_others

    def shape(self) -> list[LayerShape]:
        """Return the shape of the layers, the same at every member."""
        return self.local.model.shape()

    def execute(self, batch: ScheduledBatch) -> None:
        """Propose `batch` for the group's next step; one that comes too late for it is dropped."""
        self._proposed = batch

    def collect(self) -> list[FinishedBatch]:
        """Tell the leader what there is to run, and run the group's step if it was called.

        Raises PeerLost, and whatever makes a step fail.
        """
        if self.member.rows:
            self.member.rows.advance()
        self._has_news = self._tell()
        if self.coordinator and self._called is None and (called := self.coordinator.call()):
            self._broadcast(called)
            self._called = called
        if self._called is None:
            return []
        step, self._called = self._called, None
        if step.step != self._step:
            raise RuntimeError(f"step {step.step} was called, this rank is at {self._step}")
        began = self.member.clock()
        finished = self._run(step)
        self.step_s = self.member.clock() - began
        self._ran, self._has_news = step, True
        self.num_steps += 1
        return finished

    def complete(self) -> None:
        """Carry out the changes that the leader sent with the step."""
        ran, self._ran = self._ran, None
        if ran:
            for action in ran.after:
                self._carry_out(action, ran)
        self._after_step()

    def recover(self, error: Exception) -> bool:
        """Leave the group after a step failed; only a broken invariant or device is not recovered from."""
        if isinstance(error, FATAL):
            return False
        if isinstance(error, PeerLost):
            reason = str(error)
        else:
            log.error("a step of the group failed", exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        self._ran = None
        self._on_failed(reason)
        return True

    # ----------------------------------------------------------------------------- before a step

    def _tell(self) -> bool:
        """Send a Ready once for each step, and again when there is news: new work, or layers filled.

        Returns True if one was sent.
        """
        member, scheduler = self.member, self.local.instance.scheduler
        # While layers run at two degrees a number means another block in each subgroup: nothing is lent.
        wanted = scheduler.num_blocks_wanted if self.formation.is_uniform else 0
        inputs = [each.input for each in (self._proposed, self._canary) if each]
        told = (self._step, len(inputs), wanted, member.filled, self.local.target.num_copied)
        if told == self._told:
            return False
        self._told = told
        ready = self._ready(inputs, wanted)
        if self.coordinator:
            self.coordinator.take(ready)
        else:
            self._send(ready)
        self._given = {}
        return True

    def _ready(self, inputs: list[ModelInput], wanted: int) -> Ready:
        member, local, instance = self.member, self.local, self.local.instance
        must_count = self._is_counted or not self.formation.is_uniform
        return Ready(
            group=self.group,
            rank=self.rank,
            step=self._step,
            work=pack(merge_inputs(inputs)) if inputs else None,
            spare=instance.scheduler.num_blocks_spare,
            wanted=wanted,
            wanting_s=instance.wanting_seconds(),
            used=member.share.used if must_count else [],
            num_used=member.share.num_used,
            filled=member.filled,
            status=local.target.status(),
            max_tokens=self._max_tokens,
            running=len(instance.scheduler.running),
            long_remaining=instance.most_uncomputed(member.tokens_alone),
            given=self._given,
        )

    # ----------------------------------------------------------------------------- the step

    def _run(self, step: Step) -> list[FinishedBatch]:
        member = self.member
        began = member.clock()
        self._step += 1
        self._allowed = step.allowed[self.rank]
        self._is_counted = False
        member.share.take(step.grants.get(self.rank, []))
        with_me = self.formation.ranks_of(self.formation.subgroup(self.rank))
        member.share.num_used_by_others = sum(step.num_used[rank] for rank in with_me if rank != self.rank)
        # A batch that came too late for this step is dropped; the next one is as if it had not been made.
        batch = self._proposed if step.works[self.rank] else None
        canary = self._canary if step.works[self.rank] else None
        self._proposed = None
        if not any(step.works):
            return []
        logits = self._forward(step.works)
        if canary:
            self.heard, logits = logits[-1].log_softmax(0), logits[:-1]
            canary.close()
            self._canary = None
        if batch is None:
            return []
        batch.began = began
        return [FinishedBatch(batch, logits)]

    def _forward(self, packed: Sequence[PackedInput | None]) -> torch.Tensor:
        member = self.member
        step = MergedStep(member.local, member.formation, member.rank, member.high, member.low)
        return step.forward([unpack(each) if each else empty_input() for each in packed])

    # ----------------------------------------------------------------------------- after a step

    def _carry_out(self, action: Actions, step: Step) -> None:
        """Carry out one action: what changes the member is its own, or `transition`'s."""
        member = self.member
        match action:
            case Announce():
                self._on_settled()
            case CountBlocks():
                self._is_counted = True
            case LendBlocks():
                if action.giver == self.rank:
                    self._given = {action.taker: member.share.give(action.blocks)}
            case EnterGroup():
                self.enters_next = action
                member.share.drop_free_from(action.blocks)
            case MoveBoundary():
                move_boundary(member, action.to, step.used)
            case FinishMerge():
                finish_merge(member, action)
            case BeginSplit():
                begin_split(member, action, step.used)
            case EndSplit():
                end_split(member)
            case GrowKV():
                member.grow_kv(action)
            case ShrinkKV():
                member.shrink_kv(action)
            case PrepareHalf() | InstallHalf() | DropHalf():
                self.local.target.carry_out(action)
            case _:
                raise RuntimeError(f"a member cannot carry out {type(action).__name__}")

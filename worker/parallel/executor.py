"""Run batches with the other members of a tensor-parallel group.

Every member keeps its own scheduler, requests and stream. A step runs the batches of all members as one, and
the leader sends the actions that follow it. A member that fails costs the group, never a request: each other
member serves alone again and recomputes its own sequences.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bus.messages import LayerShape
from worker.distributed import messages
from worker.distributed.communicator import PeerLost
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
    """One member's part in a group, until it splits or falls apart."""

    has_peers = True

    def __init__(
        self,
        group: str,
        member: Member,
        *,
        send: Callable[[messages.Ready], None],
        broadcast: Callable[[messages.Step], None],
        on_settled: Callable[[], None],
        after_step: Callable[[], None],
        on_failed: Callable[[str], None],
    ) -> None:
        """Make the executor of a member that has just entered the group.

        send: to the leader. broadcast: to the others, at the leader. on_settled: called when the new shape of
        all layers was tried. on_failed: called with the reason when the group cannot go on.
        """
        self.group, self.member = group, member
        self.coordinator = StepCoordinator(group, member.formation.size) if member.rank == 0 else None
        self.has_fallen = False
        self.enters_next: messages.EnterGroup | None = None  # set after the last step in this group
        self.heard: torch.Tensor | None = None  # answer to the last canary
        self.step_s = 0.0  # duration of the last step
        self._send, self._broadcast, self._on_settled = send, broadcast, on_settled
        self._after_step, self._on_failed = after_step, on_failed
        self.called: messages.Step | None = None  # step called by the leader, for the next `collect`
        self._ran: messages.Step | None = None  # the actions that follow it are still to be done
        self._proposed: ScheduledBatch | None = None
        self._reported: tuple[object, ...] | None = None
        self._has_news = False
        self._canary: Canary | None = None
        self._given: dict[int, list[int]] = {}
        self._is_counted = False
        self._counts_found = False
        self._max_tokens = member.local.instance.limits.max_num_batched_tokens
        self._allowed = even_share(self._max_tokens, member.formation.size)  # tokens of its next batch
        member.use(member.share)

    # ----------------------------------------------------------------------------- what others ask

    @property
    def formation(self) -> Formation:
        """The degree of each layer, and the rank of each member."""
        return self.member.formation

    @property
    def local(self) -> LocalInstance:
        """The instance and its memory at this member."""
        return self.member.local

    @property
    def tp(self) -> int:  # type: ignore[override]
        """The degree; while it changes, the old one."""
        return self.member.tp

    @property
    def is_in_last_step(self) -> bool:
        """True if the step after which the members part was called: a peer that has made it is gone."""
        return self.called is not None and any(
            isinstance(action, messages.EndSplit) for action in self.called.after
        )

    def send_canary(self) -> bool:
        """Send a canary with the next step, which sets `heard`. Returns False if no block is free for it."""
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

    # ----------------------------------------------------------------------------- morphs, at the leader

    @property
    def num_members(self) -> int:  # type: ignore[override]
        return self.formation.size

    def collective(self, action: Any) -> int:
        """Send `action` with the next step."""
        assert self.coordinator, "only the leader of a group begins a morph"
        self.coordinator.add(action)
        return self.coordinator.step + 1

    def is_done(self, ticket: int) -> bool:
        """Return whether every member has made the step and reported its next one."""
        assert self.coordinator
        return self.num_steps >= ticket and all(ready.step >= ticket for ready in self.coordinator.reports)

    @property
    def knows_members(self) -> bool:
        """True if this worker leads the group and every member has reported its status."""
        return self.coordinator is not None and self.coordinator.has_heard_all

    def statuses(self) -> list[Any]:
        """Return the last report of each member."""
        assert self.coordinator
        return [ready.status for ready in self.coordinator.reports]

    @contextmanager
    def counting_blocks(self, *, with_found: bool = False) -> Iterator[BlockCounter]:
        """Count the blocks in use at every member; no step is called after the count until it is decided."""
        coordinator = self.coordinator
        assert coordinator
        coordinator.add(messages.CountBlocks(with_found=with_found))
        counted_in = coordinator.step + 1

        def count() -> Generator[bool, None, list[list[int]]]:
            while coordinator.step != counted_in or not coordinator.is_everyone_ready:
                self.raise_lost()
                yield False
            return [ready.used for ready in coordinator.reports]

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
        """True if the last `collect` made a step or reported to the leader: the next one is due."""
        return self._has_news and not self.member.is_over

    @property
    def has_room(self) -> bool:
        """False once the blocks in use were counted for this step: a new batch would change the count."""
        has_reported = self._reported is not None and self._reported[0] == self.num_steps
        return self._proposed is None and not (self._is_counted and has_reported)

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
        """Report to the leader and run the step that it has called, if any. Raises what fails a step."""
        if self.member.rows:
            self.member.rows.advance()
        self._has_news = self._tell()
        if self.coordinator and self.called is None and (called := self.coordinator.call()):
            self._broadcast(called)
            self.called = called
        if self.called is None:
            return []
        step, self.called = self.called, None
        if step.step != self.num_steps:
            raise RuntimeError(f"step {step.step} was called, this rank is at {self.num_steps}")
        began = time.monotonic()
        finished = self._run(step)
        self.step_s = time.monotonic() - began
        self._ran, self._has_news = step, True
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
        is_lost = isinstance(error, PeerLost)
        if not is_lost:
            log.error("a step of the group failed", exc_info=error)
        self._ran = None
        self._on_failed(str(error) if is_lost else f"{type(error).__name__}: {error}")
        return True

    # ----------------------------------------------------------------------------- before a step

    def _tell(self) -> bool:
        """Send a Ready for each step, and again for new work or filled layers; return whether it did."""
        member, scheduler = self.member, self.local.instance.scheduler
        # While layers run at two degrees a number means another block in each subgroup: nothing is lent.
        wanted = scheduler.num_blocks_wanted if self.formation.is_uniform else 0
        inputs = [each.input for each in (self._proposed, self._canary) if each]
        status = (self.num_steps, len(inputs), wanted, member.filled, self.local.target.num_prepared)
        if status == self._reported:
            return False
        self._reported = status
        ready = self._ready(inputs, wanted)
        if self.coordinator:
            self.coordinator.take(ready)
        else:
            self._send(ready)
        self._given = {}
        return True

    def _ready(self, inputs: list[ModelInput], wanted: int) -> messages.Ready:
        member, local, instance = self.member, self.local, self.local.instance
        must_count = self._is_counted or not self.formation.is_uniform
        share = member.share
        return messages.Ready(
            group=self.group,
            rank=self.member.rank,
            step=self.num_steps,
            work=merge_inputs(inputs) if inputs else None,
            spare=instance.scheduler.num_blocks_spare,
            wanted=wanted,
            wanting_s=instance.load.wanting_s(),
            used=(share.held if self._counts_found else share.used) if must_count else [],
            num_used=member.share.num_used,
            filled=member.filled,
            status=local.target.status(),
            max_tokens=self._max_tokens,
            running=len(instance.scheduler.running),
            long_remaining=instance.load.most_uncomputed(member.tokens_alone),
            given=self._given,
        )

    # ----------------------------------------------------------------------------- the step

    def _run(self, step: messages.Step) -> list[FinishedBatch]:
        member, rank = self.member, self.member.rank
        began = time.monotonic()
        self.num_steps += 1
        self._allowed = step.allowed[rank]
        self._is_counted = self._counts_found = False
        member.share.take(step.grants.get(rank, []))
        others = set(self.formation.ranks_of(self.formation.subgroup(rank))) - {rank}
        member.share.num_used_by_others = sum(step.num_used[other] for other in others)
        # A batch that came too late for this step is dropped; the next one is as if it had not been made.
        batch, canary = (self._proposed, self._canary) if step.works[rank] else (None, None)
        self._proposed = None
        if not any(step.works):
            return []
        hidden = batch.hidden_states() if batch else None
        logits = MergedStep(member).forward([work or empty_input() for work in step.works], hidden)
        if canary:
            self.heard, logits = logits[-1].log_softmax(0), logits[:-1]
            canary.close()
            self._canary = None
        if batch is None:
            return []
        batch.began = began
        return [FinishedBatch(batch, logits, hidden=hidden[0] if hidden else None)]

    # ----------------------------------------------------------------------------- after a step

    def _carry_out(self, action: messages.Actions, step: messages.Step) -> None:
        """Carry out one action: those of groups here, those of any morph in the target."""
        member = self.member
        match action:
            case messages.Announce():
                self._on_settled()
            case messages.CountBlocks():
                self._is_counted, self._counts_found = True, action.with_found
            case messages.LendBlocks():
                if action.giver == self.member.rank:
                    self._given = {action.taker: member.share.give(action.blocks)}
            case messages.EnterGroup():
                self.enters_next = action
                member.share.truncate(action.blocks)
            case messages.MoveBoundary():
                move_boundary(member, action.to, step.used)
            case messages.FinishMerge():
                finish_merge(member, action)
            case messages.BeginSplit():
                begin_split(member, action, step.used)
            case messages.EndSplit():
                end_split(member)
            case _:
                self.local.target.carry_out(action)
                if isinstance(action, messages.GrowKV | messages.ShrinkKV):
                    member.resized(action)
                elif isinstance(action, messages.CountKV):
                    member.have_blocks(action.blocks)

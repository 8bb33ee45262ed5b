"""Change the degree of tensor parallelism of running instances while they decode (Gyges §4.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec
import torch

from bus.messages import Number
from bus.morphs import Transform
from worker.distributed.messages import Announce, BeginSplit, EndSplit, FinishMerge, MoveBoundary, Peer
from worker.morph.run import NotApplied, Run, Steps
from worker.parallel.block_plans import SubgroupTooFull, plan_block_moves
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.grouping import Grouping
from worker.parallel.merged_step import compare_canaries
from worker.parallel.proposal import Proposal
from worker.parallel.rows import RowChoice, RowCosts, choose_rows

# Members answer at a boundary, a step's length away; one that takes longer is stuck or overloaded.
ANSWER_S = 10.0


class TransformRun(Run):
    """One Transform, at the leading worker."""

    def __init__(
        self,
        command: Transform,
        grouping: Grouping,
        peers: Mapping[str, Peer],
        *,
        layers_per_step: int,
    ) -> None:
        """Begin with the shape of now; peers says how to reach each worker of the command, from the cards."""
        super().__init__(max(command.wait_s, ANSWER_S))
        self._command, self._grouping, self._peers = command, grouping, peers
        self._num_layers = grouping.local.num_layers
        self._layers_per_step = command.layers_per_step or layers_per_step
        self._tp_before = grouping.local.instance.tp
        self._layers_done = 0
        self._blocks_before = grouping.local.instance.scheduler.blocks.capacity
        self._moving_s = 0.0
        self._executor: TensorParallelExecutor | None = None
        self._rows: RowChoice | None = None
        if self._tp_before == command.tp:
            self.already = f"tp {command.tp}"

    @property
    def progress(self) -> str:
        """Layers done, for people."""
        return f"{self._layers_done} of {self._num_layers} layers" if self._layers_done else ""

    def numbers(self) -> dict[str, Number]:
        """Return what the transform took so far."""
        numbers: dict[str, Number] = {
            "tp_before": self._tp_before,
            "tp_after": self._command.tp,
            "layers": self._num_layers,
            "layers_done": self._layers_done,
            "layers_per_step": self._layers_per_step,
            "blocks_before": self._blocks_before,
            "blocks_after": self._grouping.local.instance.scheduler.blocks.capacity,
        }
        if self._executor:
            costs = self._executor.member.costs
            numbers |= {
                "bytes_exchanged": costs.bytes_exchanged,
                "pages_freed": costs.pages_freed,
                "peak_bytes": costs.peak_bytes,
                "moving_seconds": round(costs.moving_s, 6),
                "travel_seconds": round(self._moving_s, 6),
            }
            if self._rows:
                numbers |= self._rows.numbers() | {"rows_seconds": round(costs.rows_s, 6)}
        return numbers

    def steps(self) -> Steps:
        """Merge or split, as the command says; see `run.Run.steps`."""
        self._check_epochs()
        now = self._grouping.executor.formation.size if self._grouping.executor else 1
        if self._command.tp > now:
            yield from self._merge(now)
        elif self._command.tp < now:
            yield from self._split()

    # ----------------------------------------------------------------------------- up

    def _merge(self, low: int) -> Steps:
        with self._proposed(low, grows=True) as proposal:
            yield from self._until_voted(proposal)
            blocks, pages, blocks_after = self._room(proposal)
            yield from self._until_met(proposal)
            self.is_beyond_return = True
            self._grouping.commit(proposal, blocks)
            while (executor := self._grouping.executor) is None or executor.group != proposal.group:
                self._wait(proposal, "not all members entered")
                yield False
        self._executor = executor
        known = yield from self._heard(executor)
        yield from self._travel(executor)
        is_probed = not executor.local.exchanges.bytes_per_s
        settle = FinishMerge(blocks=blocks_after, pages=pages, is_probed=is_probed)
        yield from self._settle(executor, known, settle)

    def _room(self, proposal: Proposal) -> tuple[int, list[int], int]:
        """Return blocks of each subgroup, pages by rank, and blocks in all. Raises NotApplied: no room."""
        answers = [proposal.votes[name].numbers for name in proposal.formation.members]
        blocks = int(min(each["blocks"] for each in answers))
        used = int(max(each["blocks_used"] for each in answers))
        if used > blocks:
            why = f"a member has {used} KV blocks in use, and there is room for {blocks} of each"
            raise NotApplied("deferred", why, blocks_used=used, blocks=blocks)
        most = int(max(each["blocks"] for each in answers))
        if proposal.formation.low > 1 and most != blocks:  # alone its blocks are moved, in a group they stay
            why = f"the groups have {blocks} and {most} KV blocks; resize one of them first"
            raise NotApplied("deferred", why, blocks=blocks, blocks_most=most)
        pages = [int(each["pages_after"]) for each in answers]
        after = int(min(each["blocks_after"] for each in answers))
        return blocks, pages, max(after, blocks * proposal.formation.num_subgroups)

    def _settle(
        self, executor: TensorParallelExecutor, known: torch.Tensor | None, settle: FinishMerge
    ) -> Steps:
        """Announce the new shape once its canary agrees with the old one's."""
        assert executor.coordinator
        executor.coordinator.add(settle)
        yield from _until(executor, lambda: executor.formation.is_uniform)
        heard = yield from self._heard(executor)
        if heard is not None and (reason := compare_canaries(heard, known, executor.local.model.dtype)):
            self._grouping.fall_apart(reason)
            raise NotApplied("failed", reason)
        executor.coordinator.add(Announce())
        shown_after = executor.coordinator.step
        yield from _until(executor, lambda: executor.num_steps > shown_after)

    def _heard(self, executor: TensorParallelExecutor) -> Generator[bool, None, torch.Tensor | None]:
        """Run a canary through the shape of now; None where no block is free for it."""
        if not executor.send_canary():
            return None
        yield from _until(executor, lambda: executor.heard is not None)
        return executor.heard

    # ----------------------------------------------------------------------------- down

    def _split(self) -> Steps:
        executor = self._executor = self._grouping.executor
        assert executor and executor.coordinator
        with self._proposed(self._command.tp, grows=False) as proposal:
            yield from self._until_voted(proposal)
            yield from self._until_met(proposal)
            yield from self._begin_split(executor, proposal)
        yield from self._travel(executor)
        executor.coordinator.add(EndSplit())
        while not executor.member.is_over:
            yield False
        executor.raise_lost()

    def _begin_split(self, executor: TensorParallelExecutor, proposal: Proposal) -> Steps:
        """Count the blocks in use and begin the split, before any member takes another block."""
        assert executor.coordinator
        formation = proposal.formation
        answers = [proposal.votes[name].numbers for name in formation.members]
        blocks = int(min(each["blocks_after"] for each in answers))
        with executor.counting_blocks() as count:
            used = yield from count()
            try:
                moves = plan_block_moves(formation.by_subgroup(used), blocks)
            except SubgroupTooFull as error:
                numbers = {"blocks_used": error.used, "blocks_room": error.room}
                name = formation.members[error.planner]
                why = f"{name} has {error.used} KV blocks in use and would keep {error.room}"
                raise NotApplied("deferred", why, **numbers) from error
            num_steps = -(-self._num_layers // self._layers_per_step)
            costs = [msgspec.convert(each, RowCosts) for each in answers]
            self._rows = choose_rows(costs, num_steps, executor.step_s)
            self.is_beyond_return = True
            begin = BeginSplit(
                low=formation.low,
                blocks=blocks,
                pages=[int(each["pages_after"]) for each in answers],
                moves={old: new for each in moves for old, new in each.items()},
                is_from_peers=self._rows.is_from_peers,
                layers_per_step=self._layers_per_step,
            )
            executor.coordinator.add(begin)
        yield from _until(executor, lambda: not executor.formation.is_uniform)

    # ----------------------------------------------------------------------------- both

    def _travel(self, executor: TensorParallelExecutor) -> Steps:
        """Move the boundary from the last layer to the first, as far as all members are prepared."""
        coordinator = executor.coordinator
        assert coordinator
        began = time.monotonic()
        while (boundary := executor.formation.boundary) > 0:
            executor.raise_lost()
            to = max(0, boundary - self._layers_per_step)
            if not executor.formation.grows:
                to = max(to, *(ready.filled for ready in coordinator.reports))
            if to < boundary:
                coordinator.add(MoveBoundary(to=to))
                yield from _until(executor, lambda to=to: executor.formation.boundary == to)  # type: ignore[misc]
                self._layers_done = self._num_layers - to
            yield False
        self._moving_s = time.monotonic() - began

    def _check_epochs(self) -> None:
        for name, epoch in self._command.epochs.items():
            peer = self._peers.get(name)
            if peer and peer.epoch != epoch:
                raise NotApplied("stale", f"{name} was in epoch {epoch} then and is in {peer.epoch} now")

    def _formation(self, low: int, *, grows: bool) -> Formation:
        try:
            formation = Formation(tuple(self._command.workers), low, self._num_layers, grows)
        except ValueError as error:
            raise NotApplied("failed", str(error)) from error
        if formation.size != max(self._command.tp, self._tp_before):
            why = f"{formation.size} workers were named for a degree of {self._command.tp}"
            raise NotApplied("failed", why)
        if formation.members[0] != self._grouping.worker:
            raise NotApplied("failed", f"{formation.members[0]} leads them, not {self._grouping.worker}")
        return formation

    @contextmanager
    def _proposed(self, low: int, *, grows: bool) -> Iterator[Proposal]:
        """Propose the change to all members; abort it if the block raises or is closed."""
        change = self._grouping.change
        try:
            proposal = change.propose(self._command.id, self._formation(low, grows=grows), self._peers)
        except KeyError as error:
            raise NotApplied("failed", f"no card of {error.args[0]} is known here") from error
        try:
            yield proposal
        except BaseException:
            change.abort(proposal, "the transformation does not come about")
            raise

    def _until_voted(self, proposal: Proposal) -> Steps:
        while proposal.missing_votes:
            self._wait(proposal, f"no answer of {', '.join(proposal.missing_votes)}")
            yield False
        self._go_on(proposal, "conflict")

    def _until_met(self, proposal: Proposal) -> Steps:
        self._grouping.change.call_rendezvous(proposal)
        while not proposal.is_rendezvous_done:
            self._wait(proposal, "the members did not meet")
            yield False
        self._go_on(proposal, "failed")

    def _go_on(self, proposal: Proposal, state: Literal["conflict", "failed"]) -> None:
        self._patience.get_on()
        if proposal.refusals:
            raise NotApplied(state, "; ".join(proposal.refusals))

    def _wait(self, proposal: Proposal, what: str) -> None:
        if proposal.lost:
            raise NotApplied("failed", proposal.lost)
        if not self._patience.wait():
            raise NotApplied("deferred", f"{what} within {max(self._command.wait_s, ANSWER_S):g} s")


def _until(executor: TensorParallelExecutor, is_done: Callable[[], bool]) -> Steps:
    """Wait between steps. Raises PeerLost if the group falls apart."""
    while not is_done():
        executor.raise_lost()
        yield False

"""Change the degree of tensor parallelism of running instances while they decode (Gyges §4.3).

The leader's run asks the members, lets them enter the group, and moves the boundary layer by layer; the
members do the rest in the steps that they make together. An order that cannot be carried out changes
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping

import torch

from bus.messages import Number, Transform
from worker.distributed.messages import Announce, BeginSplit, EndSplit, FinishMerge, MoveBoundary, Peer
from worker.morph.run import Clock, NotApplied, Patience
from worker.parallel.block_share import SubgroupTooFull, plan_block_moves
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.grouping import Grouping
from worker.parallel.merged_step import compare_canaries
from worker.parallel.proposal import Proposal
from worker.parallel.rows import RowChoice, choose_rows, row_costs

# Members answer at a boundary, a step's length away; whoever takes longer is stuck or loaded beyond use.
ANSWER_S = 10.0


class TransformRun:
    """One Transform, at the leading worker."""

    def __init__(
        self,
        command: Transform,
        grouping: Grouping,
        peers: Mapping[str, Peer],
        *,
        layers_per_step: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """Begin with the shape of now; peers says how to reach each worker of the command, from the cards."""
        self._command, self._grouping, self._peers = command, grouping, peers
        self._num_layers = grouping.local.num_layers
        self._layers_per_step = command.layers_per_step or layers_per_step
        self._patience = Patience(max(command.wait_s, ANSWER_S), clock)
        self._clock = clock
        self._tp_before = grouping.local.instance.tp
        self._layers_done = 0
        self._blocks_before = grouping.local.instance.scheduler.blocks.capacity
        self._moving_began: float | None = None
        self._moving_s = 0.0
        self._party: TensorParallelExecutor | None = None
        self._rows: RowChoice | None = None
        self.is_beyond_return = False  # members have been told to change: half-way nobody could serve

    @property
    def deadline(self) -> float | None:
        """When this transform gives up waiting."""
        return self._patience.deadline

    @property
    def progress(self) -> str:
        """Layers done, for people."""
        if not self._layers_done:
            return ""
        return f"{self._layers_done} of {self._num_layers} layers"

    def numbers(self) -> dict[str, Number]:
        """Return what the transform took so far."""
        told: dict[str, Number] = {
            "tp_before": self._tp_before,
            "tp_after": self._command.tp,
            "layers": self._num_layers,
            "layers_done": self._layers_done,
            "layers_per_step": self._layers_per_step,
            "blocks_before": self._blocks_before,
            "blocks_after": self._grouping.local.instance.scheduler.blocks.capacity,
        }
        if self._party:
            costs = self._party.member.costs
            told |= {
                "bytes_exchanged": costs.bytes_exchanged,
                "pages_freed": costs.pages_freed,
                "peak_bytes": costs.peak_bytes,
                "moving_seconds": round(costs.moving_s, 6),
                "travel_seconds": round(self._moving_s, 6),
            }
            if self._rows:
                told |= self._rows.numbers() | {"rows_seconds": round(costs.rows_s, 6)}
        return told

    def steps(self) -> Generator[bool, None, None]:
        """Merge or split, as the command says; see `run.Run.steps`."""
        self._check_epochs()
        now = self._grouping.executor.formation.size if self._grouping.executor else 1
        if self._command.tp > now:
            yield from self._merge(now)
        elif self._command.tp < now:
            yield from self._split()

    # ----------------------------------------------------------------------------- up

    def _merge(self, low: int) -> Generator[bool, None, None]:
        formation = self._formation(low, grows=True)
        proposal = self._propose(formation)
        is_in = False
        try:
            yield from self._until_voted(proposal)
            blocks, pages, blocks_after = self._room(proposal)
            self._grouping.call_rendezvous(proposal)
            yield from self._until_rendezvous(proposal)
            self.is_beyond_return = True
            self._grouping.commit(proposal, blocks)
            while (executor := self._grouping.executor) is None or executor.group != proposal.group:
                self._wait(proposal, "not all members entered")
                yield False
            is_in = True
        finally:
            if not is_in:
                self._grouping.abort(proposal, "the transformation does not come about")
        self._party = executor
        known = yield from self._heard(executor)
        yield from self._travel(executor)
        is_probed = not executor.local.exchanges.bytes_per_s
        yield from self._settle(
            executor, known, FinishMerge(blocks=blocks_after, pages=pages, is_probed=is_probed)
        )

    def _room(self, proposal: Proposal) -> tuple[int, list[int], int]:
        """Return the blocks of each subgroup, the pages of each layer by rank, and the blocks in all.

        Raises NotApplied where the blocks in use do not fit.
        """
        answers = [proposal.votes[name].numbers for name in proposal.formation.members]
        blocks = int(min(each["blocks"] for each in answers))
        used = int(max(each["blocks_used"] for each in answers))
        if used > blocks:
            raise NotApplied(
                "deferred",
                f"a member has {used} KV blocks in use, and the smallest cache has {blocks}",
                blocks_used=used,
                blocks=blocks,
            )
        most = int(max(each["blocks"] for each in answers))
        if proposal.formation.low > 1 and most != blocks:  # alone its blocks are moved, in a group they stay
            raise NotApplied(
                "deferred",
                f"the groups have {blocks} and {most} KV blocks; resize one of them first",
                blocks=blocks,
                blocks_most=most,
            )
        pages = [int(each["pages_after"]) for each in answers]
        after = int(min(each["blocks_after"] for each in answers))
        return blocks, pages, max(after, blocks * proposal.formation.num_subgroups)

    def _settle(
        self, executor: TensorParallelExecutor, known: torch.Tensor | None, settle: FinishMerge
    ) -> Generator[bool, None, None]:
        """Announce the new shape once its canary agrees with the old one's."""
        assert executor.coordinator
        executor.coordinator.add(settle)
        while not executor.formation.is_uniform:
            executor.raise_lost()
            yield False
        heard = yield from self._heard(executor)
        if heard is not None and (reason := compare_canaries(heard, known, executor.local.model.dtype)):
            self._grouping.break_up(reason)
            raise NotApplied("failed", reason)
        executor.coordinator.add(Announce())
        shown_after = executor.coordinator.step
        while executor.step <= shown_after:
            executor.raise_lost()
            yield False

    def _heard(self, executor: TensorParallelExecutor) -> Generator[bool, None, torch.Tensor | None]:
        """Run a canary through the shape of now; None where no block is free for it."""
        if not executor.send_canary():
            return None
        while executor.heard is None:
            executor.raise_lost()
            yield False
        return executor.heard

    # ----------------------------------------------------------------------------- down

    def _split(self) -> Generator[bool, None, None]:
        executor = self._party = self._grouping.executor
        assert executor and executor.coordinator
        formation = self._formation(self._command.tp, grows=False)
        proposal = self._propose(formation)
        has_begun = False
        try:
            yield from self._until_voted(proposal)
            self._grouping.call_rendezvous(proposal)
            yield from self._until_rendezvous(proposal)
            yield from self._begin_split(executor, proposal)
            has_begun = True
        finally:
            if not has_begun:
                self._grouping.abort(proposal, "the transformation does not come about")
        yield from self._travel(executor)
        executor.coordinator.add(EndSplit())
        while not executor.is_over:
            yield False
        executor.raise_lost()

    def _begin_split(
        self, executor: TensorParallelExecutor, proposal: Proposal
    ) -> Generator[bool, None, None]:
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
                raise NotApplied(
                    "deferred",
                    f"{formation.members[error.planner]} has {error.used} KV blocks in use and would keep"
                    f" {error.room}",
                    blocks_used=error.used,
                    blocks_room=error.room,
                ) from error
            every = {old: new for each in moves for old, new in each.items()}
            num_steps = -(-self._num_layers // self._layers_per_step)
            self._rows = choose_rows([row_costs(each) for each in answers], num_steps, executor.step_s)
            self.is_beyond_return = True
            executor.coordinator.add(
                BeginSplit(
                    low=formation.low,
                    blocks=blocks,
                    pages=[int(each["pages_after"]) for each in answers],
                    moves=every,
                    is_from_peers=self._rows.is_from_peers,
                    layers_per_step=self._layers_per_step,
                )
            )
        while executor.formation.is_uniform:
            executor.raise_lost()
            yield False

    # ----------------------------------------------------------------------------- both

    def _travel(self, executor: TensorParallelExecutor) -> Generator[bool, None, None]:
        """Move the boundary from the last layer to the first, as far as all members are prepared."""
        coordinator = executor.coordinator
        assert coordinator
        self._moving_began = self._clock()
        while (boundary := executor.formation.boundary) > 0:
            executor.raise_lost()
            to = max(0, boundary - self._layers_per_step)
            if not executor.formation.grows:
                filled = [coordinator.ready_of(rank).filled for rank in range(executor.formation.size)]
                to = max(to, *filled)
            if to < boundary:
                coordinator.add(MoveBoundary(to=to))
                while executor.formation.boundary != to:
                    executor.raise_lost()
                    yield False
                self._layers_done = self._num_layers - to
            yield False
        self._moving_s = self._clock() - self._moving_began

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
            raise NotApplied(
                "failed", f"{formation.size} workers were named for a degree of {self._command.tp}"
            )
        if formation.members[0] != self._grouping.worker:
            raise NotApplied("failed", f"{formation.members[0]} leads them, not {self._grouping.worker}")
        return formation

    def _propose(self, formation: Formation) -> Proposal:
        try:
            return self._grouping.propose(self._command.id, formation, self._peers)
        except KeyError as error:
            raise NotApplied("failed", f"no card of {error.args[0]} is known here") from error

    def _until_voted(self, proposal: Proposal) -> Generator[bool, None, None]:
        while proposal.missing_votes:
            self._wait(proposal, f"no answer of {', '.join(proposal.missing_votes)}")
            yield False
        self._patience.get_on()
        if proposal.refusals:
            raise NotApplied("conflict", "; ".join(proposal.refusals))

    def _until_rendezvous(self, proposal: Proposal) -> Generator[bool, None, None]:
        while not proposal.is_rendezvous_done:
            self._wait(proposal, "the members did not meet")
            yield False
        self._patience.get_on()
        if proposal.refusals:
            raise NotApplied("failed", "; ".join(proposal.refusals))

    def _wait(self, proposal: Proposal, what: str) -> None:
        if proposal.lost:
            raise NotApplied("failed", proposal.lost)
        if not self._patience.wait():
            raise NotApplied("deferred", f"{what} within {max(self._command.wait_s, ANSWER_S):g} s")

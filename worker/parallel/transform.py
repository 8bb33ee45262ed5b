"""The degree of tensor parallelism of running instances, changed while they decode (Gyges §4.3).

The leader's run asks the members, lets them enter, and moves the boundary layer by layer; the members do the
rest with the steps they make together. What is asked for and cannot be had changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping

import torch

from bus.messages import Number, Transform
from worker.distributed.messages import MoveBoundary, Parted, PartingBegins, Peer, Settle, Show
from worker.morph.outcome import NotApplied
from worker.morph.run import Clock, Patience
from worker.parallel.canary import what_is_wrong
from worker.parallel.executor import TensorParallelExecutor
from worker.parallel.formation import Formation
from worker.parallel.grouping import Grouping
from worker.parallel.proposal import Proposal
from worker.parallel.rows import Choice, choose, row_costs
from worker.parallel.share import NoRoom, homes

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
        """peers: of all workers of the command, as the cards tell."""
        self._command, self._grouping, self._peers = command, grouping, peers
        self._num_layers = grouping.place.num_layers
        self._layers_per_step = command.layers_per_step or layers_per_step
        self._patience = Patience(max(command.wait_s, ANSWER_S), clock)
        self._clock = clock
        self._tp_before = grouping.place.instance.tp
        self._layers_done = 0
        self._blocks_before = grouping.place.instance.scheduler.blocks.capacity
        self._moving_began: float | None = None
        self._moving_s = 0.0
        self._party: TensorParallelExecutor | None = None
        self._rows: Choice | None = None
        self.is_beyond_return = False  # members have been told to change: half-way nobody could serve

    @property
    def deadline(self) -> float | None:
        return self._patience.deadline

    @property
    def progress(self) -> str:
        if not self._layers_done:
            return ""
        return f"{self._layers_done} of {self._num_layers} layers"

    def numbers(self) -> dict[str, Number]:
        told: dict[str, Number] = {
            "tp_before": self._tp_before,
            "tp_after": self._command.tp,
            "layers": self._num_layers,
            "layers_done": self._layers_done,
            "layers_per_step": self._layers_per_step,
            "blocks_before": self._blocks_before,
            "blocks_after": self._grouping.place.instance.scheduler.blocks.capacity,
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
        self._check_epochs()
        now = self._grouping.party.formation.size if self._grouping.party else 1
        if self._command.tp > now:
            yield from self._come_together(now)
        elif self._command.tp < now:
            yield from self._go_apart()

    # ----------------------------------------------------------------------------- up

    def _come_together(self, low: int) -> Generator[bool, None, None]:
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
            while (party := self._grouping.party) is None or party.group != proposal.group:
                self._wait(proposal, "not all members entered")
                yield False
            is_in = True
        finally:
            if not is_in:
                self._grouping.abort(proposal, "the transformation does not come about")
        self._party = party
        known = yield from self._heard(party)
        yield from self._travel(party)
        is_probed = not party.place.exchanges.bytes_per_s
        yield from self._settle(party, known, Settle(blocks=blocks_after, pages=pages, is_probed=is_probed))

    def _room(self, proposal: Proposal) -> tuple[int, list[int], int]:
        """(low blocks of each, pages of each layer by rank, blocks in all). Raises NotApplied."""
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
        self, party: TensorParallelExecutor, known: torch.Tensor | None, settle: Settle
    ) -> Generator[bool, None, None]:
        """The new shape is shown to others when it says what the old one said."""
        assert party.coordinator
        party.coordinator.add(settle)
        while not party.formation.is_uniform:
            party.raise_lost()
            yield False
        heard = yield from self._heard(party)
        if heard is not None and (reason := what_is_wrong(heard, known, party.place.model.dtype)):
            self._grouping.break_up(reason)
            raise NotApplied("failed", reason)
        party.coordinator.add(Show())
        shown_after = party.coordinator.step
        while party.step <= shown_after:
            party.raise_lost()
            yield False

    def _heard(self, party: TensorParallelExecutor) -> Generator[bool, None, torch.Tensor | None]:
        """What a canary says of the shape of now; None where no block is free for it."""
        if not party.send_canary():
            return None
        while party.heard is None:
            party.raise_lost()
            yield False
        return party.heard

    # ----------------------------------------------------------------------------- down

    def _go_apart(self) -> Generator[bool, None, None]:
        party = self._party = self._grouping.party
        assert party and party.coordinator
        formation = self._formation(self._command.tp, grows=False)
        proposal = self._propose(formation)
        has_begun = False
        try:
            yield from self._until_voted(proposal)
            self._grouping.call_rendezvous(proposal)
            yield from self._until_rendezvous(proposal)
            yield from self._begin_parting(party, proposal)
            has_begun = True
        finally:
            if not has_begun:
                self._grouping.abort(proposal, "the transformation does not come about")
        yield from self._travel(party)
        party.coordinator.add(Parted())
        while not party.is_over:
            yield False
        party.raise_lost()

    def _begin_parting(
        self, party: TensorParallelExecutor, proposal: Proposal
    ) -> Generator[bool, None, None]:
        """Nobody may take a block between the count and the moves: the step with the moves waits for both."""
        assert party.coordinator
        formation = proposal.formation
        answers = [proposal.votes[name].numbers for name in formation.members]
        blocks = int(min(each["blocks_after"] for each in answers))
        with party.counting_blocks() as count:
            used = yield from count()
            try:
                moves = homes(formation.by_subgroup(used), blocks)
            except NoRoom as error:
                raise NotApplied(
                    "deferred",
                    f"{formation.members[error.planner]} has {error.used} KV blocks in use and would keep"
                    f" {error.room}",
                    blocks_used=error.used,
                    blocks_room=error.room,
                ) from error
            every = {old: new for each in moves for old, new in each.items()}
            num_steps = -(-self._num_layers // self._layers_per_step)
            self._rows = choose([row_costs(each) for each in answers], num_steps, party.step_s)
            self.is_beyond_return = True
            party.coordinator.add(
                PartingBegins(
                    low=formation.low,
                    blocks=blocks,
                    pages=[int(each["pages_after"]) for each in answers],
                    moves=every,
                    is_from_peers=self._rows.is_from_peers,
                    layers_per_step=self._layers_per_step,
                )
            )
        while party.formation.is_uniform:
            party.raise_lost()
            yield False

    # ----------------------------------------------------------------------------- both

    def _travel(self, party: TensorParallelExecutor) -> Generator[bool, None, None]:
        """The boundary from the last layer to the first, as far as all members are prepared."""
        coordinator = party.coordinator
        assert coordinator
        self._moving_began = self._clock()
        while (boundary := party.formation.boundary) > 0:
            party.raise_lost()
            to = max(0, boundary - self._layers_per_step)
            if not party.formation.grows:
                filled = [coordinator.ready_of(rank).filled for rank in range(party.formation.size)]
                to = max(to, *filled)
            if to < boundary:
                coordinator.add(MoveBoundary(to=to))
                while party.formation.boundary != to:
                    party.raise_lost()
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

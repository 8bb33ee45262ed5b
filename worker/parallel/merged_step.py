"""One step of a group at one rank, and the canary that compares the shapes before and after a change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from worker.engine.input_batch import ModelInput, attention_plan, merge_inputs, to_tensor
from worker.model import Segment
from worker.parallel.formation import LayerRun
from worker.parallel.local_instance import LocalInstance
from worker.parallel.member import Member


class MergedStep:
    """The forward pass of one step at one member of the group."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._local, self._formation, self._rank = member.local, member.formation, member.rank

    def forward(self, works: Sequence[ModelInput], hidden: list[torch.Tensor] | None = None) -> torch.Tensor:
        """Run the inputs of all ranks; return this rank's logits, float32 [R, vocab]. Raises PeerLost.

        hidden: gets the states of this rank's rows before the head, [R, H].
        """
        local, device = self._local, self._local.instance.device
        runs = self._formation.runs(local.num_layers)
        batches = [self._batch(run, works) for run in runs]
        logits = local.model.forward_segments(
            to_tensor(batches[0].token_ids, device),
            [self._segment(run, batch, works) for run, batch in zip(runs, batches, strict=True)],
            local.cache,
            to_tensor(batches[-1].logit_rows, device),
            self._own_rows(runs[-1], works),
            hidden,
        )
        for group in (self._member.high, self._member.low):
            if group:
                group.settle()
        return logits

    def _ranks(self, run: LayerRun) -> list[int]:
        """Return the ranks whose inputs a run takes, in the order of the batch."""
        if run.is_high:
            return self._formation.planners()
        return self._formation.ranks_of(self._formation.subgroup(self._rank))

    def _batch(self, run: LayerRun, works: Sequence[ModelInput]) -> ModelInput:
        formation, ranks = self._formation, self._ranks(run)
        if not run.is_high or formation.is_uniform:
            return merge_inputs([works[rank] for rank in ranks])
        n = formation.num_subgroups
        return merge_inputs([works[rank].renumbered(n, formation.subgroup(rank)) for rank in ranks])

    def _segment(self, run: LayerRun, batch: ModelInput, works: Sequence[ModelInput]) -> Segment:
        formation, instance = self._formation, self._local.instance
        subgroup = formation.subgroup(self._rank)
        sizes = [
            sum(works[rank].num_tokens for rank in formation.ranks_of(j))
            for j in range(formation.num_subgroups)
        ]
        first = sum(sizes[:subgroup])
        return Segment(
            first=run.first,
            end=run.end,
            plan=attention_plan(batch, instance.limits.block_tokens, instance.device),
            degree=formation.size if run.is_high else formation.low,
            group=self._member.high if run.is_high else self._member.low,
            rows=slice(first, first + sizes[subgroup]),
            is_giver=formation.low_shard(self._rank).rank == 0,
        )

    def _own_rows(self, run: LayerRun, works: Sequence[ModelInput]) -> slice:
        ranks = self._ranks(run)
        first = sum(len(works[rank].logit_rows) for rank in ranks[: ranks.index(self._rank)])
        return slice(first, first + len(works[self._rank].logit_rows))


TOKENS = 12
# Largest difference of a log-probability between two orders of summing, far below what a wrong layer makes:
# one whose heads or rows belong to another rank is off by whole units.
LIMITS = {torch.float32: 0.02, torch.float16: 0.3, torch.bfloat16: 0.6}


class Canary:
    """The input of a canary, and the blocks it holds until `close`."""

    def __init__(self, local: LocalInstance) -> None:
        """Take blocks. Raises OutOfBlocks where none are free."""
        instance = local.instance
        self._scheduler, block_tokens = instance.scheduler, instance.limits.block_tokens
        self._blocks = self._scheduler.blocks.allocate(-(-TOKENS // block_tokens))
        self._scheduler.num_blocks_aside += len(self._blocks)
        self.input = ModelInput(
            token_ids=(np.arange(TOKENS) * 7 + 3) % instance.vocab_size,
            q_lens=np.array([TOKENS]),
            context_lens=np.array([TOKENS]),
            blocks=np.array([self._blocks], np.int32),
            logit_rows=np.array([TOKENS - 1]),
            rope_rows=np.zeros(1, np.int64),
        )

    def close(self) -> None:
        """Give the blocks back."""
        self._scheduler.blocks.free(self._blocks)
        self._scheduler.num_blocks_aside -= len(self._blocks)


def compare_canaries(heard: torch.Tensor, known: torch.Tensor | None, dtype: torch.dtype) -> str:
    """Return why the new shape is wrong, or "". Log-probabilities [vocab]; known: None if not measured."""
    if not bool(torch.isfinite(heard).all()):
        return "the new shape's numbers are not numbers"
    if known is None:
        return ""
    likely = known > known.max() - 10  # logarithms of unlikely tokens say nothing
    off = float((heard - known)[likely].abs().max())
    if off > LIMITS[dtype]:
        return f"the new shape is off by {off:.2g} in a log-probability (rounding makes {LIMITS[dtype]:g})"
    return ""

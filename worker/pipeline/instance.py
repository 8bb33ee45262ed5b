"""The leader's instance: it plans, embeds and runs the first layers, and ends steps that come back.

As many batches as there are stages are on their way at a time, so that each stage has one. A step counts as
computed when it is sent: a sequence whose next token is to come back with it has nothing left to compute, so
the scheduler passes it over, while the next chunk of a long prompt may follow at once: every stage takes the
steps in the same order, and finds in its KV what the ones before have written. Blocks that are freed
meanwhile are written over by a later step, behind all that read them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from bus.messages import LayerShape, RejectReason, layers_below_full
from worker.core import Limits, Request, Sequence, StepPlan
from worker.distributed.communicator import PeerLost
from worker.engine.batch import StepInputs
from worker.engine.engine import DEVICE_ERRORS
from worker.engine.instance import Instance, Output, Planned
from worker.engine.shape import fingerprint
from worker.engine.work import Work, attention_plan, to_tensor
from worker.memory import KVCache
from worker.model import Model
from worker.pipeline.pipeline import Pipeline, PipelineLost
from worker.pipeline.ranks import Ranks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OnItsWay:
    """`exits`: of each chunk's sequence, when it was planned. Whoever has lost its row since gets nothing."""

    planned: Planned
    exits: dict[int, int]
    began: float


class PipelinedInstance(Instance):
    """`model` has the first layers, or rank 0's share of them, `kv` their cache, with no more blocks than the
    others have."""

    def __init__(
        self,
        instance_id: str,
        model: Model,
        kv: KVCache,
        limits: Limits,
        pipeline: Pipeline,
        ranks: Ranks,
        *,
        vocab_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline, self.ranks, self.part, self.cache = pipeline, ranks, model, kv
        self.lost = ""  # why it serves no more
        self.on_lost: Callable[[str], None] = lambda reason: None  # once, between two steps
        # Once, too: it is to end when its requests have.
        self.on_going: Callable[[str], None] = lambda reason: None
        self._is_going = False
        self._on_their_way: deque[OnItsWay] = deque()
        self._may_plan = True  # something has changed since there was nothing to plan
        super().__init__(instance_id, model, kv, limits, vocab_size=vocab_size, device=device, clock=clock)
        self.tp = pipeline.tp
        self.reshaped()

    @property
    def can_step(self) -> bool:
        if self.lost or self._unsent:
            return bool(self._unsent)
        if self.pipeline.has_news:
            return True
        if not self._on_their_way:
            return self.has_work
        return self._may_plan and self._has_room and self.has_work

    @property
    def _has_room(self) -> bool:
        return len(self._on_their_way) < self.pipeline.num_stages

    def step(self) -> list[Output]:
        """Take in what has come back, and send one batch more."""
        if self.lost:
            return self.take_unsent()
        try:
            self._take_done()
            self._hear_who_goes()
            if self._has_room:
                self._send()
        except PipelineLost as error:
            return self._end_all(str(error))
        return self.take_unsent()

    def _hear_who_goes(self) -> None:
        if self.pipeline.going and not self._is_going:
            self._is_going = True
            self.on_going(self.pipeline.going)

    def _take_done(self) -> None:
        """What it makes is kept as unsent: whoever has ended must be told, whatever fails after that."""
        while (behind := self.pipeline.take_done()) is not None:
            back = self._on_their_way.popleft()
            self._may_plan = True
            rows = behind.view(self.part.dtype).view(-1, self.part.config.hidden_size)
            made = self._finish(back, self.part.logits(rows.to(self.device, non_blocking=True)))
            self._unsent += made  # with what was unsent before

    def _send(self) -> None:
        began = self._clock()
        decoding = sum(seq.num_remaining <= 1 for seq in self.scheduler.running)
        planned = self.plan(max_decodes=-(-decoding // self.pipeline.num_stages))
        self._may_plan = planned is not None
        if planned is None:
            return
        chunks, work = planned.plan.chunks, planned.inputs.work
        exits = {id(chunk.seq): chunk.seq.num_exits for chunk in chunks}
        self._run(work)
        self.scheduler.commit(planned.plan)
        self._on_their_way.append(OnItsWay(planned, exits, began))

    def _run(self, work: Work) -> None:
        """This stage's layers, and on to the next. Whatever goes wrong in a stage of several ranks ends it:
        the others are in the middle of sums that belong to this step."""
        attention = attention_plan(work, self.limits.block_tokens, self.device)
        residual = self.part.embed(to_tensor(work.token_ids, self.device))
        try:
            self.pipeline.share(work, residual)
            residual = self.part.run(residual, attention, self.cache, group=self.ranks.group)
        except DEVICE_ERRORS:
            raise
        except PeerLost as error:
            raise PipelineLost(f"another rank of stage 0 is gone: {error}") from error
        except Exception as error:
            if self.ranks.group is None:
                raise
            log.exception("a step of %s failed", self.id)
            raise PipelineLost(f"its step failed: {type(error).__name__}: {error}") from error
        self.pipeline.send(work, residual)

    def _finish(self, back: OnItsWay, logits: torch.Tensor) -> list[Output]:
        """`finish` of what still counts."""

        def counts(seq: Sequence) -> bool:
            return self._is_here(seq) and seq.num_exits == back.exits[id(seq)]

        inputs, plan = back.planned.inputs, back.planned.plan
        if not all(counts(chunk.seq) for chunk in plan.chunks):
            inputs, logits = _of_those(inputs, logits, counts)
            plan = StepPlan([chunk for chunk in plan.chunks if counts(chunk.seq)])
        return self._conclude(plan, inputs, self._sample(inputs, logits), back.began)

    # ----------------------------------------------------------------------------- what changes between steps

    def submit(self, request: Request, arrived: float | None = None) -> None:
        self._may_plan = True
        super().submit(request, arrived)
        if self.lost:
            self._unsent = super().fail(self._elsewhere, RejectReason.RETIRED)  # with what was unsent before

    def cancel(self, request_ids: Iterable[str]) -> int:
        self._may_plan = True  # blocks are free
        return super().cancel(request_ids)

    def renumber_blocks(self, moved: Mapping[int, int]) -> None:
        """The stages behind move theirs, after all that is on its way."""
        self.pipeline.move(moved)
        super().renumber_blocks(moved)

    def reshaped(self) -> None:
        self.shape: list[LayerShape] = self.model.shape() + self.pipeline.shape
        self.fingerprint = fingerprint(self.shape, self.tp)
        self.layers_below_full = layers_below_full(self.shape)

    # ----------------------------------------------------------------------------- the end

    def close(self) -> None:
        """It serves no more: the stages behind give their pages back."""
        self.pipeline.close(self.lost or "the instance has ended")
        self.ranks.close()

    @property
    def _elsewhere(self) -> str:
        return f"{self.id}: {self.lost}"

    def _end_all(self, reason: str) -> list[Output]:
        """Its requests go on elsewhere, with the tokens they have."""
        self.lost = reason
        self._on_their_way.clear()
        self.close()
        outputs = self.take_unsent()
        while self.has_work:
            outputs += super().fail(self._elsewhere, RejectReason.RETIRED)
        self.on_lost(reason)
        return outputs


def _of_those(
    inputs: StepInputs, logits: torch.Tensor, counts: Callable[[Sequence], bool]
) -> tuple[StepInputs, torch.Tensor]:
    """Of a step's inputs and logits [R + P, vocab] those of sequences that count."""
    kept = [i for i, chunk in enumerate(inputs.sampling) if counts(chunk.seq)]
    rows, at = list(kept), len(inputs.sampling)
    for seq, first, end in inputs.prompt_ranges:
        if counts(seq):
            rows += range(at, at + end - first)
        at += end - first
    return (
        replace(
            inputs,
            sampling=[inputs.sampling[i] for i in kept],
            sampling_rows=inputs.sampling_rows[kept],
            output_positions=inputs.output_positions[kept],
            prompt_ranges=[each for each in inputs.prompt_ranges if counts(each[0])],
        ),
        logits[torch.tensor(rows, dtype=torch.int64, device=logits.device)],
    )

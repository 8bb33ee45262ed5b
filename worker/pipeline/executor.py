"""Run batches through the stages of a pipeline, led by the worker of the first stage.

As many batches as stages are in flight. Every stage takes them in the same order, so the next chunk of a
prompt may follow at once, and a freed block is written again behind all batches that read it. Actions of
morphs go the same way: every stage carries them out between the same two batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bus.messages import LayerShape, Part
from bus.precisions import Precision
from worker.distributed.communicator import PeerLost
from worker.distributed.messages import HalfActions, InstallHalf, MorphActions, PrepareHalf
from worker.engine.engine import DEVICE_ERRORS
from worker.engine.executor import Executor, FinishedBatch
from worker.engine.input_batch import ScheduledBatch, attention_plan, to_tensor
from worker.memory import KVCache
from worker.model import Model
from worker.pipeline.pipeline import Pipeline, PipelineLost
from worker.pipeline.ranks import Ranks

log = logging.getLogger(__name__)


class RanksLost(PipelineLost):
    """The ranks of the leader's stage are not at the same step any more."""


class PipelineExecutor(Executor):
    """Embeds and runs the first layers, sends the rest on, and computes the logits of what comes back.

    A single stage, of several ranks, has no rest.
    """

    def __init__(self, model: Model, cache: KVCache, pipeline: Pipeline, ranks: Ranks) -> None:
        self.pipeline, self.ranks = pipeline, ranks
        self.max_concurrent_batches, self.tp = pipeline.num_stages, pipeline.tp
        # Called once, when the worker of a stage is to leave.
        self.on_going: Callable[[str], None] = lambda reason: None
        self._model, self._cache = model, cache
        self._device = cache.pool.backend.device
        self._is_going = False
        self._in_flight: deque[ScheduledBatch] = deque()
        self._finished: list[FinishedBatch] = []  # of a single stage
        self._is_closed = False
        self._shape_behind = pipeline.shape
        self._prepared_behind: dict[tuple[int, Part], Precision] = {}

    @property
    def num_in_flight(self) -> int:  # type: ignore[override]
        """Batches that have not come back."""
        return len(self._in_flight)

    @property
    def has_news(self) -> bool:
        """True if a batch has come back, or a stage is gone or overdue."""
        return self.pipeline.has_news

    def execute(self, batch: ScheduledBatch) -> None:
        """Run this stage's layers and send the residual on. Any error among several ranks is PipelineLost."""
        hidden = batch.hidden_states()
        with self._among_ranks():
            made = self._run(batch, hidden)
        if self.pipeline.num_stages == 1:
            self._finished.append(FinishedBatch(batch, made, hidden=hidden[0] if hidden else None))
        else:
            self.pipeline.send(batch.input, made)
            self._in_flight.append(batch)
        self.num_steps += 1

    def _run(self, batch: ScheduledBatch, hidden: list[torch.Tensor] | None) -> torch.Tensor:
        """Run this stage to the residual [T, H], or to the logits [R, vocab] if there is no other.

        hidden: gets the states before the head, if there is no other.
        """
        work, group, is_alone = batch.input, self.ranks.group, self.pipeline.num_stages == 1
        attention = attention_plan(work, self._cache.block_tokens, self._device)
        self.pipeline.share(work)
        residual = self._model.embed(to_tensor(work.token_ids, self._device), group)
        rows = to_tensor(work.logit_rows, self._device) if is_alone else None
        residual = self._model.run(residual, attention, self._cache, rows, group)
        if group:
            group.settle()
        return self._model.logits(residual, group, hidden) if is_alone else residual

    def collect(self) -> list[FinishedBatch]:
        """Return the batches that came back, oldest first. Raises PipelineLost when there is none of them."""
        finished, self._finished = self._finished, []
        try:
            while (payload := self.pipeline.take_done()) is not None:
                rows = payload.view(self._model.dtype).view(-1, self._model.config.hidden_size)
                self.pipeline.share_rows(rows)
                hidden = self._in_flight[0].hidden_states()
                with self._among_ranks():
                    here = rows.to(self._device, non_blocking=True)
                    logits = self._model.logits(here, self.ranks.group, hidden)
                batch = self._in_flight.popleft()
                finished.append(FinishedBatch(batch, logits, hidden=hidden[0] if hidden else None))
        except RanksLost:
            self._in_flight.clear()
            raise
        except PipelineLost:
            if not finished:  # returned batches count; the next call raises
                self._in_flight.clear()
                raise
        if self.pipeline.going and not self._is_going:
            self._is_going = True
            self.on_going(self.pipeline.going)
        return finished

    @contextmanager
    def _among_ranks(self) -> Iterator[None]:
        """Turn any error into RanksLost if this stage has other ranks, which may be in a sum already."""
        try:
            yield
        except DEVICE_ERRORS:
            raise
        except PeerLost as error:
            raise RanksLost(f"another rank of stage 0 is gone: {error}") from error
        except Exception as error:
            if self.ranks.group is None:
                raise
            log.exception("a step of %s failed", self.pipeline.id)
            raise RanksLost(f"its step failed: {type(error).__name__}: {error}") from error

    def shape(self) -> list[LayerShape]:
        """Return the shape of all stages' layers."""
        return self._model.shape() + self._shape_behind

    def collective(self, action: Any) -> int:
        """Carry out `action` here, and send it behind all batches in flight."""
        self._note(action)
        self.carry_out(action)
        return 0 if self.is_lost else self.pipeline.carry_out(action)

    def _note(self, action: MorphActions) -> None:
        """Note what becomes of halves of later stages: what is sent from here on runs on the new variant."""
        if not isinstance(action, HalfActions) or action.layer < self._model.config.num_layers:
            return
        half, at = (action.layer, action.part), action.layer - self._model.config.num_layers
        if isinstance(action, PrepareHalf):
            self._prepared_behind[half] = action.precision
        elif (precision := self._prepared_behind.pop(half, None)) and isinstance(action, InstallHalf):
            self._shape_behind[at] = replace(self._shape_behind[at], **{action.part: precision})

    def is_done(self, ticket: int) -> bool:
        """Return whether all stages have carried out the action of `ticket`."""
        return self.pipeline.is_done(ticket)

    def statuses(self) -> list[Any]:
        """Return the status of this worker and what the others told last."""
        return [self.status(), *self.pipeline.statuses]

    @property
    def is_lost(self) -> bool:
        """True if a stage is gone, or the pipeline has ended."""
        return self._is_closed or self.pipeline.is_lost

    def raise_lost(self) -> None:
        """Raise PipelineLost if the pipeline has ended."""
        if self.is_lost:
            raise PipelineLost("the pipeline has ended")

    def close(self, reason: str) -> None:
        """Let the other stages give their pages back."""
        self._is_closed = True
        self.pipeline.close(reason)
        self.ranks.close()

"""One model being served by this worker: its queue, its batch, its KV cache, its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from bus.messages import Delta, FinishReason, LayerShape, RejectReason, TokenLogprobs, layers_below_full
from bus.precisions import PRECISIONS, Precision, is_below
from kernels.plan import AttentionPlan
from worker.core import BlockPool, Chunk, Limits, Request, Sequence, StepPlan
from worker.engine.admission import refusal, why_finished
from worker.engine.batch import Batch, StepInputs
from worker.engine.logprobs import token_logprobs
from worker.engine.sampler import Sampled, Sampler
from worker.engine.scheduler import Scheduler
from worker.engine.shape import below_floor, fingerprint
from worker.engine.stats import Stats
from worker.engine.work import attention_plan, to_tensor

# A silence longer than this is broken: a gateway that hears nothing for long takes a request for lost.
SIGN_OF_LIFE_S = 5.0


class Cache(Protocol):
    """What the engine needs of `worker.memory.KVCache`; the model reads the rest."""

    @property
    def allocator(self) -> BlockPool: ...


class RunnableModel(Protocol):
    """What the engine needs of `worker.model.Model`."""

    def forward(
        self, token_ids: torch.Tensor, plan: AttentionPlan, kv: Any, logit_rows: torch.Tensor
    ) -> torch.Tensor: ...

    def shape(self) -> list[LayerShape]:
        """The precision of each layer's halves, now."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A step that was planned and has not run."""

    plan: StepPlan
    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class Output:
    request: Request
    delta: Delta


class Instance:
    """`step` is the whole of it: schedule, run, sample, publish."""

    def __init__(
        self,
        instance_id: str,
        model: RunnableModel,
        kv: Cache,
        limits: Limits,
        *,
        vocab_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.id, self.model, self.kv, self.limits = instance_id, model, kv, limits
        self.vocab_size, self.device = vocab_size, device
        self.scheduler = Scheduler(limits, kv.allocator)
        self.batch = Batch(limits)
        self.sampler = Sampler(limits.max_num_seqs, vocab_size, device)
        self.stats = Stats()
        self.num_steps = 0
        self.step_s = 0.0  # that the last one took
        self.tp = 1  # the degree; while it changes, the old one
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._looked_at = 0.0  # for those who are silent
        self._unsent: list[Output] = []  # ends that needed no step
        self.reshaped()

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._unsent)

    @property
    def can_step(self) -> bool:
        """Whether `step` has something to do now."""
        return self.has_work

    def submit(self, request: Request, arrived: float | None = None) -> None:
        """`arrived`: the clock when the worker got it. ValueError for an id that runs already; any other
        problem becomes an `error` Delta."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id} is already running")
        seq = Sequence(request, self._clock() if arrived is None else arrived)
        if error := refusal(request, self.limits, self.vocab_size):
            self._unsent.append(self._end(seq, "error", error))
        elif error := self._below_floor(request):
            self._unsent.append(self._end(seq, "error", error, RejectReason.PRECISION_FLOOR))
        elif request.sent_token_ids and (finished := why_finished(seq, self.limits)):
            self._unsent.append(self._end(seq, finished))
        else:
            if request.sampling.prompt_logprobs is not None and not request.sent_token_ids:
                seq.prompt_logprobs.append(None)
            self._sequences[request.id] = seq
            self.scheduler.add(seq)

    def reshaped(self) -> None:
        """A layer or the degree changed: from the next step on this is the shape that serves."""
        self.shape = self.model.shape()
        self.fingerprint = fingerprint(self.shape, self.tp)
        self.layers_below_full = layers_below_full(self.shape)

    def highest_floor(self) -> Precision | Literal[""]:
        """No layer may be below it: some request here says so."""
        floors = {seq.request.min_precision for seq in self._sequences.values()} - {""}
        return next((precision for precision in PRECISIONS if precision in floors), "")

    def num_held_above(self, precision: Precision) -> int:
        """How many requests are here that must not run in `precision`."""
        floors = (seq.request.min_precision for seq in self._sequences.values())
        return sum(floor != "" and is_below(precision, floor) for floor in floors)

    def renumber_blocks(self, moved: Mapping[int, int]) -> None:
        """The KV cache moved blocks (old id -> new id), between two steps."""
        for seq in self.scheduler.renumber(moved):
            self.batch.reread_blocks(seq)

    def renumber_all_blocks(self, number: Callable[[int], int]) -> None:
        """The same blocks have other numbers, between two steps."""
        self.scheduler.renumber_all(number)
        for seq in self.scheduler.running:
            self.batch.reread_blocks(seq)

    def recompute_all(self, blocks: BlockPool) -> None:
        """The KV cache is lost; these blocks are empty. What ran begins again, with the tokens it has."""
        for seq in self.scheduler.restart(blocks):
            self.batch.release(seq)

    def oldest_wait_seconds(self) -> float:
        """How long the head of the queue has been here; 0.0 without a queue."""
        waiting = self.scheduler.waiting
        return self._clock() - waiting[0].arrived if waiting else 0.0

    def wanting_seconds(self) -> float:
        """How long the oldest that misses KV blocks has been here; 0.0 where none does."""
        first = self.scheduler.first_in_want
        return self._clock() - first.arrived if first else 0.0

    def longest_tokens(self) -> int:
        """Prompt and output that the longest request here may come to; 0 without requests. Any shape that is
        to come must hold its KV."""
        return max(map(self._most_tokens, self._sequences.values()), default=0)

    def most_remaining(self, above: int) -> int:
        """Tokens to compute, the most of all sequences that run and may come to more than `above` tokens; 1:
        they only decode; 0: there is none."""
        seqs = (seq for seq in self.scheduler.running if self._most_tokens(seq) > above)
        return max((seq.num_remaining for seq in seqs), default=0)

    def _most_tokens(self, seq: Sequence) -> int:
        return min(seq.num_prompt + seq.request.sampling.max_tokens, self.limits.max_model_len)

    def reset(self) -> None:
        """Forget all requests and all numbers."""
        self._unsent.clear()
        self.cancel(list(self._sequences))
        self.scheduler.num_preemptions = self.scheduler.num_recomputed = 0
        self.stats = Stats()

    def cancel(self, request_ids: Iterable[str]) -> int:
        """Stop these and free their blocks; returns how many were here."""
        found = [self._sequences[id] for id in request_ids if id in self._sequences]
        for seq in found:
            self._drop(seq)
            self.stats.finished["cancelled"] += 1
        return len(found)

    def step(self) -> list[Output]:
        """Alone: plan, run, sample, publish."""
        began = self._clock()
        planned = self.plan()
        if planned is None:
            return self.take_unsent()
        work = planned.inputs.work
        attention = attention_plan(work, self.limits.block_tokens, self.device)
        logits = self.model.forward(
            to_tensor(work.token_ids, self.device),
            attention,
            self.kv,
            to_tensor(work.logit_rows, self.device),
        )
        return self.finish(planned, logits, began)

    def plan(self, max_tokens: int | None = None, max_decodes: int | None = None) -> Planned | None:
        """What to run next, of at most so many tokens and decodes; None: nothing. A plan that is not run may
        be forgotten: the next one is as if it had not been made."""
        plan = self.scheduler.plan(max_tokens, max_decodes)
        self._settle(plan)
        return Planned(plan, self.batch.build(plan)) if plan.chunks else None

    def finish(self, planned: Planned, logits: torch.Tensor, began: float) -> list[Output]:
        """It ran: logits float32 [R + P, vocab] of its work; `began`: by the clock. Whoever was cancelled
        between `plan` and now gets nothing of it."""
        sampled = self._sample(planned.inputs, logits)
        plan = planned.plan
        plan.chunks = [chunk for chunk in plan.chunks if self._is_here(chunk.seq)]
        self.scheduler.commit(plan)
        return self._conclude(plan, planned.inputs, sampled, began)

    def take_unsent(self) -> list[Output]:
        """Ends that needed no step."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def fail(self, error: str, reject_reason: RejectReason | None = None) -> list[Output]:
        """End everything that runs with an error, or the whole queue if nothing runs."""
        victims = list(self.scheduler.running) or list(self.scheduler.waiting)
        for seq in victims:
            self._drop(seq)
        return self.take_unsent() + [self._end(seq, "error", error, reject_reason) for seq in victims]

    def close(self) -> None:
        """It serves no more: whoever takes part elsewhere hears it."""

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        assert len(self._sequences) == len(self.scheduler.running) + len(self.scheduler.waiting)

    def _below_floor(self, request: Request) -> str | None:
        return below_floor(self.shape, request.min_precision) if request.min_precision else None

    # ----------------------------------------------------------------------------- the step's parts

    def _settle(self, plan: StepPlan) -> None:
        """Rows for those who came, none for those who went."""
        for seq in plan.preempted:
            self.batch.release(seq)
        for seq, error in plan.rejected:
            self.batch.release(seq)
            del self._sequences[seq.request.id]
            self._unsent.append(self._end(seq, "error", error, RejectReason.KV_CAPACITY))
        for seq in plan.admitted:
            row = self.batch.admit(seq)
            self.sampler.set_row(row, seq.request.sampling, seq.token_ids[seq.num_prompt :])

    def _conclude(self, plan: StepPlan, inputs: StepInputs, sampled: Sampled, began: float) -> list[Output]:
        published = self._publish(plan, inputs, sampled)
        self.num_steps += 1
        self.step_s = self._clock() - began
        self.stats.step.observe(self.step_s)
        return self.take_unsent() + published

    def _sample(self, inputs: StepInputs, logits: torch.Tensor) -> Sampled:
        num_sampling = len(inputs.sampling)
        self._collect_prompt_logprobs(inputs, logits[num_sampling:])
        if not num_sampling:
            return Sampled(np.empty(0, np.int64), {})
        sampled = self.sampler.sample(logits[:num_sampling], inputs.sampling_rows, inputs.output_positions)
        lengths = np.fromiter((len(chunk.seq.token_ids) for chunk in inputs.sampling), np.int64, num_sampling)
        self.batch.append(inputs.sampling_rows, lengths, sampled.token_ids)
        return sampled

    def _collect_prompt_logprobs(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        at = 0
        for seq, first, end in inputs.prompt_ranges:
            targets = np.asarray(seq.token_ids[first + 1 : end + 1], np.int64)
            num_top = np.full(end - first, seq.request.sampling.prompt_logprobs, np.int64)
            seq.prompt_logprobs += token_logprobs(logits[at : at + end - first], targets, num_top)
            at += end - first

    def _publish(self, plan: StepPlan, inputs: StepInputs, sampled: Sampled) -> list[Output]:
        now = self._clock()
        outputs = [output for chunk in plan.chunks if (output := self._started(chunk, now))]
        for i, (chunk, token) in enumerate(zip(inputs.sampling, sampled.token_ids.tolist(), strict=True)):
            if self._is_here(chunk.seq):
                outputs.append(self._add_token(chunk.seq, token, sampled.logprobs.get(i), now))
        return outputs + self._signs_of_life(now)

    def _signs_of_life(self, now: float) -> list[Output]:
        """Empty deltas for those who started and are silent for long: in a prefill of many chunks, or
        preempted. Without them a gateway could not tell them from lost ones."""
        if now - self._looked_at < SIGN_OF_LIFE_S:
            return []
        self._looked_at, since = now, now - SIGN_OF_LIFE_S
        return [
            Output(seq.request, self._delta(seq, seq.num_output, []))
            for seq in self._sequences.values()
            if seq.started_at and max(seq.started_at, seq.last_token_at) <= since
        ]

    def _started(self, chunk: Chunk, now: float) -> Output | None:
        """The first chunk of a request ended its time in the queue; say so unless a token does."""
        seq = chunk.seq
        if (counted := min(seq.num_computed, seq.num_prompt)) > seq.num_prompt_counted:
            self.stats.prompt_tokens += counted - seq.num_prompt_counted
            seq.num_prompt_counted = counted
        if seq.started_at:
            return None
        seq.started_at = now
        self.stats.queue.observe(now - seq.arrived)
        return None if seq.num_remaining == 0 else Output(seq.request, self._delta(seq, seq.num_output, []))

    def _add_token(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Output:
        if seq.num_output >= seq.request.sampling.max_tokens:  # max_tokens 0: only the prompt was of interest
            self._drop(seq)
            return self._end(seq, "length")
        index = seq.num_output
        seq.token_ids.append(token)
        self._time_token(seq, now)
        finished = why_finished(seq, self.limits)
        if finished:
            self._drop(seq)
            self.stats.finished[finished] += 1
        return Output(seq.request, self._delta(seq, index, [token], finished, logprobs))

    def _time_token(self, seq: Sequence, now: float) -> None:
        self.stats.generation_tokens += 1
        if seq.last_token_at:
            self.stats.time_per_output_token.observe(now - seq.last_token_at)
        else:
            self.stats.time_to_first_token.observe(now - seq.arrived)
        seq.last_token_at = now

    # ----------------------------------------------------------------------------- ends

    def _is_here(self, seq: Sequence) -> bool:
        return self._sequences.get(seq.request.id) is seq

    def _drop(self, seq: Sequence) -> None:
        self.scheduler.remove(seq)
        self.batch.release(seq)
        del self._sequences[seq.request.id]

    def _end(
        self,
        seq: Sequence,
        finished: FinishReason,
        error: str | None = None,
        reject_reason: RejectReason | None = None,
    ) -> Output:
        """End `seq` without a token."""
        self.stats.finished[finished] += 1
        delta = self._delta(seq, seq.num_output, [], finished, error=error, reject_reason=reject_reason)
        return Output(seq.request, delta)

    def _delta(
        self,
        seq: Sequence,
        index: int,
        token_ids: list[int],
        finished: FinishReason | None = None,
        logprobs: TokenLogprobs | None = None,
        error: str | None = None,
        reject_reason: RejectReason | None = None,
    ) -> Delta:
        prompt_logprobs = None
        if seq.prompt_logprobs and (token_ids or finished) and finished != "error":
            prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
        return Delta(
            request_id=seq.request.id,
            attempt=seq.request.attempt,
            index=index,
            token_ids=token_ids,
            finish_reason=finished,
            error=error,
            logprobs=[logprobs] if logprobs else None,
            prompt_logprobs=prompt_logprobs,
            reject_reason=reject_reason,
        )

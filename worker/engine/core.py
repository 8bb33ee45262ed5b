"""The engine core: one model being served, and the life of its steps.

A step schedules a batch, executes it, takes the tokens of one that has finished, and returns what each
request is told. The core owns the sequences by request id, and their tokens. All else has its owner: the
scheduler the queue and the KV blocks, `InputBatch` the rows of what runs, the executor the batches in flight,
`GrammarQueue` what waits for its grammar, `InstanceLoad` the numbers by which others judge the instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from bus.messages import (
    FinishReason,
    RejectReason,
    Submit,
    TokenLogprobs,
    layers_below_full,
    lowest_half,
)
from bus.precisions import LOWEST, KVPrecision, is_below, lowest
from worker.engine.admission import goes_on, refusal, why_finished
from worker.engine.executor import Executor, ExecutorLost, FinishedBatch, LocalExecutor, RunnableModel
from worker.engine.grammar_queue import GrammarQueue
from worker.engine.grammars import GrammarCompiler
from worker.engine.input_batch import InputBatch, Ints, ScheduledBatch
from worker.engine.load import InstanceLoad
from worker.engine.outputs import Output, output_of
from worker.engine.sampler import ChosenTokens, Sampled, Sampler
from worker.engine.sampling import token_logprobs
from worker.engine.scheduler import Scheduler, SchedulerOutput
from worker.engine.sequence import Limits, Sequence
from worker.engine.shape import below_floor, shape_id
from worker.engine.signs_of_life import SignsOfLife
from worker.engine.stats import Stats
from worker.memory import BlockAllocator


class Cache(Protocol):
    """The part of `worker.memory.KVCache` that the engine needs; the model reads the rest."""

    @property
    def allocator(self) -> BlockAllocator: ...

    @property
    def precision(self) -> KVPrecision: ...


class EngineCore:
    """Serves one instance; `step` is the whole of it.

    The executor says how a batch runs: on this device, by a tensor-parallel group, or through a pipeline. It
    changes when the worker joins or leaves a group; the queue, the sequences and the sampler stay.
    """

    def __init__(
        self,
        instance_id: str,
        model: RunnableModel,
        kv: Cache,
        limits: Limits,
        *,
        vocab_size: int,
        device: torch.device,
        executor: Executor | None = None,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve `model`.

        executor: None for one that runs it on this device. grammars: None where no request has one.
        """
        self.id, self.model, self.kv, self.limits = instance_id, model, kv, limits
        self.vocab_size, self.device = vocab_size, device
        self.local_executor = LocalExecutor(model, kv, limits.block_tokens, device)
        self.executor: Executor = executor or self.local_executor
        self.scheduler = Scheduler(limits, kv.allocator)
        self.batch = InputBatch(limits)
        self.grammars = grammars
        masks = grammars.masks if grammars else None
        self.sampler = Sampler(limits.max_num_seqs, vocab_size, device, masks)
        self.stats = Stats()
        self.num_steps = 0
        self.step_s = 0.0  # duration of the last step
        self.lost = ""  # why this instance serves no more
        self.on_lost: Callable[[str], None] = lambda reason: None  # called once, between two steps
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._forming = GrammarQueue(grammars)
        self.load = InstanceLoad(self._sequences, self.scheduler, self._forming, limits, clock)
        self._signs_of_life = SignsOfLife()
        self._updated_at = 0.0  # when the last batch was updated
        self._may_schedule = True  # something has changed since there was nothing to schedule
        self._outputs: list[Output] = []  # outputs that the next `step` publishes
        self.reshaped()

    # ----------------------------------------------------------------------------- the step

    @property
    def has_work(self) -> bool:
        """True while a request is here or an output is unpublished."""
        return bool(self._sequences or self._outputs)

    @property
    def can_step(self) -> bool:
        """True if `step` has something to do now; what has work may wait for other devices."""
        if self._outputs or self.lost:
            return bool(self._outputs)
        executor = self.executor
        if executor.has_news or executor.has_peers:
            return executor.has_news
        if executor.num_in_flight == 0:
            return self._forming.has_news or len(self._sequences) > len(self._forming)
        can_schedule = self._may_schedule or self._forming.has_news
        return can_schedule and executor.has_room and bool(self._sequences)

    def step(self, *, may_schedule: bool = True) -> list[Output]:
        """Schedule, execute, update, publish.

        With may_schedule False only batches in flight are finished.
        """
        if self.lost:
            return self.take_outputs()
        executor = self.executor
        try:
            if may_schedule:
                self._take_formed()
                if batch := self._schedule():
                    self._execute(batch)
                if batch := self._follow():
                    executor.execute(batch)
            for finished in executor.collect():
                self._update(finished)
            executor.complete()
        except ExecutorLost as error:
            self._lose(str(error))
        except Exception as error:
            if not executor.recover(error):
                raise
        return self.take_outputs()

    def take_outputs(self) -> list[Output]:
        """Return what was made since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ----------------------------------------------------------------------------- schedule, execute

    def _take_formed(self) -> None:
        """Queue the sequences whose grammars are compiled; end those whose output is complete or wrong."""
        for seq, made in self._forming.take():
            self._may_schedule = True
            if not isinstance(made, str) and not made.is_complete:
                seq.matcher = made
                self.scheduler.add(seq)
                continue
            del self._sequences[seq.request.request_id]
            ended = self._end(seq, "error", made) if isinstance(made, str) else self._end(seq, "stop")
            self._outputs.append(ended)

    def _schedule(self) -> ScheduledBatch | None:
        """Make the next batch, if there is room for one more in flight and something to run.

        A batch that is not executed may be forgotten: the next one is as if it had not been made.
        """
        if not (self._sequences and self.executor.has_room):
            return None
        began, executor = self._clock(), self.executor
        max_decodes = None
        if executor.max_concurrent_batches > 1:  # spread over the batches in flight
            decoding = sum(seq.num_uncomputed_tokens <= 1 for seq in self.scheduler.running)
            max_decodes = -(-decoding // executor.max_concurrent_batches)
        scheduled = self.scheduler.schedule(executor.max_tokens, max_decodes)
        self._settle(scheduled)
        self._may_schedule = bool(scheduled.chunks)
        if not scheduled.chunks:
            return None
        batch = self.batch.build(scheduled)
        batch.began = began
        return batch

    def _settle(self, scheduled: SchedulerOutput) -> None:
        """Give rows to sequences that were admitted and take them from those that left."""
        for seq in scheduled.preempted:
            self.batch.release(seq)
        for seq, error in scheduled.rejected:
            self.batch.release(seq)
            del self._sequences[seq.request.request_id]
            self._outputs.append(self._end(seq, "error", error, RejectReason.KV_CAPACITY))
        for seq in scheduled.admitted:
            row = self.batch.admit(seq)
            prompt, output = seq.token_ids[: seq.num_prompt], seq.token_ids[seq.num_prompt :]
            self.sampler.set_row(row, seq.request.sampling, output, prompt, seq.matcher)

    def _execute(self, batch: ScheduledBatch) -> None:
        """Run `batch`; where others may follow before it ends, its tokens count as computed from now on."""
        self.executor.execute(batch)
        if self.executor.max_concurrent_batches > 1:
            self._commit(batch)

    def _follow(self) -> ScheduledBatch | None:
        """Make the decode that follows one in flight, before its tokens are known.

        All that runs must be in it and get a token, and nothing that waits may have room: that would be part
        of the next step. It is made for those that go on unless their token ends them; what it computes for
        one that has ended is void. Its tokens count as computed when those before are known.
        """
        executor, before = self.executor, self.executor.newest
        if before is None or executor.num_in_flight > 1 or self.limits.short_context:
            return None
        if len(before.sampling) < len(before.chunks) or self.scheduler.can_admit:
            return None
        if len(self.batch.current(before)) != len(self.scheduler.running):
            return None
        chunks, limits = before.chunks, self.limits
        kept = [i for i, chunk in enumerate(chunks) if chunk.is_current and goes_on(chunk.seq, limits)]
        if not kept or not self.scheduler.extend([chunks[i].seq for i in kept]):
            return None
        batch = self.batch.build_next(before, kept)
        batch.began = self._clock()
        return batch

    def launch_choice(
        self, batch: ScheduledBatch, logits: torch.Tensor, out: torch.Tensor
    ) -> ChosenTokens | None:
        """Choose the tokens of a batch just launched, into out; None if that must wait for its end."""
        if batch.prompt_ranges:
            return None
        return self.sampler.launch(logits, batch.sampling_rows, batch.output_positions, out)

    # ----------------------------------------------------------------------------- update

    def _update(self, finished: FinishedBatch) -> None:
        """Take the tokens of a finished batch; sequences that left since it was scheduled get none."""
        self._may_schedule = True
        current = self.batch.current(finished.batch)
        if len(current) < len(finished.batch.chunks):
            finished = finished.only(current)
        batch = finished.batch
        self._commit(batch)
        sampled = self._sample(batch, finished.logits, finished.token_ids)
        self._outputs += self._publish(batch, sampled, finished.hidden)
        self._time(batch)
        if ahead := self.executor.newest:
            self._commit(ahead)

    def _commit(self, batch: ScheduledBatch) -> None:
        """Count the tokens of a batch as computed, once, but for sequences that have left since."""
        if not batch.is_committed:
            self.scheduler.commit(self.batch.current(batch))
            batch.is_committed = True

    def _sample(self, batch: ScheduledBatch, logits: torch.Tensor, token_ids: Ints | None) -> Sampled:
        """Choose the tokens, unless they were chosen behind the step, and note them."""
        num_sampling = len(batch.sampling)
        self._collect_prompt_logprobs(batch, logits[num_sampling:])
        if not num_sampling:
            return Sampled(np.empty(0, np.int64), {})
        if token_ids is None:
            sampled = self.sampler.sample(logits[:num_sampling], batch.sampling_rows, batch.output_positions)
        else:
            sampled = Sampled(token_ids, {})
        lengths = np.fromiter((len(chunk.seq.token_ids) for chunk in batch.sampling), np.int64, num_sampling)
        self.batch.append(batch.sampling_rows, lengths, sampled.token_ids)
        return sampled

    def _collect_prompt_logprobs(self, batch: ScheduledBatch, logits: torch.Tensor) -> None:
        at = 0
        for seq, first, end in batch.prompt_ranges:
            targets = np.asarray(seq.token_ids[first + 1 : end + 1], np.int64)
            num_top = np.full(end - first, seq.request.sampling.prompt_logprobs, np.int64)
            seq.score(token_logprobs(logits[at : at + end - first], targets, num_top))
            at += end - first

    def _time(self, batch: ScheduledBatch) -> None:
        """Count a step that ends now, and note how long it took."""
        self.num_steps += 1
        began, now = max(batch.began, self._updated_at if self.executor.runs_ahead else 0.0), self._clock()
        self.step_s, self._updated_at = now - began, now
        self.stats.step.observe(self.step_s)
        num_prompt = sum(chunk.num_tokens for chunk in batch.chunks if chunk.num_tokens > 1)
        self.load.prompt_rate.add(num_prompt, self.step_s)

    # ----------------------------------------------------------------------------- publish

    def _publish(self, batch: ScheduledBatch, sampled: Sampled, hidden: torch.Tensor | None) -> list[Output]:
        """Give each sequence its token, end those that are complete, and make their outputs."""
        now, logprobs = self._clock(), sampled.logprobs
        prefilling = [chunk.seq for chunk in batch.chunks if not chunk.seq.is_prompt_counted]
        outputs = [output for seq in prefilling if (output := self._started(seq, now))]
        seqs = [chunk.seq for chunk in batch.sampling]
        self.stats.count_tokens(seqs, now)
        for i, (seq, token) in enumerate(zip(seqs, sampled.token_ids.tolist(), strict=True)):
            if seq.request.embeds:
                assert hidden is not None, "the batch embeds"
                outputs.append(self._embedded(seq, hidden[i]))
            else:
                outputs.append(self._add_token(seq, token, logprobs.get(i) if logprobs else None, now))
        silent = self._signs_of_life.due(self._sequences.values(), now)
        return outputs + [output_of(seq, []) for seq in silent]

    def _started(self, seq: Sequence, now: float) -> Output | None:
        """Note that a chunk of a prompt has run.

        Return an output without tokens for the first chunk, and for one with log-probabilities of the prompt,
        unless a token follows.
        """
        self.stats.count_prompt(seq)
        is_first = not seq.started_at
        if is_first:
            seq.started_at = now
            self.stats.queue.observe(now - seq.arrived)
        if seq.num_uncomputed_tokens == 0 or not (is_first or seq.prompt_logprobs):
            return None
        return output_of(seq, [])

    def _add_token(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Output:
        if seq.num_output >= seq.request.sampling.max_tokens:  # 0: only the prompt was of interest
            self._drop(seq)
            return self._end(seq, "length")
        if seq.matcher and (error := seq.matcher.accept([token])):
            self._drop(seq)
            return self._end(seq, "error", error)
        seq.token_ids.append(token)
        seq.last_token_at = now
        finished = why_finished(seq, self.limits)
        if finished:
            self._drop(seq)
            self.scheduler.lengths.add(seq.num_output)
            self.load.residence.add(now - seq.started_at)
            self.stats.finished[finished] += 1
        return output_of(seq, [token], finished, logprobs=logprobs)

    def _embedded(self, seq: Sequence, hidden: torch.Tensor) -> Output:
        """End a request with the direction of its last token's state before the head [H]."""
        self._drop(seq)
        direction = torch.nn.functional.normalize(hidden.float(), dim=0).cpu().numpy()
        return self._end(seq, "stop", embedding=direction.astype("<f4").tobytes())

    def _end(
        self,
        seq: Sequence,
        finished: FinishReason,
        error: str | None = None,
        reject_reason: RejectReason | None = None,
        embedding: bytes | None = None,
    ) -> Output:
        """End `seq` without a token."""
        self.stats.finished[finished] += 1
        return output_of(seq, [], finished, error=error, reject_reason=reject_reason, embedding=embedding)

    # ----------------------------------------------------------------------------- requests

    def submit(self, request: Submit, arrived: float | None = None) -> None:
        """Queue a request. `arrived`: the clock when the worker got it, if not now.

        Raises ValueError for an id that runs already; any other problem becomes an `error` Delta.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request {request.request_id} is already running")
        seq = Sequence(request, self._clock() if arrived is None else arrived)
        self._may_schedule = True
        if self.lost:
            self._outputs.append(self._end(seq, "error", self._elsewhere, RejectReason.RETIRED))
        elif error := refusal(request, self.limits, self.vocab_size):
            self._outputs.append(self._end(seq, "error", error))
        elif error := self._below_floor(request):
            floor = request.min_precision or LOWEST
            if not is_below(self.limits.kv_dtype, floor):  # no morph raises the KV cache above its rest
                self.load.note_refused(floor)
            self._outputs.append(self._end(seq, "error", error, RejectReason.PRECISION_FLOOR))
        elif request.sent_token_ids and (finished := why_finished(seq, self.limits)):
            self._outputs.append(self._end(seq, finished))
        else:
            self._take_in(seq)

    def _take_in(self, seq: Sequence) -> None:
        """Let a request wait in the queue, or for its grammar."""
        request, grammar = seq.request, seq.request.sampling.grammar
        if request.sampling.prompt_logprobs is not None and not request.sent_token_ids:
            seq.score([None])
        if grammar and self.grammars is None:
            self._outputs.append(self._end(seq, "error", f"{self.id} takes no grammars"))
            return
        self._sequences[request.request_id] = seq
        if grammar:
            self._forming.add(seq, grammar)
        else:
            self.scheduler.add(seq)

    def _below_floor(self, request: Submit) -> str | None:
        floor = request.min_precision
        return below_floor(self.shape, floor, self.kv.precision) if floor else None

    def cancel(self, request_ids: Iterable[str]) -> int:
        """Stop these requests and free their blocks. Returns how many were here."""
        found = [self._sequences[id] for id in request_ids if id in self._sequences]
        for seq in found:
            self._drop(seq)
            self.stats.finished["cancelled"] += 1
        self._may_schedule = True  # blocks are free
        return len(found)

    def fail(self, error: str, reject_reason: RejectReason | None = None) -> list[Output]:
        """End everything that runs with an error, or the whole queue if nothing runs."""
        victims = list(self.scheduler.running) or list(self.load.waiting())
        for seq in victims:
            self._drop(seq)
        return self.take_outputs() + [self._end(seq, "error", error, reject_reason) for seq in victims]

    def _drop(self, seq: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        del self._sequences[seq.request.request_id]
        if not self._forming.remove(seq):
            self.scheduler.remove(seq)
            self.batch.release(seq)

    def reset(self) -> None:
        """Forget all requests and all numbers."""
        self._outputs.clear()
        self.cancel(list(self._sequences))
        self.scheduler.reset_counts()
        self.stats = Stats()

    def close(self) -> None:
        """Serve no more; the other devices of this instance hear it."""
        self._forming.close()
        self.executor.close(self.lost or "the instance has ended")

    def _lose(self, reason: str) -> None:
        """End all requests after the executor was lost: they go on elsewhere, with the tokens they have."""
        self.lost = reason
        self.close()
        while self._sequences:
            self._outputs = self.fail(self._elsewhere, RejectReason.RETIRED)
        self.on_lost(reason)

    @property
    def _elsewhere(self) -> str:
        return f"{self.id}: {self.lost}"

    # ----------------------------------------------------------------------------- changes of shape

    def reshaped(self) -> None:
        """Read the shape again, since a layer or the degree has changed."""
        self.tp = self.executor.tp
        self.shape = self.executor.shape()
        self.shape_id = shape_id(self.shape, self.tp, self.kv.precision)
        self.layers_below_full = layers_below_full(self.shape)
        self.scheduler.precision = lowest([lowest_half(self.shape), self.kv.precision])

    def kv_converted(self) -> None:
        """Count all KV as computed in the precision of the cache at best, of which a layer was converted."""
        self.scheduler.lower_precision(self.kv.precision)
        self.reshaped()

    def settle(self) -> None:
        """Take the tokens of all batches in flight on this device alone."""
        while self.local_executor.num_in_flight:
            for finished in self.local_executor.collect():
                self._update(finished)

    def use(self, executor: Executor) -> None:
        """Run on `executor` from the next step on, once nothing is in flight here."""
        self.settle()
        self.executor = executor
        self._may_schedule = True
        self.reshaped()

    def renumber_blocks(self, moved: Mapping[int, int]) -> None:
        """Rename KV blocks that were moved (old id -> new id)."""
        for seq in self.scheduler.renumber(moved):
            self.batch.reread_blocks(seq)

    def renumber_all_blocks(self, number: Callable[[int], int]) -> None:
        """Give all KV blocks their new numbers; their contents stay where they are."""
        self.scheduler.renumber_all(number)
        for seq in self.scheduler.running:
            self.batch.reread_blocks(seq)

    def recompute_all(self, blocks: BlockAllocator) -> None:
        """Start over on empty `blocks` after the KV cache was lost; every sequence keeps its tokens."""
        for seq in self.scheduler.restart(blocks):
            self.batch.release(seq)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block or a sequence is lost or owned twice."""
        scheduler, forming = self.scheduler, list(self._forming)
        scheduler.check_integrity()
        assert len(self._sequences) == len(scheduler.running) + len(scheduler.waiting) + len(forming)
        for seq in chain(scheduler.running, scheduler.waiting):
            is_formed = seq.matcher is not None
            assert is_formed == (seq.request.sampling.grammar is not None), seq.request.request_id
        assert all(
            self._sequences.get(seq.request.request_id) is seq and seq.matcher is None for seq in forming
        )

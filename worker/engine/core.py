"""The engine core: one model being served, its queue, its batch, its KV cache and its numbers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

import numpy as np
import torch

from bus.histogram import Accumulator
from bus.messages import (
    Delta,
    FinishReason,
    Grammar,
    RejectReason,
    Submit,
    TokenLogprobs,
    layers_below_full,
    lowest_half,
)
from bus.precisions import LOWEST, PRECISIONS, KVPrecision, Precision, is_below, lowest
from worker.engine.admission import refusal, why_finished
from worker.engine.executor import Executor, ExecutorLost, FinishedBatch, LocalExecutor, RunnableModel
from worker.engine.grammars import GrammarCompiler
from worker.engine.input_batch import InputBatch, Ints, ScheduledBatch
from worker.engine.prompt_rate import PromptRate
from worker.engine.sampler import ChosenTokens, Sampled, Sampler
from worker.engine.sampling import token_logprobs
from worker.engine.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from worker.engine.sequence import Limits, Sequence
from worker.engine.shape import below_floor, shape_id
from worker.memory import BlockAllocator

log = logging.getLogger(__name__)

RESIDENCE_WEIGHT = 0.1  # weight of a request that ends in the mean time that requests run
REFUSED_S = 5.0  # a refused floor counts for so long; the gateway sends the request again when it may run

# A silence longer than this is broken: a gateway that hears nothing for long takes a request for lost.
SIGN_OF_LIFE_S = 5.0


class Cache(Protocol):
    """The part of `worker.memory.KVCache` that the engine needs; the model reads the rest."""

    @property
    def allocator(self) -> BlockAllocator: ...

    @property
    def precision(self) -> KVPrecision: ...


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens that one step made for one request."""

    request: Submit
    delta: Delta


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
        self.prompt_rate = PromptRate()
        self.residence_s = 0.0  # mean time that a request runs here; 0.0: none has ended yet
        self.lost = ""  # why this instance serves no more
        self.on_lost: Callable[[str], None] = lambda reason: None  # called once, between two steps
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._unformed: dict[int, Sequence] = {}  # whose grammars are being compiled, by ticket
        self._num_asked = 0  # the last ticket
        self._refused: dict[Precision, float] = {}  # floors of requests that were refused, and when
        self._looked_at = 0.0  # when silent sequences were last looked for
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
        has_grammars = bool(self._unformed and self.grammars and self.grammars.has_news)
        if executor.num_in_flight == 0:
            return has_grammars or len(self._sequences) > len(self._unformed)
        return (self._may_schedule or has_grammars) and executor.has_room and bool(self._sequences)

    def step(self, *, may_schedule: bool = True) -> list[Output]:
        """Schedule, execute, update, publish.

        With may_schedule False only batches in flight are finished.
        """
        if self.lost:
            return self.take_outputs()
        executor = self.executor
        try:
            if may_schedule:
                self._take_grammars()
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
        here: Collection[int] = range(len(before.chunks))
        if not self._all_count(before):
            here = [i for i in here if self._counts(before.chunks[i])]
        if len(here) != len(self.scheduler.running):
            return None
        kept = [i for i in here if self._goes_on(before.chunks[i].seq)]
        if not kept or not self.scheduler.extend([before.chunks[i].seq for i in kept]):
            return None
        batch = self.batch.build_next(before, kept)
        batch.began = self._clock()
        return batch

    def _goes_on(self, seq: Sequence) -> bool:
        """Return True if only the value of its next token can end the sequence."""
        made, most = seq.num_output + 1, seq.request.sampling.max_tokens
        return made < most and len(seq.token_ids) + 1 < self.limits.max_model_len

    def _counts(self, chunk: ScheduledChunk) -> bool:
        """Return True if the sequence has been here ever since the chunk was scheduled."""
        return self._is_here(chunk.seq) and chunk.seq.generation == chunk.generation

    def _all_count(self, batch: ScheduledBatch) -> bool:
        """Return True if no sequence at all has left or lost its row since the batch was built."""
        return batch.num_released == self.batch.num_released

    def _execute(self, batch: ScheduledBatch) -> None:
        """Run `batch`; where others may follow before it ends, its tokens count as computed from now on."""
        self.executor.execute(batch)
        if self.executor.max_concurrent_batches > 1:
            self._commit(batch)

    def _commit_here(self, batch: ScheduledBatch) -> None:
        """Count a batch as computed that follows the one just updated, for what is left of it."""
        if not batch.is_committed:
            is_whole = self._all_count(batch)
            chunks = batch.chunks if is_whole else [one for one in batch.chunks if self._counts(one)]
            self.scheduler.commit(chunks)
            batch.is_committed = True

    def _commit(self, batch: ScheduledBatch) -> None:
        if not batch.is_committed:
            self.scheduler.commit(batch.chunks)
            batch.is_committed = True

    def _update(self, finished: FinishedBatch) -> None:
        """Take the tokens of a finished batch; sequences that left since it was scheduled get none."""
        batch, logits, token_ids = finished.batch, finished.logits, finished.token_ids
        hidden = finished.hidden
        self._may_schedule = True
        if not (self._all_count(batch) or all(map(self._counts, batch.chunks))):
            here = {id(chunk.seq) for chunk in batch.chunks if self._counts(chunk)}
            batch, rows = batch.only(lambda seq: id(seq) in here)
            if token_ids is None:
                logits = logits[torch.from_numpy(rows).to(logits.device)]
            else:
                token_ids = token_ids[rows]
            if hidden is not None:
                hidden = hidden[torch.from_numpy(rows).to(hidden.device)]
        self._commit(batch)
        sampled = self._sample(batch, logits, token_ids)
        self._outputs += self._publish(batch, sampled, hidden)
        self.num_steps += 1
        began, now = max(batch.began, self._updated_at if self.executor.runs_ahead else 0.0), self._clock()
        self.step_s, self._updated_at = now - began, now
        if ahead := self.executor.newest:
            self._commit_here(ahead)
        self.stats.step.observe(self.step_s)
        self.prompt_rate.add(
            sum(chunk.num_tokens for chunk in batch.chunks if chunk.num_tokens > 1), self.step_s
        )

    def take_outputs(self) -> list[Output]:
        """Return what was made since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

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
                self._refused[floor] = self._clock()
            self._outputs.append(self._end(seq, "error", error, RejectReason.PRECISION_FLOOR))
        elif request.sent_token_ids and (finished := why_finished(seq, self.limits)):
            self._outputs.append(self._end(seq, finished))
        else:
            if request.sampling.prompt_logprobs is not None and not request.sent_token_ids:
                seq.score([None])
            self._sequences[request.request_id] = seq
            if request.sampling.grammar:
                self._ask_for_grammar(seq, request.sampling.grammar)
            else:
                self.scheduler.add(seq)

    def _ask_for_grammar(self, seq: Sequence, grammar: Grammar) -> None:
        """Queue `seq` once its grammar is compiled."""
        if self.grammars is None:
            del self._sequences[seq.request.request_id]
            self._outputs.append(self._end(seq, "error", f"{self.id} takes no grammars"))
            return
        self._num_asked += 1
        self._unformed[self._num_asked] = seq
        self.grammars.ask(self._num_asked, grammar, seq.request.sent_token_ids)

    def _take_grammars(self) -> None:
        """Queue the sequences whose grammars are compiled; end those whose output is complete or wrong."""
        for ticket, made in self.grammars.take() if self._unformed and self.grammars else ():
            if (seq := self._unformed.pop(ticket, None)) is None:  # it was cancelled
                continue
            self._may_schedule = True
            if not isinstance(made, str) and not made.is_complete:
                seq.matcher = made
                self.scheduler.add(seq)
                continue
            del self._sequences[seq.request.request_id]
            ended = self._end(seq, "error", made) if isinstance(made, str) else self._end(seq, "stop")
            self._outputs.append(ended)

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
        victims = list(self.scheduler.running) or list(self.waiting())
        for seq in victims:
            self._drop(seq)
        return self.take_outputs() + [self._end(seq, "error", error, reject_reason) for seq in victims]

    def reset(self) -> None:
        """Forget all requests and all numbers."""
        self._outputs.clear()
        self.cancel(list(self._sequences))
        self.scheduler.reset_counts()
        self.stats = Stats()

    def close(self) -> None:
        """Serve no more; the other devices of this instance hear it."""
        if self.grammars:
            self.grammars.close()
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

    def floors(self) -> dict[Precision, int]:
        """Count the requests that insist on a precision, by precision."""
        floors = (seq.request.min_precision for seq in self._sequences.values())
        return dict(Counter(floor for floor in floors if floor))

    def floor_refused(self) -> Precision:
        """Return the highest floor of requests that were refused lately; the lowest precision for none."""
        since = self._clock() - REFUSED_S
        lately = [floor for floor, at in self._refused.items() if at >= since]
        return min(lately, key=PRECISIONS.index, default=LOWEST)

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

    # ----------------------------------------------------------------------------- numbers

    def waiting(self) -> Iterator[Sequence]:
        """Yield what waits: the queue, and what will be in it once its grammar is compiled."""
        return chain(self.scheduler.waiting, self._unformed.values())

    @property
    def num_waiting(self) -> int:
        """Requests that wait, in the queue or for their grammars."""
        return len(self.scheduler.waiting) + len(self._unformed)

    def oldest_wait_seconds(self) -> float:
        """Return how long the head of the queue has been here, or one before it that has no grammar yet.

        0.0 if nothing waits.
        """
        waiting = self.scheduler.waiting
        firsts = [*self._unformed.values(), *([waiting.head] if waiting else [])]
        return self._clock() - min(seq.arrived for seq in firsts) if firsts else 0.0

    def wanting_seconds(self) -> float:
        """Return how long the oldest sequence that misses KV blocks has been here; 0.0 for none."""
        first = self.scheduler.first_in_want
        return self._clock() - first.arrived if first else 0.0

    def waited_for_blocks_s(self) -> float:
        """Return how long the head of the queue has been here, while blocks are missing; else 0.0."""
        first = self.scheduler.first_for_blocks
        return self._clock() - first.arrived if first else 0.0

    def arrivals_per_s(self) -> float:
        """Return the requests per second that came lately."""
        return self.scheduler.arrivals_per_s(self._clock())

    def longest_tokens(self) -> int:
        """Return the length, prompt and output, that the longest request here may come to; 0 for none.

        Any new shape must hold its KV.
        """
        return max(map(self._most_tokens, self._sequences.values()), default=0)

    def most_uncomputed(self, above: int) -> int:
        """Return the most tokens left to compute of a running sequence that may exceed `above` tokens.

        1 if all such sequences decode, 0 if there is none.
        """
        seqs = (seq for seq in self.scheduler.running if self._most_tokens(seq) > above)
        return max((seq.num_uncomputed_tokens for seq in seqs), default=0)

    def _most_tokens(self, seq: Sequence) -> int:
        return min(seq.num_prompt + seq.request.sampling.max_tokens, self.limits.max_model_len)

    def check_integrity(self) -> None:
        """Raise AssertionError if a block or a sequence is lost or owned twice."""
        scheduler = self.scheduler
        scheduler.check_integrity()
        assert len(self._sequences) == len(scheduler.running) + self.num_waiting
        for seq in chain(scheduler.running, scheduler.waiting):
            is_formed = seq.matcher is not None
            assert is_formed == (seq.request.sampling.grammar is not None), seq.request.request_id
        assert all(self._is_here(seq) and seq.matcher is None for seq in self._unformed.values())

    # ----------------------------------------------------------------------------- parts of the step

    def _below_floor(self, request: Submit) -> str | None:
        floor = request.min_precision
        return below_floor(self.shape, floor, self.kv.precision) if floor else None

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

    def launch_choice(
        self, batch: ScheduledBatch, logits: torch.Tensor, out: torch.Tensor
    ) -> ChosenTokens | None:
        """Choose the tokens of a batch just launched, into out; None if that must wait for its end."""
        if batch.prompt_ranges:
            return None
        return self.sampler.launch(logits, batch.sampling_rows, batch.output_positions, out)

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

    def _publish(self, batch: ScheduledBatch, sampled: Sampled, hidden: torch.Tensor | None) -> list[Output]:
        now, logprobs = self._clock(), sampled.logprobs
        prefilling = [chunk.seq for chunk in batch.chunks if not chunk.seq.is_prompt_counted]
        outputs = [output for seq in prefilling if (output := self._started(seq, now))]
        seqs = [chunk.seq for chunk in batch.sampling]
        self._time_tokens(seqs, now)
        for i, (seq, token) in enumerate(zip(seqs, sampled.token_ids.tolist(), strict=True)):
            if seq.request.embeds:
                assert hidden is not None, "the batch embeds"
                outputs.append(self._embedded(seq, hidden[i]))
            else:
                outputs.append(self._add_token(seq, token, logprobs.get(i) if logprobs else None, now))
        return outputs + self._signs_of_life(now)

    def _signs_of_life(self, now: float) -> list[Output]:
        """Make empty deltas for started sequences that have been silent for long.

        A prefill of many chunks and a preempted sequence are silent; a gateway could not tell them from lost
        ones.
        """
        if now - self._looked_at < SIGN_OF_LIFE_S:
            return []
        self._looked_at, since = now, now - SIGN_OF_LIFE_S
        return [
            Output(seq.request, self._delta(seq, seq.num_output, []))
            for seq in self._sequences.values()
            if seq.started_at and max(seq.started_at, seq.last_token_at) <= since
        ]

    def _started(self, seq: Sequence, now: float) -> Output | None:
        """Note that a chunk of a prompt has run.

        Return a delta without tokens for the first chunk, and for one with log-probabilities of the prompt,
        unless a token follows.
        """
        if (counted := min(seq.num_computed_tokens, seq.num_prompt)) > seq.num_prompt_counted:
            self.stats.prompt_tokens += counted - seq.num_prompt_counted
            seq.num_prompt_counted = counted
        is_first = not seq.started_at
        if is_first:
            seq.started_at = now
            self.stats.queue.observe(now - seq.arrived)
        if seq.num_uncomputed_tokens == 0 or not (is_first or seq.prompt_logprobs):
            return None
        return Output(seq.request, self._delta(seq, seq.num_output, []))

    def _add_token(self, seq: Sequence, token: int, logprobs: TokenLogprobs | None, now: float) -> Output:
        if (index := seq.num_output) >= seq.request.sampling.max_tokens:  # 0: only the prompt was of interest
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
            self.stats.finished[finished] += 1
            ran_s = now - seq.started_at
            weight = RESIDENCE_WEIGHT if self.residence_s else 1.0
            self.residence_s += weight * (ran_s - self.residence_s)
        return Output(seq.request, self._delta(seq, index, [token], finished, logprobs))

    def _embedded(self, seq: Sequence, hidden: torch.Tensor) -> Output:
        """End a request with the direction of its last token's state before the head [H]."""
        self._drop(seq)
        direction = torch.nn.functional.normalize(hidden.float(), dim=0).cpu().numpy()
        ended = self._end(seq, "stop")
        return replace(ended, delta=replace(ended.delta, embedding=direction.astype("<f4").tobytes()))

    def _time_tokens(self, seqs: list[Sequence], now: float) -> None:
        """Count the tokens that come to these sequences now, most of which had their last one together."""
        seqs = [seq for seq in seqs if seq.request.sampling.max_tokens and not seq.request.embeds]
        self.stats.generation_tokens += len(seqs)
        for last_token_at, times in Counter([seq.last_token_at for seq in seqs]).items():
            if last_token_at:
                self.stats.time_per_output_token.observe(now - last_token_at, times)
        for seq in seqs:
            if not seq.last_token_at:
                self.stats.time_to_first_token.observe(now - seq.arrived)

    def _is_here(self, seq: Sequence) -> bool:
        return self._sequences.get(seq.request.request_id) is seq

    def _drop(self, seq: Sequence) -> None:
        del self._sequences[seq.request.request_id]
        if ticket := next((ticket for ticket, one in self._unformed.items() if one is seq), None):
            del self._unformed[ticket]
            return
        self.scheduler.remove(seq)
        self.batch.release(seq)

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
        cached_tokens, seq.num_unreported_cached = seq.num_unreported_cached, 0
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
        return Delta(
            request_id=seq.request.request_id,
            attempt=seq.request.attempt,
            index=index,
            token_ids=token_ids,
            finish_reason=finished,
            error=error,
            logprobs=[logprobs] if logprobs else None,
            prompt_logprobs=prompt_logprobs or None,
            prompt_index=seq.num_prompt_scored - len(prompt_logprobs),
            reject_reason=reject_reason,
            cached_tokens=cached_tokens,
        )


class Stats:
    """Counters and histograms (seconds) of one instance; written by the engine's thread only."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.queue = Accumulator()
        self.step = Accumulator()
        self.time_to_first_token = Accumulator()
        self.time_per_output_token = Accumulator()

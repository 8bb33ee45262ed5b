"""One simulated instance: the scheduler and the block allocator that serve, with computed step times.

Steps in which every sequence decodes and nothing else changes are taken together: the scheduler is asked
once for all of them, and their ends are computed one by one. `is_stepwise` takes each by itself; the results
are the same. So are those of `run_alone`, which asks no scheduler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, NamedTuple

from bus.messages import FinishReason, SamplingParams, Submit
from instar.replay.outcomes import RequestOutcome
from instar.simulate.alone import LoneRun
from instar.simulate.calibration import EngineCalibration
from instar.simulate.shape import SimulatedShape
from instar.simulate.steps import StepModel
from worker.engine.admission import length_refusal, why_finished
from worker.engine.prompt_rate import PromptRate
from worker.engine.residence import Residence
from worker.engine.scheduler import TOKENS_A_LOOK, ScheduledChunk, Scheduler
from worker.engine.sequence import Limits
from worker.engine.sequence import Sequence as EngineSequence
from worker.memory import BlockAllocator
from worker.morph.losses import Losses

IsQuiet = Callable[[int], bool]  # argument: the number of KV blocks in use
ANY_NUMBER: Final = 1 << 30  # steps, where nothing is to be done


@dataclass(slots=True)
class Tally:
    """The sums of a simulation over all instances."""

    steps: int = 0
    scheduled: int = 0  # times that a scheduler was asked
    tokens: int = 0
    lost_quality: float = 0.0  # predicted loss, summed over tokens
    most_running: int = 0
    computed: int = 0  # tokens of prompts and outputs, those computed again included


class StepWork(NamedTuple):
    """The work of the next step. alike: how many steps may be taken together with it."""

    prompt_tokens: int
    decodes: int
    kv_tokens: int
    alike: int


class SimulatedSequence(EngineSequence):
    """A sequence with the outcome that it writes. All tokens are token 0: there is no text."""

    __slots__ = ("outcome",)

    def __init__(self, outcome: RequestOutcome, arrived_s: float) -> None:
        self.outcome = outcome
        super().__init__(_submit(outcome), arrived_s)


def _submit(outcome: RequestOutcome) -> Submit:
    return Submit(
        request_id=str(outcome.number),
        attempt=1,
        gateway="",
        epoch=1,
        prompt_token_ids=[0] * outcome.prompt_asked,
        sampling=SamplingParams(max_tokens=outcome.output_asked, seed=0),
    )


class SimulatedScheduler(Scheduler):
    """The scheduler, which may be spared a sequence."""

    def pass_by(self, num_chunks: int, num_output: int) -> None:
        """Count the chunks of a sequence that has run alone and ended."""
        self._turn += num_chunks
        self._needed_at = -1
        self.lengths.add(num_output)


class SimulatedInstance:
    """An instance. The cluster calls `start` whenever it is idle, and `finish` at the time `ends[-1]`."""

    def __init__(
        self,
        number: int,
        name: str,
        calibration: EngineCalibration,
        tally: Tally,
        losses: Losses,
        *,
        is_stepwise: bool = False,
        on_tokens: Callable[[Sequence[float], int], None] = lambda times, count: None,
        on_ended: Callable[[SimulatedInstance, RequestOutcome], None] = lambda instance, outcome: None,
    ) -> None:
        """on_tokens: called with ends of steps and the tokens of each. on_ended: when a request has ended."""
        own = calibration.limits
        self.number, self.name = number, name
        self.limits = Limits(
            max_num_seqs=own.max_num_seqs,
            max_num_batched_tokens=own.max_num_batched_tokens,
            max_model_len=own.max_model_len,
            block_tokens=own.block_tokens,
        )
        self._first_blocks = calibration.memory.kv_blocks
        self.blocks = BlockAllocator(self._first_blocks)
        self.scheduler = SimulatedScheduler(self.limits, self.blocks)
        self.shape = SimulatedShape(calibration, losses)
        self.ends: list[float] = []  # ends of the steps in progress
        self.version = 0  # version of `ends`: an event for another one is void
        self.below_s = 0.0  # time with a layer below full precision
        self.prompt_rate = PromptRate()
        self.residence = Residence()
        self.num_planned = 0  # tokens of the next step
        self.model = StepModel(calibration)
        self.is_at_ease = False  # the reflex is not asked at the boundaries of the steps in progress
        self._lone: LoneRun | None = None  # what runs, where the scheduler does not know of it
        self._chunks: list[ScheduledChunk] = []
        self._num_prompt = 0  # tokens of prompts in each step in progress
        self._began_s = 0.0  # when the first of them began
        self._is_decoding = False  # all chunks are tokens of outputs
        self._num_chunks = 0  # chunks that the scheduler has counted
        self._inbox: list[EngineSequence] = []
        self._tally, self._is_stepwise = tally, is_stepwise
        self._on_tokens, self._on_ended = on_tokens, on_ended
        self._loss = 0.0  # predicted, of the layers as they are
        self._below_since_s: float | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._lone or self._inbox or self.scheduler.running or self.scheduler.waiting)

    @property
    def is_as_made(self) -> bool:
        """True if layers and KV blocks are those of the start."""
        return self.shape.is_at_rest and self.blocks.capacity == self._first_blocks

    @property
    def has_queue(self) -> bool:
        return bool(self._inbox or self.scheduler.waiting)

    @property
    def is_stepping(self) -> bool:
        return bool(self.ends)

    @property
    def num_running(self) -> int:
        return 1 if self._lone else len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._inbox)

    @property
    def waiting(self) -> list[EngineSequence]:
        """The queue, with what the scheduler has not seen yet."""
        return [*self.scheduler.waiting, *self._inbox]

    def oldest_wait_s(self, now_s: float) -> float:
        """Return how long the head of the queue has been here; 0.0 without a queue."""
        first = next(chain(self.scheduler.waiting, self._inbox), None)
        return now_s - first.arrived if first else 0.0

    # ------------------------------------------------------------------------------------- requests

    def submit(self, outcome: RequestOutcome, now_s: float) -> None:
        """Queue a request. It is seen at the next boundary between two steps."""
        if error := length_refusal(outcome.prompt_asked, outcome.output_asked, self.limits):
            self._end(outcome, now_s, f"400 {error}")
            return
        self.interrupt(now_s)
        self._inbox.append(SimulatedSequence(outcome, now_s))

    def withdraw(self, seq: EngineSequence) -> None:
        """Forget a request that waits here."""
        if seq in self._inbox:
            self._inbox.remove(seq)
        else:
            self.scheduler.remove(seq)

    def interrupt(self, now_s: float) -> None:
        """Let the steps in progress end with the one that runs now."""
        self._take_apart(now_s)
        last = bisect_left(self.ends, now_s) + 1
        if last < len(self.ends):
            del self.ends[last:]
            self.version += 1

    def take_in(self) -> None:
        """Let the scheduler see what has arrived, at a boundary between two steps."""
        for arrived in self._inbox:
            self.scheduler.add(arrived)
        self._inbox.clear()

    # ------------------------------------------------------------------------------------- steps

    def start(self, now_s: float, is_quiet: IsQuiet = lambda num_used: True) -> None:
        """Begin the next steps, if there is something to run.

        is_quiet: whether boundaries between steps may be left out until so many blocks are in use.
        """
        work = self.plan(now_s, is_quiet)
        if self._chunks:
            self.begin(now_s, work, self.model.ends(now_s, *work))

    def run_alone(self, outcome: RequestOutcome, now_s: float) -> None:
        """Begin all steps of a request at once, where nothing else is here and its blocks are free."""
        size = self.limits.max_num_batched_tokens
        self.ends = self.model.ends_alone(now_s, outcome.prompt_asked, outcome.output_asked, size)
        num_prompts = -(-outcome.prompt_asked // size)
        self._lone = LoneRun(outcome, now_s, self.ends, num_prompts, self.limits.block_tokens)
        self._tally.most_running = max(self._tally.most_running, 1)
        self.version += 1

    def _take_apart(self, now_s: float) -> None:
        """Have the scheduler do what it would have done by now for a request that ran alone."""
        if (lone := self._lone) is None:
            return
        self._lone, self.ends = None, []
        self._inbox.append(SimulatedSequence(lone.outcome, lone.began_s))
        self.start(lone.began_s)
        while self.ends[-1] < now_s:
            self.start(self.finish())
        self.is_at_ease = True

    def _end_alone(self, lone: LoneRun) -> None:
        """Take note of all steps of a request that ran alone."""
        self._lone, self.ends = None, []
        outcome, ends, began_s, left = lone.outcome, lone.ends, lone.began_s, lone.outcome.prompt_asked
        for at_s in ends[: lone.num_prompts]:
            num_prompt = min(left, self.limits.max_num_batched_tokens)
            if left > 1:
                self.prompt_rate.add(num_prompt, at_s - began_s)
            began_s, left = at_s, left - num_prompt
        times, num_output = ends[lone.num_prompts - 1 :], outcome.output_asked
        outcome.opened_s, outcome.first_s, outcome.last_s = ends[0], times[0], times[-1]
        if num_output > 1:
            outcome.longest_pause_s = max(times[1] - times[0], times[-1] - times[-2])
        outcome.events = num_output
        outcome.spans.append((num_output, 0))
        tally = self._tally
        tally.scheduled += 1
        tally.steps += len(ends)
        tally.computed += outcome.prompt_asked + num_output - 1
        tally.tokens += num_output
        self._num_chunks += len(ends)
        self.scheduler.pass_by(len(ends), num_output)
        self._on_tokens(times, 1)
        self._leave(outcome, "length", ends[0], times[-1])

    def plan(self, now_s: float, is_quiet: IsQuiet, max_tokens: int | None = None) -> StepWork:
        """Choose the next step. max_tokens: what a group allows its member."""
        self.take_in()
        self.is_at_ease = False
        output = self.scheduler.schedule(max_tokens)
        self._tally.scheduled += 1
        for seq, error in output.rejected:
            self._end(_outcome(seq), now_s, f"rejected: {error}")
        chunks = self._chunks = output.chunks
        self.num_planned = output.num_tokens
        if not chunks:
            return StepWork(0, 0, 0, 1 if self.scheduler.waiting else ANY_NUMBER)
        decodes = sum(chunk.seq.num_uncomputed_tokens == 1 for chunk in chunks)
        kv_tokens = sum(chunk.seq.num_computed_tokens + chunk.num_tokens for chunk in chunks)
        # What waits may be admitted as soon as those that run have less left to make.
        is_steady = len(chunks) == len(self.scheduler.running) and not self.scheduler.waiting
        self._is_decoding, count = decodes == len(chunks), 1
        if is_steady and not self._is_stepwise:
            if self._is_decoding:
                count = self._num_alike(chunks, is_quiet)
            elif len(chunks) == 1 and max_tokens is None and is_quiet(self.scheduler.blocks.num_used):
                # A prompt alone, which has its blocks; its last chunk is a step by itself.
                count = max(1, (chunks[0].seq.num_uncomputed_tokens - 1) // chunks[0].num_tokens)
        self._tally.most_running = max(self._tally.most_running, len(chunks))
        return StepWork(output.num_tokens - decodes, decodes, kv_tokens, count)

    def begin(self, now_s: float, work: StepWork, ends: list[float]) -> None:
        """Begin the steps that were planned."""
        self.ends = ends
        self._num_prompt, self._began_s = work.prompt_tokens, now_s
        self.version += 1

    def _num_alike(self, chunks: Sequence[ScheduledChunk], is_quiet: IsQuiet) -> int:
        """Return a number of steps until a sequence ends, in which blocks do not run out.

        All sequences decode, and nothing waits.
        """
        limits = self.limits
        count = min(
            min(seq.request.sampling.max_tokens - seq.num_output, limits.max_model_len - len(seq.token_ids))
            for seq in (chunk.seq for chunk in chunks)
        )
        while count > 1:
            missing = self._num_blocks_for(chunks, count)
            pool = self.scheduler.blocks
            if missing <= pool.num_free and is_quiet(pool.num_used + missing):
                return count
            count //= 2
        return 1

    def _num_blocks_for(self, chunks: Sequence[ScheduledChunk], count: int) -> int:
        """Return the blocks that `count` steps take beyond those that the sequences hold."""
        block_tokens, more = self.limits.block_tokens, count - 1
        return sum(
            -(-(len(chunk.seq.token_ids) + more) // block_tokens) - len(chunk.seq.block_ids)
            for chunk in chunks
        )

    def used_at(self, times: Sequence[float]) -> list[int]:
        """Return the KV blocks in use at these times, with those of the steps that have ended by then."""
        if self._lone:
            return self._lone.used_at(times)
        used, ends, most = self.scheduler.blocks.num_used, self.ends, len(self.ends) - 1
        if most < 1 or not self._is_decoding or times[-1] < ends[0]:
            return [used] * len(times)
        counts = [min(bisect_right(ends, at_s), most) for at_s in times]
        return [used + (count and self._num_blocks_for(self._chunks, count + 1)) for count in counts]

    def settle(self, now_s: float) -> None:
        """Take note of the steps that have ended by now, but for the last of those in progress.

        The reports of instances show it; the step that runs now has its blocks.
        """
        self._take_apart(now_s)
        count = min(bisect_right(self.ends, now_s), len(self.ends) - 1)
        if count > 0:
            self._apply(count)
            _ = self.scheduler.num_blocks_needed  # read at any boundary
            self.scheduler.schedule()

    def finish(self) -> float:
        """End the steps in progress. Returns the time."""
        now_s = self.ends[-1]
        if self._lone:
            self._end_alone(self._lone)
        else:
            self._apply(len(self.ends))
        return now_s

    def _apply(self, count: int) -> None:
        """Take note of the first `count` steps in progress."""
        times, self.ends = self.ends[:count], self.ends[count:]
        chunks = self._chunks
        sampling = [chunk.seq for chunk in chunks if chunk.samples]
        if chunks:
            for at_s in times if self._num_prompt else ():
                self.prompt_rate.add(self._num_prompt, at_s - self._began_s)
                self._began_s = at_s
            self._commit(chunks, count)
            self._tally.steps += count
        self._tally.computed += count * self.num_planned
        self._tally.tokens += count * len(sampling)
        self._tally.lost_quality += count * len(sampling) * self._loss
        self._on_tokens(times, len(sampling))
        for chunk in chunks:
            if not chunk.seq.started_at:
                chunk.seq.started_at = times[0]
                _outcome(chunk.seq).opened_s = times[0]
        for seq in sampling:
            self._add_tokens(seq, times)

    def _commit(self, chunks: Sequence[ScheduledChunk], count: int) -> None:
        """Have the scheduler count the chunks of `count` steps.

        It estimates the need of blocks anew after so many chunks, when it is asked at a boundary: so it is
        asked where it would be without steps taken together.
        """
        while True:
            left = TOKENS_A_LOOK - self._num_chunks % TOKENS_A_LOOK
            now = count if self.is_at_ease else min(count, -(-left // len(chunks)))
            if now > 1 and self._is_decoding:
                for chunk in chunks:
                    chunk.seq.token_ids += [0] * (now - 1)
                self.scheduler.schedule()  # all get their blocks: there are enough
            self.scheduler.commit(chunks, now)
            self._num_chunks += now * len(chunks)
            count -= now
            if not count:
                return
            if self._is_decoding:
                for chunk in chunks:
                    chunk.seq.token_ids.append(0)
            _ = self.scheduler.num_blocks_needed
            self.scheduler.schedule()

    def _add_tokens(self, seq: EngineSequence, times: Sequence[float]) -> None:
        seq.token_ids.append(0)
        outcome, below = _outcome(seq), self.shape.num_below
        if outcome.first_s is None or outcome.last_s is None:
            outcome.first_s = outcome.last_s = times[0]
        pause_s = max(times[0] - outcome.last_s, times[-1] - times[-2] if len(times) > 1 else 0.0)
        outcome.longest_pause_s = max(outcome.longest_pause_s, pause_s)
        outcome.last_s = times[-1]
        outcome.events += len(times)
        if outcome.spans and outcome.spans[-1][1] == below:
            outcome.spans[-1] = (outcome.spans[-1][0] + len(times), below)
        else:
            outcome.spans.append((len(times), below))
        if finished := why_finished(seq, self.limits):
            self.scheduler.remove(seq)
            self.scheduler.lengths.add(seq.num_output)
            self._leave(outcome, finished, seq.started_at, times[-1])

    def _leave(self, outcome: RequestOutcome, finished: FinishReason, started_s: float, now_s: float) -> None:
        outcome.finish = finished
        self.residence.add(now_s - started_s)
        self._end(outcome, now_s)

    def _end(self, outcome: RequestOutcome, now_s: float, error: str = "") -> None:
        outcome.error, outcome.ended_s = error, now_s
        outcome.status = 200 if not error else 400
        outcome.prompt_tokens, outcome.output_tokens = outcome.prompt_asked, outcome.events
        self._on_ended(self, outcome)

    # ------------------------------------------------------------------------------------- shape

    def renumber(self, blocks: BlockAllocator, numbers: Iterable[int]) -> None:
        """Use `blocks`, in which the blocks in use have these numbers."""
        moves = dict(zip(self.used_blocks, numbers, strict=False))
        self.scheduler.renumber_all(moves.__getitem__)
        self.scheduler.blocks = blocks

    @property
    def used_blocks(self) -> list[int]:
        """The blocks in use, ascending."""
        return sorted(block for seq in self.scheduler.running for block in seq.block_ids)

    def serve_alone(self) -> None:
        """Go back from a group's blocks to those of a worker alone, as its layers are now."""
        used, before = range(len(self.used_blocks)), self.shape.kv_blocks
        self.shape.fit()
        capacity = self.blocks.capacity + self.shape.kv_blocks - before
        self.blocks = BlockAllocator(max(capacity, len(used)), used=used)
        self.renumber(self.blocks, used)

    def reshaped(self, now_s: float) -> None:
        """Read the shape again between two steps: a half has another precision."""
        shape = self.shape
        self.end_below(now_s)
        self._below_since_s = now_s if shape.num_below else None
        self._loss = shape.loss
        self.model.reshape(shape.counts)
        self.scheduler.precision = shape.lowest

    def end_below(self, now_s: float) -> None:
        """Count the time below full precision until now."""
        if self._below_since_s is not None:
            self.below_s += now_s - self._below_since_s
            self._below_since_s = now_s


def _outcome(seq: EngineSequence) -> RequestOutcome:
    assert isinstance(seq, SimulatedSequence)
    return seq.outcome

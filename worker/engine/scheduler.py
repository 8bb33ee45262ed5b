"""Choose which tokens of which sequences run in the next step. No clock, no tensors, no I/O.

Continuous batching with chunked prefill, after Orca (OSDI '22, iteration-level scheduling) and
Sarathi-Serve (OSDI '24, decodes first, prefills fill the rest of the token budget). The rules:

1.  A sequence that decodes runs in every step, but for rule 3. Where there are more of them than this batch
    may hold (a group shares a step's tokens among its members; a pipeline has several batches in flight) they
    take turns.
2.  Prefills share what is left of the token budget, oldest first.
3.  Admission is fair by tokens between API keys, and first come, first served within one
    (`worker.engine.fair_queue`). While some keys use more than their share and others little of theirs, rows,
    blocks and tokens are kept from the former for the latter (`worker.engine.reserve`), whose prompts go
    first, in a step without the former.
    When the head does not fit, nothing passes it. A sequence is admitted when there are blocks for all its
    known tokens and one spare block for each running sequence, and when the blocks suffice for the peak of
    what is expected to grow (`worker.engine.growth`). Without this the next tokens of the running sequences
    would preempt it again. Where nothing runs, a sequence is admitted whatever is expected of it.
    With the prefix cache its first full blocks are those that an earlier sequence with the same beginning has
    computed, at no lower precision than it would get now, nor than its floor. The last known token is always
    computed, for its logits.
4.  When a decode finds no block, the youngest running sequence gives up all its blocks, returns to the head
    of the queue, and is recomputed later. The oldest is never preempted, so there is always progress. In a
    group other members may hold the missing blocks: the oldest then waits until they lend them.
5.  A sequence that would not fit even alone leaves with an error.
6.  A model with two sets of rotary frequencies (longrope) takes those for the number of a sequence's known
    tokens. A sequence that outgrows the short ones gives up its blocks, keeps its place, and is recomputed at
    once with the long ones, as transformers does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

import numpy as np

from bus.precisions import Precision, is_below, lowest
from worker.engine.fair_queue import FairQueue
from worker.engine.growth import OutputLengths, peak_blocks
from worker.engine.key_shares import MEMORY_STEPS, KeyShares
from worker.engine.reserve import Reserve
from worker.engine.sequence import Limits, Sequence
from worker.memory import BlockAllocator

Begun = tuple[Sequence, list[int]]  # a sequence, and the indexed blocks that it begins with

LATELY_S, BURST_S = 1.0, 0.25  # arrivals count for so long; over less time they tell no rate
# Rows of logits in one step for the log-probabilities of prompts: with 8192 they would take 4 GB and more.
MOST_PROMPT_LOGITS = 512
TOKENS_A_LOOK = 256  # at least every so many scheduled chunks the need of blocks is counted anew


@dataclass(slots=True)
class ScheduledChunk:
    """The tokens of `seq` from `seq.num_computed_tokens` on, `num_tokens` of them, that run in this step."""

    seq: Sequence
    num_tokens: int
    generation: int = 0  # generation of the sequence when this was scheduled

    @property
    def samples(self) -> bool:
        """True if the chunk ends at the last known token, so that its logits choose the next."""
        return self.num_tokens == self.seq.num_uncomputed_tokens

    @property
    def is_current(self) -> bool:
        """True if the sequence has kept its row since a batch was built with this chunk."""
        return self.generation == self.seq.generation


@dataclass(slots=True)
class SchedulerOutput:
    """The chunks of one step, and the sequences that entered or left on the way to them."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # need a row before the step
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks and rows, also to begin anew
    rejected: list[tuple[Sequence, str]] = field(default_factory=list)  # left the scheduler, with the reason
    num_tokens: int = 0
    num_prompt_logits: int = 0  # rows for prompt tokens, at most

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedule `num_tokens` of `seq`."""
        self.chunks.append(ScheduledChunk(seq, num_tokens))
        self.num_tokens += num_tokens
        if seq.wants_prompt_logits:
            self.num_prompt_logits += num_tokens

    def room_for(self, seq: Sequence, max_tokens: int) -> int:
        """Return how many tokens of `seq` this step may run, of `max_tokens` in all."""
        room = max_tokens - self.num_tokens
        return min(room, MOST_PROMPT_LOGITS - self.num_prompt_logits) if seq.wants_prompt_logits else room


class Scheduler:
    """The waiting and running sequences of one instance, and the blocks of those that run."""

    def __init__(self, limits: Limits, blocks: BlockAllocator) -> None:
        self.limits = limits
        self.precision: Precision = "full"  # the lowest of any layer and the KV cache in the next step
        self.num_prefix_queried = 0  # prompt tokens looked up in the prefix cache
        self.num_prefix_hits = 0  # prompt tokens found there
        self._holders: Counter[int] = Counter()  # running sequences by block
        self.blocks = blocks
        self.waiting = FairQueue()
        self.shares = KeyShares(MEMORY_STEPS * limits.max_num_batched_tokens)
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_blocks_aside = 0  # blocks in use by no sequence here
        self.num_recomputed = 0  # tokens whose KV was given up, and is computed again
        self.lengths = OutputLengths()
        self._needed, self._needed_at = 0, -1  # and the turn of that count; -1: others run or wait since
        self._turn = 0  # which decode is first where not all fit into a step
        # Every running sequence may decode at once.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)

    def reset_counts(self) -> None:
        """Set the counters to zero."""
        self.num_preemptions = self.num_recomputed = self.num_prefix_queried = self.num_prefix_hits = 0

    def add(self, seq: Sequence) -> None:
        """Append `seq` to the queue."""
        self._needed_at = -1
        self._choose_rope(seq)
        self.waiting.add(seq)
        self.shares.enter(seq, self._num_blocks_in_the_end(seq) if seq.request.key else 0)

    def remove(self, seq: Sequence) -> None:
        """Forget a finished or cancelled sequence and free its blocks. Raises ValueError for a stranger."""
        self._needed_at = -1
        if seq.block_ids:
            self.running.remove(seq)
            self._free(seq)
        else:
            self.waiting.remove(seq)
        self.shares.leave(seq)

    def schedule(self, max_tokens: int | None = None, max_decodes: int | None = None) -> SchedulerOutput:
        """Choose the next step.

        max_tokens: the token budget of this step (None: `max_num_batched_tokens`). max_decodes: the most
        decodes in this batch, where several batches share them (None: all).
        """
        output = SchedulerOutput()
        max_tokens = self.limits.max_num_batched_tokens if max_tokens is None else max_tokens
        self.shares.begin_step()
        self._restart_outgrown(output)
        self._find_blocks(output)
        max_decodes = max_tokens if max_decodes is None else min(max_tokens, max_decodes)
        self._run_decodes(output, max_decodes, self._paused)
        self._run_prompts(output, max_tokens)
        return output

    def extend(self, seqs: Seq[Sequence]) -> bool:
        """Give running sequences the block of the token behind the one in flight; False: too few are free."""
        block_tokens = self.limits.block_tokens
        wanting = [seq for seq in seqs if len(seq.block_ids) * block_tokens <= len(seq.token_ids)]
        if len(wanting) > self.blocks.num_free:
            return False
        for seq in wanting:
            self._hold(seq, self.blocks.allocate(1))
        return True

    def commit(self, chunks: Collection[ScheduledChunk], times: int = 1) -> None:
        """Count the tokens of `chunks` as computed. times: of that many equal steps together."""
        block_tokens = self.limits.block_tokens
        self._turn += times * len(chunks)
        for chunk in chunks:
            if chunk.samples:
                self._charge(chunk.seq, times)  # the prompt's tokens were charged at its admission
            chunk.seq.advance(times * chunk.num_tokens, block_tokens)
            if self.limits.prefix_cache:
                self._index_blocks(chunk.seq)

    def renumber(self, moved: Mapping[int, int]) -> list[Sequence]:
        """Rename moved KV blocks (old id -> new id). Returns the sequences that held one of them."""
        holders = [seq for seq in self.running if not moved.keys().isdisjoint(seq.block_ids)]
        self._renumber(holders, lambda block: moved.get(block, block))
        return holders

    def renumber_all(self, number: Callable[[int], int]) -> None:
        """Give every block of the running sequences its new number; the caller renumbers `self.blocks`.

        Full blocks are indexed anew with the next step.
        """
        self._renumber(self.running, number)
        for seq in self.running:
            seq.num_indexed_blocks = 0

    def restart(self, blocks: BlockAllocator) -> list[Sequence]:
        """Start over on empty `blocks` after all KV was lost.

        The running sequences return to the head of the queue, oldest first, and will be recomputed. Returns
        them.
        """
        lost, self.running = self.running, []
        for seq in reversed(lost):
            self._forget_kv(seq)
            self.waiting.put_back(seq)
        self._holders.clear()
        self.blocks, self.num_blocks_aside, self._needed_at = blocks, 0, -1
        return lost

    @property
    def reserve(self) -> Reserve:
        """The part that is kept from some API keys for others; it holds for a step."""
        return self.shares.reserve(self.running, self._max_running, self.blocks.capacity)

    @property
    def head(self) -> Sequence:
        """The next to be admitted. Raises IndexError if nothing waits."""
        return self.reserve.head(self.waiting)

    @property
    def may_admit(self) -> bool:
        """True if a sequence waits and the batch has a row for it: only blocks may be missing."""
        if not self.waiting:
            return False
        return len(self.running) < self._max_running - self.reserve.kept_from(self.head).num_seqs

    @property
    def can_admit(self) -> bool:
        """True if the next step would admit the head of the queue, or send it away."""
        if not self.may_admit:
            return False
        head = self.head
        is_too_long = head.num_blocks_needed(self.limits.block_tokens) > self.blocks.capacity
        return is_too_long or self._num_missing(head, self._cached(head)) <= 0

    @property
    def num_blocks_wanted(self) -> int:
        """Blocks that are missing to admit the head of the queue beside the growth that is expected."""
        missing = len(self.running) - self.blocks.num_free
        if self.may_admit:
            head = self.head
            missing = max(missing, self._num_missing(head, self._cached(head)))
        return max(0, missing)

    @property
    def num_blocks_needed(self) -> int:
        """Blocks at the peak of what runs, and of what waits as far as it can run at once."""
        turn = self._turn // TOKENS_A_LOOK
        if turn != self._needed_at:
            num_slots = max(0, self._max_running - len(self.running))
            coming = [(seq, self._cached(seq)) for seq in islice(self.waiting, num_slots)]
            self._needed_at, self._needed = turn, self._peak(coming) + self.num_blocks_aside
        return self._needed

    @property
    def num_prompt_tokens_due(self) -> int:
        """Tokens to compute before a prompt that comes now has its turn."""
        prefills = (seq.num_uncomputed_tokens for seq in chain(self.running, self.waiting))
        return sum(count for count in prefills if count > 1)

    def _num_missing(self, seq: Sequence, cached: list[int]) -> int:
        """Return the blocks that are missing to admit `seq`, now or at the peak of what then runs."""
        num_free = self.blocks.num_free
        needed = seq.num_blocks_needed(self.limits.block_tokens) - self._num_held(cached)
        if not self.running:
            return needed - num_free
        num_free -= self.reserve.kept_from(seq).num_blocks
        spare = needed + len(self.running) - num_free
        return max(spare, self._peak([(seq, cached)]) - len(self._holders) - num_free)

    def _peak(self, coming: Seq[Begun] = ()) -> int:
        """Return the most blocks that what runs will hold together with `coming`.

        Blocks that several sequences hold count once, and as long as any sequence runs.
        """
        block_tokens, shared = self.limits.block_tokens, self._shared(coming)
        begun = [*((seq, seq.block_ids) for seq in self.running), *coming]
        tokens, made, most = np.empty((3, len(begun)), np.int64)
        for i, (seq, blocks) in enumerate(begun):
            num_shared = len(shared.intersection(blocks)) if shared else 0
            tokens[i] = len(seq.token_ids) - num_shared * block_tokens
            made[i] = seq.num_output
            most[i] = self._most_left(seq)
        return len(shared) + peak_blocks(tokens, self.lengths.remaining(made, most), block_tokens)

    def _num_blocks_in_the_end(self, seq: Sequence) -> int:
        """Return the blocks that `seq` is expected to hold when it ends."""
        made, most = np.asarray([[seq.num_output], [self._most_left(seq)]], np.int64)
        length = len(seq.token_ids) + int(self.lengths.remaining(made, most)[0])
        return -(-length // self.limits.block_tokens)

    def _most_left(self, seq: Sequence) -> int:
        """Return the tokens that the limits leave to `seq`."""
        return max(0, seq.most_tokens(self.limits) - len(seq.token_ids))

    def _shared(self, coming: Seq[Begun]) -> set[int]:
        """Return the blocks that more than one of the running sequences and of `coming` holds."""
        num_held = sum(len(seq.block_ids) for seq in self.running)
        if num_held == len(self._holders) and not any(cached for _, cached in coming):
            return set()
        holders = Counter(self._holders)
        for _, cached in coming:
            holders.update(cached)
        return {block for block, count in holders.items() if count > 1}

    @property
    def num_blocks_spare(self) -> int:
        """Free blocks beyond those that what runs is expected to take, at least one for each sequence."""
        growth = max(len(self.running), self._peak() - len(self._holders))
        return max(0, self.blocks.num_free - growth)

    def wanting_s(self, now: float) -> float:
        """Return how long the oldest sequence that misses blocks has been here; 0.0 for none.

        They are missing as `num_blocks_wanted` counts them.
        """
        if self.blocks.num_free < len(self.running):
            return now - self.running[0].arrived
        return now - self.head.arrived if self.waiting else 0.0

    def waited_for_blocks_s(self, now: float) -> float:
        """Return how long the head of the queue has been here, while blocks are missing; else 0.0."""
        return now - self.head.arrived if self.waiting and self.num_blocks_wanted else 0.0

    def arrivals_per_s(self, now: float) -> float:
        """Return the rate of the requests that came lately and are still here; 0.0 for fewer than two."""
        newest = chain(reversed(self.waiting), reversed(self.running))
        lately = [seq.arrived for seq in takewhile(lambda seq: seq.arrived > now - LATELY_S, newest)]
        return (len(lately) - 1) / max(BURST_S, now - min(lately)) if lately else 0.0

    # ----------------------------------------------------------------------------- the five passes

    def _restart_outgrown(self, output: SchedulerOutput) -> None:
        """Take the blocks of sequences whose KV turns by frequencies that no longer are theirs.

        They run on in their places, and begin again when `_find_blocks` comes to them.
        """
        if not self.limits.short_context:
            return
        for seq in self.running:
            if not seq.is_long and self.limits.is_long(len(seq.token_ids)):
                self._needed_at = -1
                self._free(seq)
                output.preempted.append(seq)

    def _find_blocks(self, output: SchedulerOutput) -> None:
        """Give each running sequence the block of its newest token, oldest first, preempting the youngest."""
        block_tokens, i = self.limits.block_tokens, 0
        while i < len(self.running):
            seq = self.running[i]
            if begins := not seq.block_ids:
                self._start_from(seq, self._cached(seq))
            missing = seq.num_blocks_needed(block_tokens) - len(seq.block_ids)
            while missing > self.blocks.num_free and len(self.running) > i + 1:
                self._preempt_youngest(output)
            if missing <= self.blocks.num_free:
                if missing:
                    self._hold(seq, self.blocks.allocate(missing))
                if begins:
                    output.admitted.append(seq)
                i += 1
            elif i or seq.num_blocks_needed(block_tokens) <= self.blocks.capacity:
                self._preempt_youngest(output)  # itself
            else:
                self._needed_at = -1
                self.running.remove(seq)
                self._free(seq)
                self.shares.leave(seq)
                output.rejected.append((seq, self._too_long(seq)))

    @property
    def _paused(self) -> Collection[str]:
        """The keys whose sequences do not decode in a step that has a prompt of a key far below its share."""
        reserve = self.reserve
        if not reserve.below:
            return ()
        is_next = bool(self.waiting) and reserve.is_below(self.head) and self.can_admit
        begun = (reserve.is_below(seq) for seq in self.running if seq.num_uncomputed_tokens > 1)
        return reserve.above if is_next or any(begun) else ()

    def _run_decodes(self, output: SchedulerOutput, max_tokens: int, paused: Collection[str]) -> None:
        decoding = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
        if paused:
            decoding = [seq for seq in decoding if seq.request.key not in paused]
        if len(decoding) > max_tokens:
            first = self._turn % len(decoding)
            decoding = [*decoding[first:], *decoding[:first]][:max_tokens]
        for seq in decoding:
            output.add(seq, 1)

    def _run_prompts(self, output: SchedulerOutput, max_tokens: int) -> None:
        """Run prompts; those of keys above their shares last, few of their tokens, or none."""
        reserve = self.reserve
        if not reserve.above:
            self._run_prefills(output, max_tokens, self.running)
            self._admit(output, max_tokens)
            return
        others = [seq for seq in self.running if not reserve.is_above(seq)]
        self._run_prefills(output, max_tokens, others)
        self._admit(output, max_tokens, reserve.above)
        prompts = (chunk.seq for chunk in output.chunks if chunk.num_tokens > 1)
        most = reserve.most_prompt_tokens(prompts, self.limits.max_num_batched_tokens)
        if most:
            max_tokens = min(max_tokens, output.num_tokens + most)
            self._run_prefills(output, max_tokens, list(filter(reserve.is_above, self.running)))
            self._admit(output, max_tokens)

    def _run_prefills(self, output: SchedulerOutput, max_tokens: int, seqs: Seq[Sequence]) -> None:
        for seq in seqs:
            remaining = seq.num_uncomputed_tokens
            if remaining > 1:
                num_tokens = min(remaining, output.room_for(seq, max_tokens))
                if num_tokens > 0:
                    output.add(seq, num_tokens)

    def _admit(self, output: SchedulerOutput, max_tokens: int, but: Collection[str] = ()) -> None:
        """Admit what waits and fits, until the next is of one of the keys `but`."""
        while self.may_admit:
            seq = self.head
            if seq.request.key in but:
                return
            budget = output.room_for(seq, max_tokens)
            needed = seq.num_blocks_needed(self.limits.block_tokens)
            if needed > self.blocks.capacity:
                self._pop(seq)
                self.shares.leave(seq)
                output.rejected.append((seq, self._too_long(seq)))
                continue
            if budget == 0:
                return
            cached = self._cached(seq)
            if self._num_missing(seq, cached) > 0:
                return
            self._pop(seq)
            num_lost_tokens = seq.num_lost_tokens
            self._start_from(seq, cached)
            # What is computed again, after others had its blocks, is not charged twice.
            self._charge(seq, len(seq.token_ids) - max(seq.num_computed_tokens, num_lost_tokens))
            self._hold(seq, self.blocks.allocate(needed - len(cached)))
            self.running.append(seq)
            output.admitted.append(seq)
            output.add(seq, min(seq.num_uncomputed_tokens, budget))

    # ----------------------------------------------------------------------------- moves

    def _pop(self, seq: Sequence) -> None:
        self._needed_at = -1
        self.waiting.pop(seq)

    def _charge(self, seq: Sequence, num_tokens: int) -> None:
        self.waiting.charge(seq, num_tokens)
        self.shares.charge(seq, num_tokens)

    def _preempt_youngest(self, output: SchedulerOutput) -> None:
        self._needed_at = -1
        self._return_to_queue(self.running.pop(), output)
        self.num_preemptions += 1

    def _return_to_queue(self, seq: Sequence, output: SchedulerOutput) -> None:
        self._free(seq)
        self.waiting.put_back(seq)
        output.preempted.append(seq)

    def _free(self, seq: Sequence) -> None:
        holders, left = self._holders, list[int]()
        for block in reversed(seq.block_ids):
            holders[block] -= 1
            if not holders[block]:
                del holders[block]
                left.append(block)
        self.blocks.free(left)  # the first block last, so that it is kept longest
        self._forget_kv(seq)

    def _forget_kv(self, seq: Sequence) -> None:
        seq.num_lost_tokens = max(seq.num_lost_tokens, seq.num_computed_tokens)
        seq.block_ids, seq.num_computed_tokens, seq.num_indexed_blocks = [], 0, 0
        seq.precision = "full"
        self._choose_rope(seq)

    def _choose_rope(self, seq: Sequence) -> None:
        """Take the frequencies for the known tokens; the sequence has no KV."""
        is_long = self.limits.is_long(len(seq.token_ids))
        if is_long != seq.is_long:
            seq.is_long, seq.block_keys = is_long, []

    def _hold(self, seq: Sequence, blocks: list[int]) -> None:
        seq.block_ids += blocks
        self._holders.update(blocks)

    def _renumber(self, seqs: list[Sequence], number: Callable[[int], int]) -> None:
        for seq in seqs:
            seq.block_ids = [number(block) for block in seq.block_ids]
        self._holders = Counter(block for seq in self.running for block in seq.block_ids)

    # ----------------------------------------------------------------------------- the prefix cache

    def _cached(self, seq: Sequence) -> list[int]:
        """Return the indexed blocks that `seq` may begin with."""
        wants_all_logits = seq.request.sampling.prompt_logprobs is not None
        if not (self.limits.prefix_cache and len(self.blocks.index)) or wants_all_logits:
            return []
        floor = seq.request.min_precision
        if not floor or is_below(floor, self.precision):
            floor = self.precision
        block_tokens = self.limits.block_tokens
        return self.blocks.index.find(seq.keys((len(seq.token_ids) - 1) // block_tokens, block_tokens), floor)

    def _num_held(self, blocks: list[int]) -> int:
        return sum(block in self._holders for block in blocks)

    def _start_from(self, seq: Sequence, cached: list[int]) -> None:
        """Let `seq` begin with these blocks: their tokens need not be computed."""
        self.blocks.reuse(cached)
        self.blocks.index.touch(cached)
        self._hold(seq, cached)
        seq.num_computed_tokens = len(cached) * self.limits.block_tokens
        seq.num_indexed_blocks = len(cached)
        seq.precision = lowest(map(self.blocks.index.precision_of, cached))
        self.num_recomputed += max(0, seq.num_lost_tokens - seq.num_computed_tokens)
        seq.num_lost_tokens = 0
        if self.limits.prefix_cache and not seq.started_at:
            seq.num_unreported_cached = min(seq.num_computed_tokens, seq.num_prompt)
            self.num_prefix_queried += seq.num_prompt
            self.num_prefix_hits += seq.num_unreported_cached

    def _index_blocks(self, seq: Sequence) -> None:
        """Index the blocks of `seq` that have become full."""
        if is_below(self.precision, seq.precision):
            seq.precision = self.precision
        if not self.blocks.index.is_open:  # blocks are indexed when it opens
            return
        num_full = seq.num_computed_tokens // self.limits.block_tokens
        if num_full == seq.num_indexed_blocks:
            return
        keys = seq.keys(num_full, self.limits.block_tokens)
        for i in range(seq.num_indexed_blocks, num_full):
            self.blocks.index.add(seq.block_ids[i], keys[i], seq.precision, i)
        seq.num_indexed_blocks = num_full

    def lower_precision(self, precision: Precision) -> None:
        """Count all KV so far as computed in `precision` at best."""
        self.blocks.index.lower(precision)
        for seq in self.running:
            seq.precision = lowest([seq.precision, precision])

    def _too_long(self, seq: Sequence) -> str:
        needed, block_tokens = seq.num_blocks_needed(self.limits.block_tokens), self.limits.block_tokens
        return (
            f"{len(seq.token_ids)} tokens need {needed} KV blocks of {block_tokens} tokens and "
            f"this instance has {self.blocks.capacity}; shorten the prompt or give the worker more memory"
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the running sequences hold exactly the blocks handed out."""
        self.waiting.check_integrity()
        self.shares.check_integrity(chain(self.running, self.waiting))
        held = Counter(block for seq in self.running for block in seq.block_ids)
        assert held == self._holders, "blocks are counted for other sequences than hold them"
        contents: dict[int, bytes] = {}
        for seq in self.running:
            num_full = seq.num_computed_tokens // self.limits.block_tokens
            for i, block in enumerate(seq.block_ids):
                if held[block] > 1:
                    assert i < num_full, f"block {block} is shared and not full"
                    key = seq.keys(num_full, self.limits.block_tokens)[i]
                    assert contents.setdefault(block, key) == key, f"block {block} is shared by unlike tokens"
        num_held = len(held) + self.num_blocks_aside
        assert self.blocks.num_used == num_held, (
            f"{self.blocks.num_used} blocks of {self.blocks.capacity} are taken, sequences hold {num_held}"
        )
        assert all(not seq.block_ids and seq.num_computed_tokens == 0 for seq in self.waiting)

"""Choose which tokens of which sequences run in the next step. No clock, no tensors, no I/O.

Continuous batching with chunked prefill, after Orca (OSDI '22, iteration-level scheduling) and
Sarathi-Serve (OSDI '24, decodes first, prefills fill the rest of the token budget). The rules:

1.  A sequence that decodes runs in every step. Where there are more of them than this batch may hold (a group
    shares a step's tokens among its members; a pipeline has several batches in flight) they take turns.
2.  Prefills share what is left of the token budget, oldest first.
3.  Admission is first come, first served: when the head does not fit, nothing passes it. A sequence is
    admitted when there are blocks for all its known tokens and one spare block for each running sequence.
    Without the spares the next tokens of the running sequences would preempt it again.
4.  When a decode finds no block, the youngest running sequence gives up all its blocks, returns to the head
    of the queue, and is recomputed later. The oldest is never preempted, so there is always progress. In a
    group other members may hold the missing blocks: the oldest then waits until they lend them.
5.  A sequence that would not fit even alone leaves with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from worker.engine.sequence import BlockPool, Limits, Sequence


@dataclass(slots=True)
class ScheduledChunk:
    """The tokens of `seq` from `seq.num_computed_tokens` on, `num_tokens` of them, that run in this step."""

    seq: Sequence
    num_tokens: int
    generation: int = 0  # of the sequence when this was scheduled

    @property
    def samples(self) -> bool:
        """True if the chunk ends at the last known token, so that its logits choose the next."""
        return self.num_tokens == self.seq.num_uncomputed_tokens


@dataclass(slots=True)
class SchedulerOutput:
    """The chunks of one step, and the sequences that entered or left on the way to them."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # need a row before the step
    preempted: list[Sequence] = field(default_factory=list)  # lost their blocks; wait at the head again
    rejected: list[tuple[Sequence, str]] = field(default_factory=list)  # left the scheduler, with the reason
    num_tokens: int = 0

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Schedule `num_tokens` of `seq`."""
        self.chunks.append(ScheduledChunk(seq, num_tokens))
        self.num_tokens += num_tokens


class Scheduler:
    """The waiting and running sequences of one instance, and the blocks of those that run."""

    def __init__(self, limits: Limits, blocks: BlockPool) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_blocks_aside = 0  # in use by none of the sequences here
        self.num_recomputed = 0  # tokens whose KV was given up, and will be computed again
        self._turn = 0  # which decode is first where not all fit into a step
        # Every running sequence may decode at once.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)

    def add(self, seq: Sequence) -> None:
        """Append `seq` to the queue."""
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a finished or cancelled sequence and free its blocks. Raises ValueError for a stranger."""
        if seq.block_ids:
            self.running.remove(seq)
            self._free(seq)
        else:
            self.waiting.remove(seq)

    def schedule(self, max_tokens: int | None = None, max_decodes: int | None = None) -> SchedulerOutput:
        """Choose the next step.

        max_tokens: the token budget of this step (None: `max_num_batched_tokens`). max_decodes: the most
        decodes in this batch, where several batches share them (None: all).
        """
        output = SchedulerOutput()
        max_tokens = self.limits.max_num_batched_tokens if max_tokens is None else max_tokens
        self._find_blocks(output)
        self._run_decodes(output, max_tokens if max_decodes is None else min(max_tokens, max_decodes))
        self._run_prefills(output, max_tokens)
        self._admit(output, max_tokens)
        return output

    def commit(self, chunks: Collection[ScheduledChunk]) -> None:
        """Count the tokens of `chunks` as computed."""
        block_tokens = self.limits.block_tokens
        self._turn += len(chunks)
        for chunk in chunks:
            chunk.seq.advance(chunk.num_tokens, block_tokens)

    def renumber(self, moved: Mapping[int, int]) -> list[Sequence]:
        """Rename moved KV blocks (old id -> new id). Returns the sequences that held one of them."""
        holders = [seq for seq in self.running if not moved.keys().isdisjoint(seq.block_ids)]
        for seq in holders:
            seq.block_ids = [moved.get(block, block) for block in seq.block_ids]
        return holders

    def renumber_all(self, number: Callable[[int], int]) -> None:
        """Give every block of the running sequences its new number; the caller renumbers `self.blocks`."""
        for seq in self.running:
            seq.block_ids = [number(block) for block in seq.block_ids]

    def restart(self, blocks: BlockPool) -> list[Sequence]:
        """Start over on empty `blocks` after all KV was lost.

        The running sequences return to the head of the queue, oldest first, and will be recomputed. Returns
        them.
        """
        lost, self.running = self.running, []
        for seq in reversed(lost):
            self.num_recomputed += seq.num_computed_tokens
            seq.block_ids, seq.num_computed_tokens = [], 0
            self.waiting.appendleft(seq)
        self.blocks, self.num_blocks_aside = blocks, 0
        return lost

    @property
    def num_blocks_wanted(self) -> int:
        """Blocks that are missing to admit the head of the queue with a spare block for each running one."""
        needed = len(self.running)
        if self.waiting and len(self.running) < self._max_running:
            needed += self.waiting[0].num_blocks_needed(self.limits.block_tokens)
        return max(0, needed - self.blocks.num_free)

    @property
    def num_blocks_spare(self) -> int:
        """Free blocks, less one for each running sequence."""
        return max(0, self.blocks.num_free - len(self.running))

    @property
    def first_in_want(self) -> Sequence | None:
        """The oldest sequence that misses blocks, as counted by `num_blocks_wanted`."""
        if self.blocks.num_free < len(self.running):
            return self.running[0]
        return self.waiting[0] if self.waiting else None

    # ----------------------------------------------------------------------------- the four passes

    def _find_blocks(self, output: SchedulerOutput) -> None:
        """Give each running sequence the block of its newest token, oldest first, preempting the youngest."""
        block_tokens, i = self.limits.block_tokens, 0
        while i < len(self.running):
            seq = self.running[i]
            missing = seq.num_blocks_needed(block_tokens) - len(seq.block_ids)
            while missing > self.blocks.num_free and len(self.running) > i + 1:
                self._preempt_youngest(output)
            if missing <= self.blocks.num_free:
                if missing:
                    seq.block_ids += self.blocks.allocate(missing)
                i += 1
            elif i or seq.num_blocks_needed(block_tokens) <= self.blocks.capacity:
                self._preempt_youngest(output)  # itself
            else:
                self.remove(seq)
                output.rejected.append((seq, self._too_long(seq)))

    def _run_decodes(self, output: SchedulerOutput, max_tokens: int) -> None:
        decoding = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
        if len(decoding) > max_tokens:
            first = self._turn % len(decoding)
            decoding = [*decoding[first:], *decoding[:first]][:max_tokens]
        for seq in decoding:
            output.add(seq, 1)

    def _run_prefills(self, output: SchedulerOutput, max_tokens: int) -> None:
        for seq in self.running:
            remaining = seq.num_uncomputed_tokens
            if remaining > 1:
                num_tokens = min(remaining, max_tokens - output.num_tokens)
                if num_tokens == 0:
                    return
                output.add(seq, num_tokens)

    def _admit(self, output: SchedulerOutput, max_tokens: int) -> None:
        while self.waiting and len(self.running) < self._max_running:
            budget = max_tokens - output.num_tokens
            seq = self.waiting[0]
            needed = seq.num_blocks_needed(self.limits.block_tokens)
            if needed > self.blocks.capacity:
                self.waiting.popleft()
                output.rejected.append((seq, self._too_long(seq)))
                continue
            if budget == 0 or needed + len(self.running) > self.blocks.num_free:
                return
            self.waiting.popleft()
            seq.block_ids = self.blocks.allocate(needed)
            self.running.append(seq)
            output.admitted.append(seq)
            output.add(seq, min(seq.num_uncomputed_tokens, budget))

    # ----------------------------------------------------------------------------- moves

    def _preempt_youngest(self, output: SchedulerOutput) -> None:
        seq = self.running.pop()
        self.num_recomputed += seq.num_computed_tokens
        self._free(seq)
        self.waiting.appendleft(seq)
        output.preempted.append(seq)
        self.num_preemptions += 1

    def _free(self, seq: Sequence) -> None:
        self.blocks.free(seq.block_ids)
        seq.block_ids = []
        seq.num_computed_tokens = 0

    def _too_long(self, seq: Sequence) -> str:
        needed, block_tokens = seq.num_blocks_needed(self.limits.block_tokens), self.limits.block_tokens
        return (
            f"{len(seq.token_ids)} tokens need {needed} KV blocks of {block_tokens} tokens and "
            f"this instance has {self.blocks.capacity}; shorten the prompt or give the worker more memory"
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the running sequences hold exactly the blocks handed out."""
        held = [block for seq in self.running for block in seq.block_ids]
        assert len(set(held)) == len(held), "a block belongs to two sequences"
        num_held = len(held) + self.num_blocks_aside
        assert self.blocks.num_used == num_held, (
            f"{self.blocks.num_used} blocks of {self.blocks.capacity} are taken, sequences hold {num_held}"
        )
        assert all(not seq.block_ids and seq.num_computed_tokens == 0 for seq in self.waiting)

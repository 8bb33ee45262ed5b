"""Which tokens of which sequences run in the next step. No clock, no tensors, no I/O.

Continuous batching with chunked prefill, after Orca (OSDI '22, iteration-level scheduling) and
Sarathi-Serve (OSDI '24, decodes first, prefills fill the rest of the token budget). The rules:

1.  A sequence that decodes runs in every step; in a group, whose planners share a step's tokens, and in a
    pipeline, where several batches are on their way, they take turns where there are more of them than this
    batch may run.
2.  Prefills share what is left of `max_num_batched_tokens`, or of this planner's part, oldest first.
3.  Admission is first come, first served: when the head does not fit, nobody passes it. A sequence is
    admitted when there are blocks for all its known tokens and one spare block for each sequence that
    already runs; without the spares it would be thrown out again by their next tokens.
4.  When a decode finds no block, the youngest running sequence gives up all of its own and goes back to the
    head of the queue; it is recomputed later. The oldest is never preempted, so there is always progress;
    except in a group, where others have the blocks that it misses: it waits until they lend them.
5.  A sequence that does not fit even alone leaves with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from worker.core import BlockPool, Limits, Sequence, StepPlan


class Scheduler:
    """Owns who waits, who runs, and the blocks of those who run."""

    def __init__(self, limits: Limits, blocks: BlockPool) -> None:
        self.limits = limits
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_preemptions = 0
        self.num_blocks_aside = 0  # in use, and of no sequence here
        self.num_recomputed = 0  # tokens whose KV was given up, and will be computed again
        self._turn = 0  # whose it is, where not all decodes fit into a step
        # Every running sequence may decode at once.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Finished or cancelled: its blocks are free from here on. ValueError if it is not here."""
        if seq.block_ids:
            self.running.remove(seq)
            self._free(seq)
        else:
            self.waiting.remove(seq)

    def plan(self, max_tokens: int | None = None, max_decodes: int | None = None) -> StepPlan:
        """max_tokens: of this step, where others share it; None: as many as one worker runs. max_decodes: of
        one batch of several; None: all."""
        plan = StepPlan()
        max_tokens = self.limits.max_num_batched_tokens if max_tokens is None else max_tokens
        self._find_blocks(plan)
        self._run_decodes(plan, max_tokens if max_decodes is None else min(max_tokens, max_decodes))
        self._run_prefills(plan, max_tokens)
        self._admit(plan, max_tokens)
        return plan

    def commit(self, plan: StepPlan) -> None:
        """The planned tokens are in the KV cache."""
        block_tokens = self.limits.block_tokens
        self._turn += len(plan.chunks)
        for chunk in plan.chunks:
            chunk.seq.advance(chunk.num_tokens, block_tokens)

    def renumber(self, moved: Mapping[int, int]) -> list[Sequence]:
        """KV blocks were moved (old id -> new id). Returns the sequences that held one of them."""
        holders = [seq for seq in self.running if not moved.keys().isdisjoint(seq.block_ids)]
        for seq in holders:
            seq.block_ids = [moved.get(block, block) for block in seq.block_ids]
        return holders

    def renumber_all(self, number: Callable[[int], int]) -> None:
        """Every block has another number from here on; `self.blocks` was told, or is another."""
        for seq in self.running:
            seq.block_ids = [number(block) for block in seq.block_ids]

    def restart(self, blocks: BlockPool) -> list[Sequence]:
        """All KV is lost; `blocks` are what there is now. Whoever ran waits at the head, oldest first, to be
        recomputed; returns them."""
        lost, self.running = self.running, []
        for seq in reversed(lost):
            self.num_recomputed += seq.num_computed
            seq.block_ids, seq.num_computed = [], 0
            self.waiting.appendleft(seq)
        self.blocks, self.num_blocks_aside = blocks, 0
        return lost

    @property
    def num_blocks_wanted(self) -> int:
        """How many blocks more would let the queue's head in, and leave a spare one for each that runs."""
        needed = len(self.running)
        if self.waiting and len(self.running) < self._max_running:
            needed += self.waiting[0].num_blocks_needed(self.limits.block_tokens)
        return max(0, needed - self.blocks.num_free)

    @property
    def num_blocks_spare(self) -> int:
        """Free ones, less one for each that runs."""
        return max(0, self.blocks.num_free - len(self.running))

    @property
    def first_in_want(self) -> Sequence | None:
        """The oldest of those that `num_blocks_wanted` is about."""
        if self.blocks.num_free < len(self.running):
            return self.running[0]
        return self.waiting[0] if self.waiting else None

    # ----------------------------------------------------------------------------- the four passes

    def _find_blocks(self, plan: StepPlan) -> None:
        """Each running sequence gets the block of its newest token, oldest first, or the youngest yields."""
        block_tokens, i = self.limits.block_tokens, 0
        while i < len(self.running):
            seq = self.running[i]
            missing = seq.num_blocks_needed(block_tokens) - len(seq.block_ids)
            while missing > self.blocks.num_free and len(self.running) > i + 1:
                self._preempt_youngest(plan)
            if missing <= self.blocks.num_free:
                if missing:
                    seq.block_ids += self.blocks.allocate(missing)
                i += 1
            elif i or seq.num_blocks_needed(block_tokens) <= self.blocks.capacity:
                self._preempt_youngest(plan)  # itself
            else:
                self.remove(seq)
                plan.rejected.append((seq, self._too_long(seq)))

    def _run_decodes(self, plan: StepPlan, max_tokens: int) -> None:
        decoding = [seq for seq in self.running if seq.num_remaining == 1]
        if len(decoding) > max_tokens:
            first = self._turn % len(decoding)
            decoding = [*decoding[first:], *decoding[:first]][:max_tokens]
        for seq in decoding:
            plan.add(seq, 1)

    def _run_prefills(self, plan: StepPlan, max_tokens: int) -> None:
        for seq in self.running:
            remaining = seq.num_remaining
            if remaining > 1:
                num_tokens = min(remaining, max_tokens - plan.num_tokens)
                if num_tokens == 0:
                    return
                plan.add(seq, num_tokens)

    def _admit(self, plan: StepPlan, max_tokens: int) -> None:
        while self.waiting and len(self.running) < self._max_running:
            budget = max_tokens - plan.num_tokens
            seq = self.waiting[0]
            needed = seq.num_blocks_needed(self.limits.block_tokens)
            if needed > self.blocks.capacity:
                self.waiting.popleft()
                plan.rejected.append((seq, self._too_long(seq)))
                continue
            if budget == 0 or needed + len(self.running) > self.blocks.num_free:
                return
            self.waiting.popleft()
            seq.block_ids = self.blocks.allocate(needed)
            self.running.append(seq)
            plan.admitted.append(seq)
            plan.add(seq, min(seq.num_remaining, budget))

    # ----------------------------------------------------------------------------- moves

    def _preempt_youngest(self, plan: StepPlan) -> None:
        seq = self.running.pop()
        self.num_recomputed += seq.num_computed
        self._free(seq)
        self.waiting.appendleft(seq)
        plan.preempted.append(seq)
        self.num_preemptions += 1

    def _free(self, seq: Sequence) -> None:
        self.blocks.free(seq.block_ids)
        seq.block_ids = []
        seq.num_computed = 0

    def _too_long(self, seq: Sequence) -> str:
        needed, block_tokens = seq.num_blocks_needed(self.limits.block_tokens), self.limits.block_tokens
        return (
            f"{len(seq.token_ids)} tokens need {needed} KV blocks of {block_tokens} tokens and "
            f"this instance has {self.blocks.capacity}; shorten the prompt or give the worker more memory"
        )

    def check_integrity(self) -> None:
        """AssertionError unless the blocks of the running sequences are exactly those handed out."""
        held = [block for seq in self.running for block in seq.block_ids]
        assert len(set(held)) == len(held), "a block belongs to two sequences"
        num_held = len(held) + self.num_blocks_aside
        assert self.blocks.num_used == num_held, (
            f"{self.blocks.num_used} blocks of {self.blocks.capacity} are taken, sequences hold {num_held}"
        )
        assert all(not seq.block_ids and seq.num_computed == 0 for seq in self.waiting)

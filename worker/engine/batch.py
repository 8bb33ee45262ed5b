"""The running sequences as tables, one row each, and the work of one step made from them.

A step's inputs are index arithmetic over whole arrays: nothing is done per token, and per sequence only what
changed (a new row, a new block).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker.core import Chunk, Limits, Sequence, StepPlan
from worker.engine.work import Ints, Work


@dataclass(slots=True)
class StepInputs:
    """A step's work and what becomes of its logits: R of the chunks sample, P rows are for prompt
    log-probabilities; the work's logit rows are R + P."""

    work: Work
    sampling: list[Chunk]  # R
    sampling_rows: Ints  # [R] rows of the tables
    output_positions: Ints  # [R] index of the token to be chosen in its request's output
    prompt_ranges: list[tuple[Sequence, int, int]]  # rows for prompt positions [first, end) of a sequence


class Batch:
    """Tables (row, position) -> token id and (row, index) -> block id; rows are taken at admission."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        num_rows, block_tokens = limits.max_num_seqs, limits.block_tokens
        # np.zeros maps pages on first touch: rows and positions that are never used cost no memory.
        self._tokens = np.zeros((num_rows, limits.max_model_len + 1), np.int64)
        self._blocks = np.zeros((num_rows, -(-limits.max_model_len // block_tokens) + 1), np.int32)
        self._num_blocks = [0] * num_rows
        self._free_rows = list(range(num_rows))[::-1]

    def admit(self, seq: Sequence) -> int:
        seq.row = self._free_rows.pop()
        self._tokens[seq.row, : len(seq.token_ids)] = seq.token_ids
        self._num_blocks[seq.row] = 0
        return seq.row

    def release(self, seq: Sequence) -> None:
        if seq.row >= 0:
            self._free_rows.append(seq.row)
            seq.row = -1
            seq.num_exits += 1

    def reread_blocks(self, seq: Sequence) -> None:
        """Its blocks were moved: the next step's table takes all of them anew."""
        self._num_blocks[seq.row] = 0

    def append(self, rows: Ints, lengths: Ints, token_ids: Ints) -> None:
        """Token `token_ids[i]` comes after the first `lengths[i]` tokens of `rows[i]`."""
        self._tokens[rows, lengths] = token_ids

    def build(self, plan: StepPlan) -> StepInputs:
        chunks = plan.chunks
        for chunk in chunks:
            self._update_blocks(chunk.seq)
        num_seqs = len(chunks)
        rows = np.fromiter((chunk.seq.row for chunk in chunks), np.int64, num_seqs)
        starts = np.fromiter((chunk.seq.num_computed for chunk in chunks), np.int64, num_seqs)
        q_lens = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, num_seqs)
        ends = q_lens.cumsum()
        token_rows = rows.repeat(q_lens)
        positions = np.arange(plan.num_tokens) + (starts - ends + q_lens).repeat(q_lens)
        sampling_at = np.fromiter((i for i, chunk in enumerate(chunks) if chunk.samples), np.int64)
        sampling = [chunks[i] for i in sampling_at.tolist()]
        prompt_ranges, prompt_rows = self._prompt_logprob_rows(chunks, ends)
        context_lens = starts + q_lens
        width = -(-int(context_lens.max(initial=0)) // self.limits.block_tokens)
        return StepInputs(
            work=Work(
                token_ids=self._tokens[token_rows, positions],
                q_lens=q_lens,
                context_lens=context_lens,
                blocks=self._blocks[rows, :width],
                logit_rows=np.concatenate([ends[sampling_at] - 1, *prompt_rows]),
            ),
            sampling=sampling,
            sampling_rows=rows[sampling_at],
            output_positions=np.fromiter(
                (chunk.seq.num_output for chunk in sampling), np.int64, len(sampling)
            ),
            prompt_ranges=prompt_ranges,
        )

    def _update_blocks(self, seq: Sequence) -> None:
        known = self._num_blocks[seq.row]
        if known != len(seq.block_ids):
            self._blocks[seq.row, known : len(seq.block_ids)] = seq.block_ids[known:]
            self._num_blocks[seq.row] = len(seq.block_ids)

    def _prompt_logprob_rows(
        self, chunks: list[Chunk], ends: Ints
    ) -> tuple[list[tuple[Sequence, int, int]], list[Ints]]:
        """Logits at position p are about the token at p + 1; those already collected are not asked again."""
        ranges, rows = [], []
        for chunk, chunk_end in zip(chunks, ends.tolist(), strict=True):
            seq = chunk.seq
            if seq.prompt_logprobs and len(seq.prompt_logprobs) < seq.num_prompt:
                first = max(seq.num_computed, len(seq.prompt_logprobs) - 1)
                end = min(seq.num_computed + chunk.num_tokens, seq.num_prompt - 1)
                if first < end:
                    chunk_begin = chunk_end - chunk.num_tokens - seq.num_computed
                    ranges.append((seq, first, end))
                    rows.append(np.arange(chunk_begin + first, chunk_begin + end))
        return ranges, rows

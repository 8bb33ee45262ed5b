"""The running sequences as tables, one row each, and the input of one step made from them.

A step's input is index arithmetic over whole arrays. Letters as in `kernels`: T tokens of S chunks; W blocks
of the longest context; R rows that sample; P rows for prompt log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.plan import AttentionPlan
from worker.engine.scheduler import ScheduledChunk, SchedulerOutput
from worker.engine.sequence import Limits, Sequence

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """Chunks of sequences, one after the other, as plain arrays: to run here or to send to other workers."""

    token_ids: Ints  # [T]
    q_lens: Ints  # [S] new tokens of each chunk
    context_lens: Ints  # [S] with them
    blocks: npt.NDArray[np.int32]  # [S, W]; entries behind a context are arbitrary
    logit_rows: Ints  # [R + P] of 0..T-1
    rope_rows: Ints  # [S] row of position 0 in the rotary tables

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def renumbered(self, times: int, plus: int) -> ModelInput:
        """Return a copy in which block b is times * b + plus."""
        return replace(self, blocks=self.blocks * times + plus)


@dataclass(slots=True)
class ScheduledBatch:
    """One step on its way through an executor: the model's input, and what its logits are for."""

    chunks: list[ScheduledChunk]
    input: ModelInput
    sampling: list[ScheduledChunk]  # R
    sampling_rows: Ints  # [R] rows of the tables
    output_positions: Ints  # [R] index of the token to be chosen in its request's output
    prompt_ranges: list[tuple[Sequence, int, int]]  # rows for prompt positions [first, end) of a sequence
    began: float = 0.0  # start, by the clock of the engine core
    num_released: int = -1  # rows that `InputBatch` had taken back when this was built
    is_committed: bool = False  # True: its tokens count as computed
    follows: Ints | None = (
        None  # [T] rows of the batch before it, whose tokens it takes; None: they are known
    )
    embeds: bool = False  # a chunk that samples is the end of a prompt to embed

    def hidden_states(self) -> list[torch.Tensor] | None:
        """Return a list for the states before the head, if anything asks for them."""
        return [] if self.embeds else None

    def only(self, is_kept: Callable[[Sequence], bool]) -> tuple[ScheduledBatch, Ints]:
        """Return this batch without the sequences that are not kept, and the rows of its logits that stay."""
        kept = [i for i, chunk in enumerate(self.sampling) if is_kept(chunk.seq)]
        rows, at = list(kept), len(self.sampling)
        for seq, first, end in self.prompt_ranges:
            if is_kept(seq):
                rows += range(at, at + end - first)
            at += end - first
        batch = replace(
            self,
            chunks=[chunk for chunk in self.chunks if is_kept(chunk.seq)],
            sampling=[self.sampling[i] for i in kept],
            sampling_rows=self.sampling_rows[kept],
            output_positions=self.output_positions[kept],
            prompt_ranges=[each for each in self.prompt_ranges if is_kept(each[0])],
        )
        return batch, np.array(rows, np.int64)


class InputBatch:
    """Tables (row, position) -> token id and (row, index) -> block id; a row is taken at admission."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        num_rows, block_tokens = limits.max_num_seqs, limits.block_tokens
        # np.zeros maps pages on first touch: rows and positions that are never used cost no memory.
        self._tokens = np.zeros((num_rows, limits.max_model_len + 1), np.int64)
        self._blocks = np.zeros((num_rows, -(-limits.max_model_len // block_tokens) + 1), np.int32)
        self._num_blocks = [0] * num_rows
        self._free_rows = list(range(num_rows))[::-1]
        self.num_released = 0  # rows taken back

    def admit(self, seq: Sequence) -> int:
        """Give `seq` a row and return it."""
        seq.row = self._free_rows.pop()
        self._tokens[seq.row, : len(seq.token_ids)] = seq.token_ids
        self._num_blocks[seq.row] = 0
        return seq.row

    def release(self, seq: Sequence) -> None:
        """Take the row of `seq` back, if it has one."""
        if seq.row >= 0:
            self._free_rows.append(seq.row)
            seq.row = -1
            seq.generation += 1
            self.num_released += 1

    def current(self, batch: ScheduledBatch) -> list[ScheduledChunk]:
        """Return the chunks of `batch` whose sequences have kept their rows since it was built."""
        if batch.num_released == self.num_released:
            return batch.chunks
        return [chunk for chunk in batch.chunks if chunk.is_current]

    def reread_blocks(self, seq: Sequence) -> None:
        """Copy all blocks of `seq` into the table again at the next step, since they were renumbered."""
        self._num_blocks[seq.row] = 0

    def append(self, rows: Ints, lengths: Ints, token_ids: Ints) -> None:
        """Write `token_ids[i]` behind the first `lengths[i]` tokens of `rows[i]`."""
        self._tokens[rows, lengths] = token_ids

    def build(self, scheduled: SchedulerOutput) -> ScheduledBatch:
        """Make the input of the scheduled step."""
        chunks = scheduled.chunks
        for chunk in chunks:
            self._update_blocks(chunk.seq)
            chunk.generation = chunk.seq.generation
        if all(_is_plain_decode(chunk) for chunk in chunks):
            return self._build_decodes(chunks)
        num_seqs = len(chunks)
        rows = np.fromiter((chunk.seq.row for chunk in chunks), np.int64, num_seqs)
        starts = np.fromiter((chunk.seq.num_computed_tokens for chunk in chunks), np.int64, num_seqs)
        q_lens = np.fromiter((chunk.num_tokens for chunk in chunks), np.int64, num_seqs)
        ends = q_lens.cumsum()
        token_rows = rows.repeat(q_lens)
        positions = np.arange(scheduled.num_tokens) + (starts - ends + q_lens).repeat(q_lens)
        sampling_at = np.fromiter((i for i, chunk in enumerate(chunks) if chunk.samples), np.int64)
        sampling = [chunks[i] for i in sampling_at.tolist()]
        prompt_ranges, prompt_rows = self._prompt_logprob_rows(chunks, ends)
        context_lens = starts + q_lens
        width = -(-int(context_lens.max(initial=0)) // self.limits.block_tokens)
        return ScheduledBatch(
            chunks=chunks,
            input=ModelInput(
                token_ids=self._tokens[token_rows, positions],
                q_lens=q_lens,
                context_lens=context_lens,
                blocks=self._blocks[rows, :width],
                logit_rows=np.concatenate([ends[sampling_at] - 1, *prompt_rows]),
                rope_rows=self._rope_rows(chunks),
            ),
            sampling=sampling,
            sampling_rows=rows[sampling_at],
            output_positions=np.fromiter(
                (chunk.seq.num_output for chunk in sampling), np.int64, len(sampling)
            ),
            prompt_ranges=prompt_ranges,
            num_released=self.num_released,
            embeds=any(chunk.seq.request.embeds for chunk in sampling),
        )

    def _build_decodes(self, chunks: list[ScheduledChunk]) -> ScheduledBatch:
        """Do what `build` does for a step that only decodes, with a third of the operations."""
        num_seqs = len(chunks)
        rows = np.array([chunk.seq.row for chunk in chunks], np.int64)
        lengths = [len(chunk.seq.token_ids) for chunk in chunks]
        return ScheduledBatch(
            chunks=chunks,
            input=ModelInput(
                token_ids=np.array([chunk.seq.token_ids[-1] for chunk in chunks], np.int64),
                q_lens=np.ones(num_seqs, np.int64),
                context_lens=np.array(lengths, np.int64),
                blocks=self._blocks[rows, : -(-max(lengths) // self.limits.block_tokens)],
                logit_rows=np.arange(num_seqs),
                rope_rows=self._rope_rows(chunks),
            ),
            sampling=chunks,
            sampling_rows=rows,
            output_positions=np.array([chunk.seq.num_output for chunk in chunks], np.int64),
            prompt_ranges=[],
            num_released=self.num_released,
        )

    def build_next(self, before: ScheduledBatch, kept: list[int]) -> ScheduledBatch:
        """Make the input of the decode that follows another one, for these of its chunks, by its own tokens.

        The host does not know them. Every sequence has the block of its next token.
        """
        chunks = [ScheduledChunk(seq := before.chunks[i].seq, 1, seq.generation) for i in kept]
        for chunk in chunks:
            self._update_blocks(chunk.seq)
        given, at = before.input, np.array(kept, np.int64)
        rows, context_lens = before.sampling_rows[at], given.context_lens[at] + 1
        return ScheduledBatch(
            chunks=chunks,
            input=ModelInput(
                token_ids=np.zeros(len(kept), np.int64),
                q_lens=np.ones(len(kept), np.int64),
                context_lens=context_lens,
                blocks=self._blocks[rows, : -(-int(context_lens.max()) // self.limits.block_tokens)],
                logit_rows=np.arange(len(kept)),
                rope_rows=given.rope_rows[at],
            ),
            sampling=chunks,
            sampling_rows=rows,
            output_positions=before.output_positions[at] + 1,
            prompt_ranges=[],
            num_released=self.num_released,
            follows=at,
        )

    def _rope_rows(self, chunks: list[ScheduledChunk]) -> Ints:
        if not self.limits.short_context:
            return np.zeros(len(chunks), np.int64)
        short = self.limits.short_rope_row
        return np.array([0 if chunk.seq.is_long else short for chunk in chunks], np.int64)

    def _update_blocks(self, seq: Sequence) -> None:
        known = self._num_blocks[seq.row]
        if known != len(seq.block_ids):
            self._blocks[seq.row, known : len(seq.block_ids)] = seq.block_ids[known:]
            self._num_blocks[seq.row] = len(seq.block_ids)

    def _prompt_logprob_rows(
        self, chunks: list[ScheduledChunk], ends: Ints
    ) -> tuple[list[tuple[Sequence, int, int]], list[Ints]]:
        """Find the rows for prompt log-probabilities not collected yet; logits at p are about token p + 1."""
        ranges, rows = [], []
        for chunk, chunk_end in zip(chunks, ends.tolist(), strict=True):
            seq = chunk.seq
            if seq.wants_prompt_logits:
                first = max(seq.num_computed_tokens, seq.num_prompt_scored - 1)
                end = min(seq.num_computed_tokens + chunk.num_tokens, seq.num_prompt - 1)
                if first < end:
                    chunk_begin = chunk_end - chunk.num_tokens - seq.num_computed_tokens
                    ranges.append((seq, first, end))
                    rows.append(np.arange(chunk_begin + first, chunk_begin + end))
        return ranges, rows


def _is_plain_decode(chunk: ScheduledChunk) -> bool:
    seq = chunk.seq
    is_one = chunk.num_tokens == 1 == seq.num_uncomputed_tokens
    return is_one and not seq.wants_prompt_logits and not seq.request.embeds


def merge_inputs(inputs: Seq[ModelInput]) -> ModelInput:
    """Return one input with the chunks of all of them, in this order."""
    if len(inputs) == 1:
        return inputs[0]
    width = max((each.blocks.shape[1] for each in inputs), default=0)
    starts = np.cumsum([0, *(each.num_tokens for each in inputs)])
    return ModelInput(
        token_ids=np.concatenate([each.token_ids for each in inputs]),
        q_lens=np.concatenate([each.q_lens for each in inputs]),
        context_lens=np.concatenate([each.context_lens for each in inputs]),
        blocks=np.concatenate(
            [np.pad(each.blocks, ((0, 0), (0, width - each.blocks.shape[1]))) for each in inputs]
        ),
        logit_rows=np.concatenate(
            [each.logit_rows + start for each, start in zip(inputs, starts, strict=False)]
        ),
        rope_rows=np.concatenate([each.rope_rows for each in inputs]),
    )


def empty_input() -> ModelInput:
    """Return the input of a step without chunks."""
    none = np.empty(0, np.int64)
    return ModelInput(none, none, none, np.empty((0, 0), np.int32), none, none)


def attention_plan(given: ModelInput, block_tokens: int, device: torch.device) -> AttentionPlan:
    """Make the tensors that every layer's attention reads."""
    positions, slots = token_places(given, block_tokens)
    cu_seqlens_q = np.zeros(len(given.q_lens) + 1, np.int32)
    cu_seqlens_q[1:] = given.q_lens.cumsum()
    return AttentionPlan(
        cu_seqlens_q=to_tensor(cu_seqlens_q, device),
        context_lens=to_tensor(given.context_lens.astype(np.int32), device),
        block_table=to_tensor(given.blocks, device),
        slot_mapping=to_tensor(slots, device),
        positions=to_tensor(positions, device),
        max_q_len=int(given.q_lens.max(initial=0)),
        max_context_len=int(given.context_lens.max(initial=0)),
    )


def token_places(given: ModelInput, block_tokens: int) -> tuple[Ints, Ints]:
    """Return the row of each token in the rotary tables, and its slot in the KV cache, int64 [T]."""
    num_seqs = len(given.q_lens)
    if num_seqs == given.num_tokens:
        positions, of_token = given.context_lens - 1, np.arange(num_seqs)
    else:
        before = given.context_lens - given.q_lens.cumsum()
        positions = np.arange(given.num_tokens) + before.repeat(given.q_lens)
        of_token = np.arange(num_seqs).repeat(given.q_lens)
    slots = given.blocks[of_token, positions // block_tokens] * np.int64(block_tokens)
    return positions + given.rope_rows[of_token], slots + positions % block_tokens


def to_tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy `array` to the device; on a CPU the tensor shares its memory."""
    return torch.from_numpy(array).to(device, non_blocking=True)

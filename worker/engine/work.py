"""What a planner asks of a step, as plain numbers: run here, sent to other ranks, or merged with theirs.

Letters as in `kernels`: T tokens of S chunks; W blocks of the longest context; R rows whose logits are asked
for. Pure index arithmetic over whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kernels.plan import AttentionPlan

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """Chunks of sequences, one after the other."""

    token_ids: Ints  # [T]
    q_lens: Ints  # [S] new tokens of each chunk
    context_lens: Ints  # [S] with them
    blocks: npt.NDArray[np.int32]  # [S, W]; behind a context anything may stand
    logit_rows: Ints  # [R] of 0..T-1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def renumbered(self, times: int, plus: int) -> Work:
        """The same with other block numbers: b is times * b + plus."""
        return replace(self, blocks=self.blocks * times + plus)


def merge(works: Sequence[Work]) -> Work:
    """One batch of all of them, in this order."""
    if len(works) == 1:
        return works[0]
    width = max((work.blocks.shape[1] for work in works), default=0)
    starts = np.cumsum([0, *(work.num_tokens for work in works)])
    return Work(
        token_ids=np.concatenate([work.token_ids for work in works]),
        q_lens=np.concatenate([work.q_lens for work in works]),
        context_lens=np.concatenate([work.context_lens for work in works]),
        blocks=np.concatenate(
            [np.pad(work.blocks, ((0, 0), (0, width - work.blocks.shape[1]))) for work in works]
        ),
        logit_rows=np.concatenate(
            [work.logit_rows + start for work, start in zip(works, starts, strict=False)]
        ),
    )


def no_work() -> Work:
    """Of a planner that has nothing to run."""
    none = np.empty(0, np.int64)
    return Work(none, none, none, np.empty((0, 0), np.int32), none)


def attention_plan(work: Work, block_tokens: int, device: torch.device) -> AttentionPlan:
    """The tensors that every layer's attention reads."""
    ends = work.q_lens.cumsum()
    positions = np.arange(work.num_tokens) + (work.context_lens - ends).repeat(work.q_lens)
    of_token = np.arange(len(work.q_lens)).repeat(work.q_lens)
    slots = work.blocks[of_token, positions // block_tokens] * np.int64(block_tokens)
    cu_seqlens_q = np.zeros(len(work.q_lens) + 1, np.int32)
    cu_seqlens_q[1:] = ends
    return AttentionPlan(
        cu_seqlens_q=to_tensor(cu_seqlens_q, device),
        context_lens=to_tensor(work.context_lens.astype(np.int32), device),
        block_table=to_tensor(work.blocks, device),
        slot_mapping=to_tensor(slots + positions % block_tokens, device),
        positions=to_tensor(positions, device),
        max_q_len=int(work.q_lens.max(initial=0)),
        max_context_len=int(work.context_lens.max(initial=0)),
    )


def to_tensor(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)

"""The input of attention for one engine step. Built once per step, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class AttentionPlan:
    """The layout of a step: S sequences with T new tokens in total; tensors are on the model's device.

    ==============  ====================  ==============================================================
    field           shape                 meaning
    ==============  ====================  ==============================================================
    cu_seqlens_q    int32 [S + 1]         tokens [cu[s], cu[s + 1]) of the step belong to sequence s
    context_lens    int32 [S]             KV length of sequence s, this step's tokens included
    block_table     int32 [S, max_blocks] block_table[s, j] holds tokens [j * bt, (j + 1) * bt) of s; the
                                          entries past the context are never read
    slot_mapping    int64 [T]             block_id * block_tokens + offset of each new token; -1: not stored
    positions       int64 [T]             row of each new token in the rotary table: its position in its
                                          sequence, and behind these rows for a short one (longrope)
    ==============  ====================  ==============================================================

    A sequence with one new token is a decode, one with more a prefill chunk, in any order.
    The queries of s are the last cu[s + 1] - cu[s] tokens of its context.
    """

    cu_seqlens_q: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    max_q_len: int
    max_context_len: int
    # Values that a backend derives from the plan for all layers of the step (its work list), by its own key.
    derived: dict[object, object] = field(default_factory=dict, repr=False, compare=False)

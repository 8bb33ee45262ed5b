"""Steps that decode a few sequences, on a CPU, as recorded programs: one launch instead of a hundred.

A program computes with addresses, so a recorded step has its own memory for all that changes from step to
step: the tokens' residual and the tensors of the plan. It is recorded again when a layer or the KV cache
has been replaced. A step that cannot be recorded, since some product of it is torch's, runs call by call, and
gives the same bits.
"""

from __future__ import annotations

import ctypes
import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels import AttentionPlan
from kernels.registry import backend_of

log = logging.getLogger(__name__)

MOST_TOKENS = 16
NARROWEST_TABLE = 16  # blocks; a wider plan is recorded with twice the room

# Runs all layers and the head: residual [T, H], plan -> logits [T, vocab].
Forward = Callable[[torch.Tensor, AttentionPlan], torch.Tensor]


@dataclass(slots=True)
class Parts:
    """The tensors that a recording reads beside its own memory; it is void when one of them is replaced."""

    halves: Sequence[object]  # halves of the layers; kept, so that their ids stay unique
    caches: Sequence[torch.Tensor]

    def are(self, others: Parts) -> bool:
        """Return True if all layers are the same and all caches are the same memory and dtype."""
        return (
            len(self.halves) == len(others.halves)
            and all(map(operator.is_, self.halves, others.halves))
            and (
                all(map(operator.is_, self.caches, others.caches))
                or _addresses(self.caches) == _addresses(others.caches)
            )
        )


def _addresses(caches: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(cache.data_ptr(), cache.dtype) for cache in caches]


@dataclass(slots=True)
class _Step:
    """A recorded step of T tokens: its memory and its program, or None if it cannot be recorded."""

    parts: Parts
    residual: torch.Tensor
    plan: AttentionPlan
    program: object


class RecordedSteps:
    """The recorded steps of one model, by number of tokens."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def run(
        self,
        embedding: torch.Tensor,
        token_ids: torch.Tensor,
        plan: AttentionPlan,
        logit_rows: torch.Tensor,
        parts: Parts,
        forward: Forward,
        scale: Callable[[torch.Tensor], object] = lambda residual: None,
    ) -> torch.Tensor | None:
        """Return the logits [T, vocab] of a step; None if it must run call by call.

        scale: called with the tokens' embeddings, to change them in place.
        """
        tokens = token_ids.shape[0]
        if not self._is_fit(plan, tokens, logit_rows) or backend_of(embedding) != "cpu":
            return None
        step = self._steps.get(tokens)
        if (
            step is None
            or not step.parts.are(parts)
            or step.plan.block_table.shape[1] < plan.block_table.shape[1]
        ):
            step = self._steps[tokens] = _record(embedding, plan, parts, forward)
        if step.program is None:
            return None
        return _run(step, embedding, token_ids, plan, scale)

    def _is_fit(self, plan: AttentionPlan, tokens: int, logit_rows: torch.Tensor) -> bool:
        """Return True if each of a few sequences has one token and wants its logits."""
        return (
            0 < tokens <= MOST_TOKENS
            and plan.max_q_len == 1
            and plan.context_lens.shape[0] == tokens == logit_rows.shape[0]
            and (tokens == 1 or logit_rows.tolist() == list(range(tokens)))
        )


def _record(embedding: torch.Tensor, plan: AttentionPlan, parts: Parts, forward: Forward) -> _Step:
    from kernels.cpu.program import KernelProgram, NotRecordable

    tokens = plan.positions.shape[0]
    width = max(NARROWEST_TABLE, 2 * plan.block_table.shape[1])
    own = AttentionPlan(
        plan.cu_seqlens_q.clone(),
        plan.context_lens.clone(),
        torch.zeros(tokens, width, dtype=torch.int32),
        plan.slot_mapping.clone(),
        plan.positions.clone(),
        plan.max_q_len,
        plan.max_context_len,
    )
    residual = embedding.new_empty(tokens, embedding.shape[1])
    program: KernelProgram | None = None
    try:
        program = KernelProgram(lambda: forward(residual, own))
    except NotRecordable as reason:
        log.info("steps of %d tokens run call by call: %s is not a kernel of ours", tokens, reason)
    return _Step(parts, residual, own, program)


def _run(
    step: _Step,
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    plan: AttentionPlan,
    scale: Callable[[torch.Tensor], object],
) -> torch.Tensor:
    from kernels.cpu.attention import rework
    from kernels.cpu.program import KernelProgram

    assert isinstance(step.program, KernelProgram)
    own = step.plan
    _copy_rows(step.residual, embedding, token_ids.tolist())
    scale(step.residual)
    _write(own.context_lens, plan.context_lens)
    _write(own.slot_mapping, plan.slot_mapping)
    _write(own.positions, plan.positions)
    _write_rows(own.block_table, plan.block_table)
    if token_ids.shape[0] > 1:  # the only work item of one sequence is always the same
        rework(own, plan)
    return step.program.run()


def _copy_rows(target: torch.Tensor, source: torch.Tensor, rows: list[int]) -> None:
    """Copy these rows of `source`, one after the other, to the contiguous `target`."""
    to, nbytes = target.data_ptr(), target.shape[1] * target.element_size()
    of, step = source.data_ptr(), source.stride(0) * source.element_size()
    for i, row in enumerate(rows):
        ctypes.memmove(to + i * nbytes, of + row * step, nbytes)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy contiguous tensors of one size and dtype; for some bytes torch takes ten times as long."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def _write_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy contiguous rows to the beginnings of wider ones."""
    nbytes = source.shape[1] * source.element_size()
    to, to_row = target.data_ptr(), target.stride(0) * target.element_size()
    of, of_row = source.data_ptr(), source.stride(0) * source.element_size()
    for row in range(source.shape[0]):
        ctypes.memmove(to + row * to_row, of + row * of_row, nbytes)

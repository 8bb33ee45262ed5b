"""Checkpoints whose experts are in MXFP4 (OCP Microscaling Formats 1.0), as GPT-OSS is released.

Of a stack of experts with N outputs and K inputs there are, in place of its dense tensor `{name}` [E, K, N]:

=============  ====================  ========================================================================
tensor         dtype and shape       meaning
=============  ====================  ========================================================================
{name}_blocks  uint8 [E, N, K / 32,  two codes a byte, the lower four bits first; a code is a float of four
               16]                   bits (E2M1), an index in `VALUES`
{name}_scales  uint8 [E, N, K / 32]  exponent e of a block of 32 inputs: its values are times 2^(e - 127)
=============  ====================  ========================================================================

The experts become dense once, when they are loaded. A worker then swaps them to fewer bits as it does others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from bus.families import TensorNames
from worker.model.config import ModelConfig, ModelError
from worker.model.layout import CheckpointTensor, ModelPlan
from worker.model.ready_format import MXFP4_BLOCK as BLOCK
from worker.model.sources import CheckpointWeights, pieces, write_rows

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # by the code; the fourth bit is the sign
_BIAS, _NAN = 127, 255
_MIB = 1024 * 1024


class Mxfp4Checkpoint(CheckpointWeights):
    """A checkpoint whose stacks of experts are in MXFP4, and all else is not. Raises as its base does."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.folder)
        self._names = config.names

    def check(self, sources: Iterable[CheckpointTensor]) -> None:
        plain = []
        packed: dict[str, tuple[int, ...]] = {}  # each stack once, for all its experts
        for source in sources:
            if is_packed(source, self._names):
                packed |= stored_shapes(source)
            else:
                plain.append(source)
        for tensor, shape in packed.items():
            self.check_stored(tensor, shape, ("U8",))
        super().check(plain)

    def _unknown_tensors(self, wanted: set[str]) -> list[str]:
        stacks = (self._names.experts_gate_up, self._names.experts_down)
        stored = tuple(f".{stack}_{ending}" for stack in stacks for ending in ("blocks", "scales"))
        return [tensor for tensor in super()._unknown_tensors(wanted) if not tensor.endswith(stored)]

    def stored(self, source: CheckpointTensor) -> Iterator[tuple[str, int]]:
        if not is_packed(source, self._names):
            yield from super().stored(source)
            return
        for tensor, shape in stored_shapes(source).items():
            yield tensor, shape[0]

    def fill(
        self,
        targets: Sequence[torch.Tensor],
        source: CheckpointTensor,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        if not is_packed(source, self._names):
            super().fill(targets, source, pause)
            return
        blocks_name, scales_name = stored_shapes(source)
        expert, outputs = source.expert, source.columns or range(source.shape[2])
        assert expert is not None and source.is_transposed
        with self.opened(blocks_name) as blocks, self.opened(scales_name) as scales:
            for rows in pieces((len(outputs), source.shape[1])):
                taken = outputs[rows]
                span = slice(taken[0], taken[-1] + 1)
                codes, exponents = (
                    stored[expert : expert + 1, span][0][:: taken.step] for stored in (blocks, scales)
                )
                if (exponents == _NAN).any():
                    raise ModelError(
                        f"{self.folder}: {scales_name} has a scale of {_NAN}, which is no number, in expert"
                        f" {expert}; the file is damaged"
                    )
                write_rows(targets, rows, dequantize(codes, exponents))
                pause()


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 [N, K] of blocks uint8 [N, K / 32, 16] and scales uint8 [N, K / 32]."""
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(2)
    values = torch.tensor(VALUES, dtype=torch.float32)[codes.long()]
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(1)


def is_packed(source: CheckpointTensor, names: TensorNames) -> bool:
    """Return True for a tensor that stacks the matrices of experts, False for their biases and others."""
    return source.expert is not None and source.tensor.endswith(
        (f".{names.experts_gate_up}", f".{names.experts_down}")
    )


def stored_shapes(source: CheckpointTensor) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the two tensors, blocks and scales, that a stack [E, K, N] is stored as."""
    experts, inputs, outputs = source.shape
    scales = (experts, outputs, inputs // BLOCK)
    return {f"{source.tensor}_blocks": (*scales, BLOCK // 2), f"{source.tensor}_scales": scales}


def memory_notice(config: ModelConfig, plan: ModelPlan) -> str:
    """Return what it costs that the experts become dense, for the log."""
    sources = [source for part in plan.ranges() for source in part.sources]
    elements = sum(source.numel for source in sources if is_packed(source, config.names))
    packed, dense = elements // 2 + elements // BLOCK, elements * plan.dtype.itemsize
    dtype = str(plan.dtype).removeprefix("torch.")
    return (
        f"its experts are in MXFP4 ({packed / _MIB:.0f} MiB) and served in {dtype} ({dense / _MIB:.0f} MiB);"
        " swapped to int4 they take about as much as in the checkpoint"
    )

"""Decode steps of one device alone as recordings: one copy to the device, one launch for a half of a layer.

A recording is for a number of sequences, so a step takes the next larger of a few numbers, and its last rows
are empty: their slot is -1 and their context 0. Steps that also prefill, or that do not want exactly one row
of logits for each sequence, run call by call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch

from worker.engine.input_batch import Ints, ModelInput
from worker.engine.sequence import Limits
from worker.model.layer import Layer
from worker.model.step_parts import (
    CudaGraphs,
    Part,
    RecordedParts,
    Recorder,
    Run,
    StepMemory,
    input_arrays,
    input_bytes,
    same,
)

log = logging.getLogger(__name__)

SIZES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
RECORD_S: Final = 60.0  # then the sizes that are left are recorded by the first steps that need them
LEAST_FREE_BYTES: Final = 512 << 20  # of the device: with less nothing more is recorded
PAUSE_S: Final = 0.02  # work between two steps of other models
MIB: Final = 1 << 20
_EMPTY: Final = {"token_ids": 0, "follows": -1, "positions": 0, "slot_mapping": -1, "context_lens": 0}


class DecodableModel(Protocol):
    """The part of `worker.model.Model` that recorded decodes need."""

    @property
    def layers(self) -> list[Layer]: ...

    def step_memory(self, num_seqs: int, table_width: int, max_context_len: int) -> StepMemory: ...

    def step_parts(self, memory: StepMemory, kv: Any) -> Iterator[Part]: ...


def sizes_up_to(max_num_seqs: int) -> list[int]:
    """Return the numbers of sequences that steps are recorded for; the last one is the most there can be."""
    most = min(max_num_seqs, SIZES[-1])
    return [*(size for size in SIZES if size < most), most]


class Staging:
    """Host memory from which a step's input goes to the device in one copy, while the host goes on.

    On a GPU it is pinned, and there are two of it in turn: one is written while the other may be in use.
    """

    def __init__(self, num_seqs: int, table_width: int, device: torch.device) -> None:
        self._width, self._is_cuda = table_width, device.type == "cuda"
        nbytes = input_bytes(num_seqs, table_width)
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if self._is_cuda else []
        self._arrays: dict[tuple[int, int], dict[str, Any]] = {}
        self._turn = 0

    def take(self, num_seqs: int) -> dict[str, Any]:
        """Return the arrays of the next input, to be written (`worker.model.step_parts.input_layout`)."""
        self._turn = 1 - self._turn
        if self._is_cuda and not self._copied[self._turn].query():
            self._copied[self._turn].synchronize()
        key = num_seqs, self._turn
        if key not in self._arrays:
            views = input_arrays(self._buffers[self._turn], num_seqs, self._width)
            self._arrays[key] = {name: one.numpy() for name, one in views.items()}
        return self._arrays[key]

    def send(self, target: torch.Tensor) -> None:
        """Copy what was written to the device's uint8 [n]."""
        target.copy_(self._buffers[self._turn][: len(target)], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()


@dataclass(slots=True)
class _Decode:
    """The steps of one size: their memory, and what to call for the layers and caches as they were."""

    memory: StepMemory
    halves: Sequence[object] = ()
    caches: Sequence[torch.Tensor] = ()
    parts: list[Part] = field(default_factory=list)
    calls: list[Run | None] = field(default_factory=list)  # None: not recorded yet


class RecordedDecodes:
    """The recorded decode steps of one model."""

    def __init__(
        self, model: DecodableModel, kv: Any, limits: Limits, device: torch.device, record: Recorder
    ) -> None:
        """Take memory for steps of up to `limits.max_num_seqs` sequences; `record` nothing yet."""
        self.num_steps = 0  # steps that ran here
        self.record_s, self.record_bytes = 0.0, 0  # what `record` took
        self._model, self._kv, self._device = model, kv, device
        self._block_tokens = limits.block_tokens
        self._width = -(-limits.max_model_len // limits.block_tokens)
        self._sizes = sizes_up_to(limits.max_num_seqs)
        self._memory = model.step_memory(self._sizes[-1], self._width, limits.max_model_len)
        self._staging = Staging(self._sizes[-1], self._width, device)
        self._steps = {size: _Decode(self._memory.of(size)) for size in self._sizes}
        self._parts = RecordedParts(record)

    @property
    def num_recorded(self) -> int:
        return self._parts.num_recorded

    def run(self, given: ModelInput, follows: Ints | None = None) -> torch.Tensor | None:
        """Run a step to its logits, float32 [R, vocab]; None: it must run call by call.

        follows: rows of `sampled`, whose tokens are those of this step; None: those given. The next step
        writes to the same memory.
        """
        num_seqs = given.num_tokens
        if not self._is_fit(given, num_seqs):
            return None
        size = next(size for size in self._sizes if size >= num_seqs)
        for _ in self._run(size, given, follows):
            pass
        self.num_steps += 1
        return self._steps[size].memory.logits[:num_seqs]

    def sampled(self, num_seqs: int) -> torch.Tensor:
        """Return where a step's tokens belong, int64 [R], from which the step that follows may take them."""
        return self._memory.sampled[:num_seqs]

    def record(self) -> Iterator[None]:
        """Record all sizes, the largest first, on empty rows, and yield after each step of the work.

        It ends early for lack of time or memory.
        """
        began, free, due = time.monotonic(), self._free_bytes(), 0.0
        for done, size in enumerate(reversed(self._sizes)):
            for _ in self._run(size, _nothing(self._width)):
                if time.monotonic() > due:  # the steps of other models wait
                    yield
                    due = time.monotonic() + PAUSE_S
            self.record_s, self.record_bytes = time.monotonic() - began, free - self._free_bytes()
            if self._free_bytes() < LEAST_FREE_BYTES:
                self._parts.stop()
                log.warning(
                    "decode steps of fewer than %d sequences run call by call: the device has %d MiB free;"
                    " lower worker.memory_mb",
                    size,
                    self._free_bytes() // MIB,
                )
                return
            if self.record_s > RECORD_S or not self._parts.may_record:
                break
            log.debug("recorded decode steps of %d sequences, %d of %d", size, done + 1, len(self._sizes))
        log.info(
            "recorded %d parts of decode steps of up to %d sequences in %.1f s and %d MiB",
            self.num_recorded,
            self._sizes[-1],
            self.record_s,
            self.record_bytes // MIB,
        )

    def _is_fit(self, given: ModelInput, num_seqs: int) -> bool:
        """Return True if each of some sequences has one token and wants its logits."""
        return (
            0 < num_seqs <= self._sizes[-1]
            and len(given.q_lens) == num_seqs == len(given.logit_rows)
            and given.blocks.shape[1] <= self._width
            and bool((given.logit_rows == np.arange(num_seqs)).all())
        )

    def _run(self, size: int, given: ModelInput, follows: Ints | None = None) -> Iterator[None]:
        """Run a step, and yield after each part that had no recording."""
        step = self._steps[size]
        self._write(step.memory, size, given, follows)
        self._look(size, step)
        for i, call in enumerate(step.calls):
            if call:
                call()
            else:
                step.calls[i] = self._parts.first(size, step.parts[i])
                yield

    def _look(self, size: int, step: _Decode) -> None:
        """Find what to call if a half or a cache has been replaced; what reads none of these stays."""
        halves = [half for layer in self._model.layers for half in (layer.attention, layer.feed_forward)]
        caches = self._kv.layers
        if same(halves, step.halves) and same(caches, step.caches):
            return
        parts = list(self._model.step_parts(step.memory, self._kv))
        known = {part.name: (part.reads, call) for part, call in zip(step.parts, step.calls, strict=True)}
        calls = []
        for part in parts:
            reads, call = known.get(part.name, ((None,), None))
            calls.append(call if same(reads, part.reads) else self._parts.find(size, part))
        step.halves, step.caches, step.parts, step.calls = halves, caches, parts, calls

    def _write(self, memory: StepMemory, size: int, given: ModelInput, follows: Ints | None) -> None:
        """Write a step's input, as `worker.engine.input_batch.attention_plan` makes it, and empty rows."""
        num_seqs, block_tokens = given.num_tokens, self._block_tokens
        arrays = self._staging.take(size)
        for name, empty in _EMPTY.items():
            arrays[name][num_seqs:] = empty
        positions = given.context_lens - 1
        blocks = given.blocks[np.arange(num_seqs), positions // block_tokens]
        arrays["token_ids"][:num_seqs] = given.token_ids
        arrays["follows"][:num_seqs] = -1 if follows is None else follows
        arrays["positions"][:num_seqs] = positions + given.rope_rows
        arrays["slot_mapping"][:num_seqs] = blocks * np.int64(block_tokens) + positions % block_tokens
        arrays["context_lens"][:num_seqs] = given.context_lens
        # What lies behind a context is never read, so older entries may stay.
        arrays["block_table"][:num_seqs, : given.blocks.shape[1]] = given.blocks
        memory.plan.derived.clear()
        self._staging.send(memory.inputs)

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else LEAST_FREE_BYTES


def _nothing(width: int) -> ModelInput:
    """Return the input of a step without sequences."""
    none: Ints = np.empty(0, np.int64)
    return ModelInput(none, none, none, np.empty((0, width), np.int32), none, none)


def recorded_decodes(
    model: DecodableModel, kv: Any, limits: Limits, device: torch.device
) -> RecordedDecodes | None:
    """Return the recorded decodes of a device that has graphs; None if limits or memory say no."""
    if device.type != "cuda" or limits.cuda_graphs == "off":
        return None
    try:
        return RecordedDecodes(model, kv, limits, device, CudaGraphs(device))
    except torch.OutOfMemoryError as error:
        log.warning("decode steps run call by call: %s; lower worker.memory_mb", error)
        return None

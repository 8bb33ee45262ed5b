"""Short steps of one device alone as recordings: one copy to the device, one launch for a half of a layer.

A recording is for a number of tokens, so a step takes the next larger of a few numbers, and its last rows are
empty. There are sizes for steps in which every sequence decodes, and others for steps with chunks of prompts,
up to a number of tokens that keeps the device busy for longer than launching takes. Longer steps run call by
call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import numpy as np
import torch

from worker.engine.input_batch import Ints, ModelInput, token_places
from worker.engine.sequence import Limits
from worker.model.cuda_graphs import CudaGraphs
from worker.model.layer import Layer
from worker.model.step_parts import (
    Joiner,
    Part,
    RecordedParts,
    Recorder,
    Run,
    StepMemory,
    StepSize,
    same,
)

log = logging.getLogger(__name__)

DECODES: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # sequences
CHUNKS: Final = (16, 32, 64, 128, 192, 256, 384, 512)  # tokens of steps with prompts
RECORD_S: Final = 60.0  # then the sizes that are left are recorded by the first steps that need them
LEAST_FREE_BYTES: Final = 512 << 20  # of the device: with less nothing more is recorded
# Steps of one size since the model last changed, after which their recordings are joined to one. That takes
# the host some milliseconds, behind the launch of a step, and is void with the next swap.
STEADY: Final = 64
MOST_JOINED: Final = 8  # sizes at once
LOOK_AT_MEMORY: Final = 32  # recordings between two looks at the free memory
PAUSE_S: Final = 0.02  # work between two steps of other models
MIB: Final = 1 << 20
_EMPTY: Final = {"token_ids": 0, "follows": -1, "positions": 0, "slot_mapping": -1}  # token


class PartedModel(Protocol):
    """The part of `worker.model.Model` that recorded steps need."""

    @property
    def layers(self) -> list[Layer]: ...

    def step_memory(
        self, sizes: Sequence[StepSize], table_width: int, max_context_len: int
    ) -> dict[StepSize, StepMemory]: ...

    def step_parts(self, memory: StepMemory, kv: Any) -> Iterator[Part]: ...


def sizes_for(limits: Limits) -> list[StepSize]:
    """Return the sizes that steps are recorded for: those of decodes, then those of chunks, by tokens."""
    most = min(limits.max_num_seqs, DECODES[-1])
    decodes = [StepSize.of_decodes(count) for count in (*(one for one in DECODES if one < most), most)]
    chunks, longest = [], min(limits.max_num_batched_tokens, max(CHUNKS, default=0))
    for tokens in (*(one for one in CHUNKS if one < longest), longest):
        # Fewer sequences than tokens, and two at least: attention then takes chunks and decodes.
        if (num_seqs := min(max(2, limits.max_num_seqs), tokens - 1)) > 1:
            chunks.append(StepSize(tokens, num_seqs, min(num_seqs, most)))
    return decodes + chunks


class Staging:
    """Host memory from which a step's input goes to the device in one copy, while the host goes on.

    On a GPU it is pinned, and there are two of it in turn: one is written while the other may be in use.
    """

    def __init__(self, sizes: Sequence[StepSize], table_width: int, device: torch.device) -> None:
        self._width, self._is_cuda = table_width, device.type == "cuda"
        nbytes = max(size.num_bytes(table_width) for size in sizes)
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._buffers] if self._is_cuda else []
        self._arrays: dict[tuple[StepSize, int], dict[str, Any]] = {}
        self._turn = 0

    def take(self, size: StepSize) -> dict[str, Any]:
        """Return the arrays of the next input, to be written (`StepSize.arrays`)."""
        self._turn = 1 - self._turn
        if self._is_cuda and not self._copied[self._turn].query():
            self._copied[self._turn].synchronize()
        key = size, self._turn
        if key not in self._arrays:
            views = size.views(self._buffers[self._turn], self._width)
            self._arrays[key] = {name: one.numpy() for name, one in views.items()}
        return self._arrays[key]

    def send(self, target: torch.Tensor) -> None:
        """Copy what was written to the device's uint8 [n]."""
        target.copy_(self._buffers[self._turn][: len(target)], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()


@dataclass(slots=True)
class _Recorded:
    """The steps of one size: their memory, and what to call for the layers and caches as they were."""

    memory: StepMemory
    halves: Sequence[object] = ()
    caches: Sequence[torch.Tensor] = ()
    parts: list[Part] = field(default_factory=list)
    calls: list[Run | None] = field(default_factory=list)  # None: not recorded yet
    num_steady: int = 0  # steps since a half or a cache was replaced that could have been joined
    whole: Run | None = None  # all calls, joined
    ran_at: int = 0  # number of the last step of this size


class RecordedBatches:
    """The recorded steps of one model."""

    def __init__(
        self,
        model: PartedModel,
        kv: Any,
        limits: Limits,
        device: torch.device,
        record: Recorder,
        join: Joiner | None = None,
    ) -> None:
        """Take memory for steps of all sizes; `record` nothing yet. join: None if that cannot be."""
        self.num_steps = 0  # steps that ran here
        self.record_s, self.record_bytes = 0.0, 0  # what `record` took
        self.num_joined, self.join_s, self.join_bytes = 0, 0.0, 0  # and what joining took
        self.may_join, self.steady_steps = True, STEADY
        self._model, self._kv, self._device = model, kv, device
        self._block_tokens = limits.block_tokens
        self._width = -(-limits.max_model_len // limits.block_tokens)
        sizes = sizes_for(limits)
        self._decodes = [size for size in sizes if size.is_decode]
        self._chunks = [size for size in sizes if not size.is_decode]
        memories = model.step_memory(sizes, self._width, limits.max_model_len)
        self._staging = Staging(sizes, self._width, device)
        self._steps = {size: _Recorded(memory) for size, memory in memories.items()}
        self._parts = RecordedParts(record, join)

    @property
    def num_recorded(self) -> int:
        return self._parts.num_recorded

    @property
    def sizes(self) -> set[StepSize]:
        """The sizes of which something is recorded."""
        return self._parts.sizes

    def recordings(self, num_seqs: int) -> dict[str, Run]:
        """Return what steps of so many decodes call, by the names of parts, as far as it is recorded."""
        step = self._steps[StepSize.of_decodes(num_seqs)]
        return {part.name: call for part, call in zip(step.parts, step.calls, strict=True) if call}

    def run(self, given: ModelInput, follows: Ints | None = None) -> torch.Tensor | None:
        """Run a step to its logits, float32 [R, vocab]; None: it must run call by call.

        follows: rows of `sampled`, whose tokens are those of this step; None: those given. The next step
        writes to the same memory.
        """
        if (size := self._size_for(given)) is None:
            return None
        for _ in self._run(size, given, follows):
            pass
        self.num_steps += 1
        return self._steps[size].memory.logits[: len(given.logit_rows)]

    def sampled(self, num_seqs: int) -> torch.Tensor:
        """Return where a step's tokens belong, int64 [R], from which the step that follows may take them."""
        return next(iter(self._steps.values())).memory.sampled[:num_seqs]

    def record(self) -> Iterator[None]:
        """Record all sizes, the largest first, on empty rows, and yield after each step of the work.

        It ends early for lack of time or memory (`_look_at_memory`).
        """
        began, free, due = time.monotonic(), self._free_bytes(), 0.0
        for size in sorted(self._steps, key=lambda size: -size.num_tokens):
            for _ in self._run(size, _nothing(self._width)):
                if time.monotonic() > due:  # the steps of other models wait
                    yield
                    due = time.monotonic() + PAUSE_S
            self.record_s, self.record_bytes = time.monotonic() - began, free - self._free_bytes()
            if self.record_s > RECORD_S or not self._parts.may_record:
                break
            log.debug("recorded steps of %d tokens of %d sequences", size.num_tokens, size.num_seqs)
        self._check_joined()
        log.info(
            "recorded %d parts of steps of %d sizes in %.1f s and %d MiB",
            self.num_recorded,
            len(self._steps),
            self.record_s,
            self.record_bytes // MIB,
        )

    def _size_for(self, given: ModelInput) -> StepSize | None:
        """Return the smallest size that holds a step; None: there is none."""
        num_tokens, num_seqs, num_rows = given.num_tokens, len(given.q_lens), len(given.logit_rows)
        if not num_tokens or given.blocks.shape[1] > self._width:
            return None
        is_decode = num_tokens == num_seqs == num_rows and (given.logit_rows == np.arange(num_rows)).all()
        for size in self._decodes if is_decode else self._chunks:
            if num_tokens <= size.num_tokens and num_seqs <= size.num_seqs and num_rows <= size.num_rows:
                return size
        return None

    def _run(self, size: StepSize, given: ModelInput, follows: Ints | None = None) -> Iterator[None]:
        """Run a step, and yield after each part that had no recording."""
        step = self._steps[size]
        self._write(step.memory, size, given, follows)
        self._look(size, step)
        step.num_steady, step.ran_at = step.num_steady + self.may_join, self.num_steps
        if step.whole and self.may_join:
            step.whole()
            return
        for i, call in enumerate(step.calls):
            if call:
                call()
            else:
                step.calls[i] = self._parts.first(size, step.parts[i])
                self._look_at_memory()
                yield
        if step.num_steady == self.steady_steps and self.may_join:  # now the device is busy
            self._join(step)

    def _join(self, step: _Recorded) -> None:
        """Join what a step calls, in place of the joined step that has not run for longest."""
        began, free = time.monotonic(), self._free_bytes()
        if free < LEAST_FREE_BYTES or not (whole := self._parts.whole(step.parts, step.calls)):
            return
        joined = [one for one in self._steps.values() if one.whole]
        if len(joined) == MOST_JOINED:
            oldest = min(joined, key=lambda one: one.ran_at)
            oldest.whole, oldest.num_steady = None, 0
        step.whole = whole
        self.num_joined += 1
        self.join_s += time.monotonic() - began
        self.join_bytes += free - self._free_bytes()

    def _check_joined(self) -> None:
        """Join the shortest step, and no more if that fails or gives other logits than its parts do."""
        size = min(self.sizes, key=lambda size: size.num_tokens, default=None)
        if size is None or None in (step := self._steps[size]).calls:
            return
        by_parts = self._logits_of_nothing(size)
        self._join(step)
        if not step.whole:
            return
        try:
            problem = "" if torch.equal(self._logits_of_nothing(size), by_parts) else "they give other logits"
        except Exception as error:  # noqa: BLE001 the parts run without it
            problem = str(error)
        if problem:
            self.may_join = False
            log.error("steps run as recordings of their parts: joined to one, %s", problem)

    def _logits_of_nothing(self, size: StepSize) -> torch.Tensor:
        """Return the bits of what a step without sequences computes."""
        logits = self._steps[size].memory.logits
        logits.zero_()
        for _ in self._run(size, _nothing(self._width)):
            pass
        return logits.view(torch.int32).clone()

    def _look_at_memory(self) -> None:
        """Record nothing more on a device that is nearly full: a recording takes some 150 KiB of it."""
        if self.num_recorded % LOOK_AT_MEMORY or not self._parts.may_record:
            return
        if (free := self._free_bytes()) < LEAST_FREE_BYTES:
            self._parts.stop()
            log.warning(
                "what is not among %d recordings of parts of steps runs call by call: the device has %d MiB"
                " free; lower worker.memory_mb",
                self.num_recorded,
                free // MIB,
            )

    def _look(self, size: StepSize, step: _Recorded) -> None:
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
        step.whole, step.num_steady = None, 0

    def _write(self, memory: StepMemory, size: StepSize, given: ModelInput, follows: Ints | None) -> None:
        """Write a step's input, as `worker.engine.input_batch.attention_plan` makes it, and empty rows."""
        num_tokens, num_seqs = given.num_tokens, len(given.q_lens)
        arrays = self._staging.take(size)
        for name, empty in _EMPTY.items():
            arrays[name][num_tokens:] = empty
        positions, slots = token_places(given, self._block_tokens)
        arrays["token_ids"][:num_tokens] = given.token_ids
        arrays["follows"][:num_tokens] = -1 if follows is None else follows
        arrays["positions"][:num_tokens] = positions
        arrays["slot_mapping"][:num_tokens] = slots
        arrays["context_lens"][:num_seqs] = given.context_lens
        arrays["context_lens"][num_seqs:] = 0
        # What lies behind a context is never read, so older entries may stay.
        arrays["block_table"][:num_seqs, : given.blocks.shape[1]] = given.blocks
        if size.is_decode:  # an empty row is a sequence with a token
            arrays["cu_seqlens_q"][:] = np.arange(size.num_seqs + 1)
        else:
            arrays["cu_seqlens_q"][0] = 0
            arrays["cu_seqlens_q"][1 : num_seqs + 1] = given.q_lens.cumsum()
            arrays["cu_seqlens_q"][num_seqs + 1 :] = num_tokens
            arrays["logit_rows"][: len(given.logit_rows)] = given.logit_rows
            arrays["logit_rows"][len(given.logit_rows) :] = 0
        memory.plan.derived.clear()
        self._staging.send(memory.inputs)

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else LEAST_FREE_BYTES


def _nothing(width: int) -> ModelInput:
    """Return the input of a step without sequences."""
    none: Ints = np.empty(0, np.int64)
    return ModelInput(none, none, none, np.empty((0, width), np.int32), none, none)


def recorded_batches(
    model: PartedModel, kv: Any, limits: Limits, device: torch.device
) -> RecordedBatches | None:
    """Return the recorded steps on a device that has graphs; None if limits or memory say no."""
    if device.type != "cuda" or limits.cuda_graphs == "off":
        return None
    try:
        graphs = CudaGraphs(device)
        return RecordedBatches(model, kv, limits, device, graphs, graphs.join)
    except torch.OutOfMemoryError as error:
        log.warning("all steps run call by call: %s; lower worker.memory_mb", error)
        return None

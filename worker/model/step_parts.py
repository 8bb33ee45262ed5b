"""The parts of a short step, each of which can be recorded by itself and run again in its place.

A step of few tokens on a GPU is some 350 launches, which take the host longer than the GPU. A recording of a
part is one launch. It computes with addresses, so all that changes from step to step lies in memory that
stays (`StepMemory`), and a part is recorded anew when what it reads lies elsewhere: a morph that replaces one
half of a layer leaves the recordings of all others. Variants keep their addresses, so the recording of a half
that comes back is valid again.

Recordings of a step on a CPU are in `worker.model.recorded`: there one program holds the whole step.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import is_

import torch

from kernels import AttentionPlan, QuantizedWeight
from worker.model.experts import Experts
from worker.model.layer import Attention, FeedForward
from worker.model.linear import GroupedLinear, Linear

log = logging.getLogger(__name__)

Run = Callable[[], object]
Recorder = Callable[[Run], Run]  # records what a call does, without doing it; returns what does it
Joiner = Callable[[Sequence[Run]], Run]  # makes one recording of recordings, which stay what they are

MOST_FAILURES = 3  # another thread that waits for the device ends a recording: it may succeed the next time
ALIGNMENT = 256  # bytes; Triton compiles once for addresses that are multiples of 16, and again for others


@dataclass(frozen=True, slots=True)
class StepSize:
    """Steps of up to T tokens of S sequences that want R rows of logits; as many of each: they decode."""

    num_tokens: int
    num_seqs: int
    num_rows: int

    @classmethod
    def of_decodes(cls, num_seqs: int) -> StepSize:
        return cls(num_seqs, num_seqs, num_seqs)

    @property
    def is_decode(self) -> bool:
        """True if each sequence has one token, and the rows of the logits are theirs."""
        return self.num_tokens == self.num_seqs

    def arrays(self, table_width: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each array that the host writes before a step."""
        tokens, seqs = (self.num_tokens,), (self.num_seqs,)
        return {
            "token_ids": (torch.int64, tokens),
            "follows": (torch.int64, tokens),
            "positions": (torch.int64, tokens),
            "slot_mapping": (torch.int64, tokens),
            "logit_rows": (torch.int64, (self.num_rows,)),
            "cu_seqlens_q": (torch.int32, (self.num_seqs + 1,)),
            "context_lens": (torch.int32, seqs),
            "block_table": (torch.int32, (*seqs, table_width)),
        }

    def num_bytes(self, table_width: int) -> int:
        """Return the bytes of these arrays, one after the other."""
        return sum(_aligned(dtype, shape) for dtype, shape in self.arrays(table_width).values())

    def views(self, inputs: torch.Tensor, table_width: int) -> dict[str, torch.Tensor]:
        """Return the arrays, by name, as views of uint8 [n]."""
        found, at = {}, 0
        for name, (dtype, shape) in self.arrays(table_width).items():
            found[name] = inputs[at : at + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)
            at += _aligned(dtype, shape)
        return found


def _aligned(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return -(-int(dtype.itemsize) * math.prod(shape) // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of steps of one size; those of all sizes share it (`make`).

    The host writes `inputs`: token_ids, follows, the plan and logit_rows are views of it. Rows that a step
    does not fill are empty: their slot is -1, their context 0.

    ==========  =================  ==========================================
    field       shape              meaning
    ==========  =================  ==========================================
    inputs      uint8 [n]          what the host writes before each step
    token_ids   int64 [T]          the tokens, where `follows` is -1
    follows     int64 [T]          else the row of `sampled` that has it: the host does not know it yet
    sampled     int64 [most]       the tokens that the last step chose, which stay on the device
    plan                           as ever; max_context_len is the longest possible one, so that launches of
                                   attention do not depend on the step
    logit_rows  int64 [R] or None  the rows whose logits are wanted; None: all
    residual    dtype [T, H]       between two parts
    x           dtype [T, H]       between two parts, normed
    logits      float32 [R, V]     what a step gives
    ==========  =================  ==========================================
    """

    inputs: torch.Tensor
    token_ids: torch.Tensor
    follows: torch.Tensor
    sampled: torch.Tensor
    plan: AttentionPlan
    logit_rows: torch.Tensor | None
    residual: torch.Tensor
    x: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def make(
        cls,
        sizes: Sequence[StepSize],
        table_width: int,
        max_context_len: int,
        embedding: torch.Tensor,
        vocab_size: int,
    ) -> dict[StepSize, StepMemory]:
        """Make the memory of each size, on the device and in the dtype of embedding [vocab, H]."""
        device, hidden = embedding.device, embedding.shape[1]
        nbytes = max(size.num_bytes(table_width) for size in sizes)
        most_tokens, most_rows = max(one.num_tokens for one in sizes), max(one.num_rows for one in sizes)
        inputs = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        sampled = torch.zeros(most_rows, dtype=torch.int64, device=device)
        residual, x = (embedding.new_zeros(most_tokens, hidden) for _ in range(2))
        logits = torch.zeros(most_rows, vocab_size, dtype=torch.float32, device=device)
        made = {}
        for size in sizes:
            arrays = size.views(inputs, table_width)
            tokens, rows = size.num_tokens, size.num_rows
            made[size] = cls(
                inputs[: size.num_bytes(table_width)],
                arrays["token_ids"],
                arrays["follows"],
                sampled,
                AttentionPlan(
                    cu_seqlens_q=arrays["cu_seqlens_q"],
                    context_lens=arrays["context_lens"],
                    block_table=arrays["block_table"],
                    slot_mapping=arrays["slot_mapping"],
                    positions=arrays["positions"],
                    max_q_len=1 if size.is_decode else tokens,
                    max_context_len=max_context_len,
                ),
                None if size.is_decode else arrays["logit_rows"],
                *(residual[:tokens], x[:tokens], logits[:rows]),
            )
        return made

    def tokens(self) -> torch.Tensor:
        """Return the tokens, int64 [T], known to the host or not."""
        known = self.sampled.index_select(0, self.follows.clamp(min=0))
        return torch.where(self.follows < 0, self.token_ids, known)

    def wanted(self) -> torch.Tensor:
        """Return x of the rows whose logits are wanted."""
        return self.x if self.logit_rows is None else self.x.index_select(0, self.logit_rows)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: what it runs, and what that reads beside the step's memory and what never changes.

    kind: of parts that fail alike when they are recorded. can_be_recorded: False if the host must see what
    the device computes.
    """

    name: str
    reads: tuple[object, ...]  # halves, tensors or None
    run: Run
    kind: str = "dense"
    can_be_recorded: bool = True


class RecordedParts:
    """The recordings of a model's parts, kept by what they read. A part without one runs call by call."""

    def __init__(self, record: Recorder, join: Joiner | None = None) -> None:
        self._record, self._join, self._failures = record, join, Counter[str]()
        self._is_stopped = False
        self._recordings: dict[tuple[StepSize, str, Hashable], Run] = {}
        self._kept: list[object] = []  # what recordings read: else its memory could become something else
        self._values: weakref.WeakKeyDictionary[object, Hashable] = weakref.WeakKeyDictionary()

    @property
    def num_recorded(self) -> int:
        return len(self._recordings)

    @property
    def sizes(self) -> set[StepSize]:
        """The sizes of which something is recorded."""
        return {size for size, _, _ in self._recordings}

    @property
    def may_record(self) -> bool:
        """False once recording has been stopped, or failed too often for dense parts."""
        return self._may_record("dense")

    def stop(self) -> None:
        """Record nothing any more; what is recorded stays."""
        self._is_stopped = True

    def _may_record(self, kind: str) -> bool:
        return not self._is_stopped and self._failures[kind] < MOST_FAILURES

    def find(self, size: StepSize, part: Part) -> Run | None:
        """Return what runs this part of a step of a size; None: `first` must, this time."""
        if not part.can_be_recorded:
            return part.run
        return self._recordings.get(self._key(size, part), None if self._may_record(part.kind) else part.run)

    def first(self, size: StepSize, part: Part) -> Run | None:
        """Run a part call by call, which compiles and loads its kernels, then record it for the next step.

        Returns as `find` does.
        """
        part.run()
        if not self._may_record(part.kind):
            return part.run
        try:
            recording = self._record(part.run)
        except Exception as error:  # noqa: BLE001 the part has run, and can run call by call
            self._failures[part.kind] += 1
            ending = "" if self._may_record(part.kind) else f", as all {part.kind} ones not recorded yet"
            log.warning(
                "the %s of a step runs call by call%s: recording it failed: %s",
                part.name,
                ending,
                error,
            )
            return None if self._may_record(part.kind) else part.run
        self._recordings[self._key(size, part)] = recording
        self._kept.append(part.reads)
        return recording

    def whole(self, parts: Sequence[Part], calls: Sequence[Run | None]) -> Run | None:
        """Join the recordings of all parts of a step; None if one has none, or if they cannot be joined."""
        recordings = [call for part, call in zip(parts, calls, strict=True) if call not in (None, part.run)]
        if self._join is None or self._is_stopped or len(recordings) < len(parts):
            return None
        try:
            return self._join(recordings)
        except Exception as error:  # noqa: BLE001 the recordings are as they were
            self._join = None
            log.warning("steps run as recordings of their parts: these cannot be joined: %s", error)
            return None

    def _key(self, size: StepSize, part: Part) -> tuple[StepSize, str, Hashable]:
        return size, part.name, tuple(map(self._value, part.reads))

    def _value(self, thing: object) -> Hashable:
        if not isinstance(thing, Attention | FeedForward | Experts):
            return value_of(thing)
        if (found := self._values.get(thing)) is None:
            found = self._values[thing] = value_of(thing)
        return found


def value_of(thing: object) -> Hashable:
    """Return what a recording knows of `thing`: equal for things that give the same launches.

    A tensor is its address and layout. Whatever is not known here is itself.
    """
    match thing:
        case torch.Tensor():
            return (thing.data_ptr(), thing.dtype, tuple(thing.shape), thing.stride())
        case list() | tuple():
            return tuple(map(value_of, thing))
        case partial():
            return (thing.func, value_of(thing.args), tuple(sorted(thing.keywords.items())))
        case QuantizedWeight():
            names = (one.name for one in fields(thing) if one.name != "derived")
            return tuple(value_of(getattr(thing, name)) for name in names)
        case slice():
            return (thing.start, thing.stop, thing.step)
        case Attention() | FeedForward() | Experts() | Linear() | GroupedLinear():
            return (type(thing), *((name, value_of(part)) for name, part in sorted(vars(thing).items())))
    assert isinstance(thing, Hashable)
    return thing


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return True for the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))

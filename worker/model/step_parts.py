"""The parts of a step that decodes, each of which can be recorded by itself and run again in its place.

A decode step on a GPU is some 350 launches, which cost the host more than the GPU's time. A recording of a
part is one launch. It computes with addresses, so all that changes from step to step lies in memory that
stays (`StepMemory`), and a part is recorded anew when what it reads lies elsewhere: a morph that replaces one
half of a layer leaves the recordings of all others. Variants keep their addresses, so the recording of a half
that comes back is valid again.

Recordings of a step on a CPU are in `worker.model.recorded`: there one program holds the whole step.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial

import torch

from kernels import AttentionPlan, QuantizedWeight
from worker.model.layer import Attention, FeedForward
from worker.model.linear import Linear

log = logging.getLogger(__name__)

Run = Callable[[], object]
Recorder = Callable[[Run], Run]  # records what a call does, without doing it; returns what does it

MOST_FAILURES = 3  # another thread that waits for the device ends a recording: it may succeed the next time
ALIGNMENT = 256  # bytes; Triton compiles once for addresses that are multiples of 16, and again for others


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of steps that decode B sequences, of the most that it is made for.

    The host writes `inputs`: token_ids, follows and the plan but for its cu_seqlens_q are views of it.

    =========  =================  ==========================================
    field      shape              meaning
    =========  =================  ==========================================
    inputs     uint8 [n]          what the host writes before each step
    token_ids  int64 [B]          the last token of each sequence, where `follows` is -1
    follows    int64 [B]          else the row of `sampled` that has it: the host does not know it yet
    sampled    int64 [most]       the tokens that the last step chose, which stays on the device
    plan                          as ever; max_context_len is the longest possible one, so that launches of
                                  attention do not depend on the step
    residual   dtype [B, H]       between two parts
    x          dtype [B, H]       between two parts, normed
    logits     float32 [B, V]     what a step gives
    =========  =================  ==========================================
    """

    inputs: torch.Tensor
    token_ids: torch.Tensor
    follows: torch.Tensor
    sampled: torch.Tensor
    plan: AttentionPlan
    residual: torch.Tensor
    x: torch.Tensor
    logits: torch.Tensor

    @classmethod
    def make(
        cls, num_seqs: int, table_width: int, max_context_len: int, embedding: torch.Tensor, vocab_size: int
    ) -> StepMemory:
        """Make the memory on the device and in the dtype of embedding [vocab, H]."""
        device, hidden = embedding.device, embedding.shape[1]
        inputs = torch.zeros(input_bytes(num_seqs, table_width), dtype=torch.uint8, device=device)
        bounds = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        token_ids, follows, plan = _views(inputs, num_seqs, table_width, max_context_len, bounds)
        return cls(
            inputs,
            token_ids,
            follows,
            torch.zeros(num_seqs, dtype=torch.int64, device=device),
            plan,
            embedding.new_empty(num_seqs, hidden),
            embedding.new_empty(num_seqs, hidden),
            torch.empty(num_seqs, vocab_size, dtype=torch.float32, device=device),
        )

    def of(self, num_seqs: int) -> StepMemory:
        """Return the part of this memory for fewer sequences: at the same addresses, laid out for them."""
        width = self.plan.block_table.shape[1]
        inputs = self.inputs[: input_bytes(num_seqs, width)]
        token_ids, follows, plan = _views(
            inputs, num_seqs, width, self.plan.max_context_len, self.plan.cu_seqlens_q[: num_seqs + 1]
        )
        residual, x, logits = (one[:num_seqs] for one in (self.residual, self.x, self.logits))
        return StepMemory(inputs, token_ids, follows, self.sampled, plan, residual, x, logits)

    def tokens(self) -> torch.Tensor:
        """Return the last token of each sequence, int64 [B], known to the host or not."""
        known = self.sampled.index_select(0, self.follows.clamp(min=0))
        return torch.where(self.follows < 0, self.token_ids, known)


def input_layout(num_seqs: int, table_width: int) -> list[tuple[str, torch.dtype, tuple[int, ...], int]]:
    """Return name, dtype, shape and first byte of each array that the host writes."""
    places, at = [], 0
    arrays: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("token_ids", torch.int64, (num_seqs,)),
        ("follows", torch.int64, (num_seqs,)),
        ("positions", torch.int64, (num_seqs,)),
        ("slot_mapping", torch.int64, (num_seqs,)),
        ("context_lens", torch.int32, (num_seqs,)),
        ("block_table", torch.int32, (num_seqs, table_width)),
    ]
    for name, dtype, shape in arrays:
        places.append((name, dtype, shape, at))
        nbytes = dtype.itemsize * shape[0] * (shape[1] if len(shape) > 1 else 1)
        at = -(-(at + nbytes) // ALIGNMENT) * ALIGNMENT
    return places


def input_bytes(num_seqs: int, table_width: int) -> int:
    """Return the bytes of all arrays that the host writes."""
    _, dtype, (rows, columns), at = input_layout(num_seqs, table_width)[-1]
    return at + int(dtype.itemsize) * rows * columns


def input_arrays(inputs: torch.Tensor, num_seqs: int, table_width: int) -> dict[str, torch.Tensor]:
    """Return views of uint8 [n] as the arrays that the host writes."""
    arrays = {}
    for name, dtype, shape, at in input_layout(num_seqs, table_width):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        arrays[name] = inputs[at : at + count * dtype.itemsize].view(dtype).view(shape)
    return arrays


def _views(
    inputs: torch.Tensor, num_seqs: int, table_width: int, max_context_len: int, bounds: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
    arrays = input_arrays(inputs, num_seqs, table_width)
    plan = AttentionPlan(
        bounds,
        arrays["context_lens"],
        arrays["block_table"],
        arrays["slot_mapping"],
        arrays["positions"],
        1,
        max_context_len,
    )
    return arrays["token_ids"], arrays["follows"], plan


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: what it runs, and what that reads beside the step's memory and what never changes.

    can_be_recorded: False if the host must see what the device computes.
    """

    name: str
    reads: tuple[object, ...]  # halves, tensors or None
    run: Run
    can_be_recorded: bool = True


class RecordedParts:
    """The recordings of a model's parts, kept by what they read. A part without one runs call by call."""

    def __init__(self, record: Recorder) -> None:
        self._record, self._failures = record, 0
        self._recordings: dict[Hashable, Run] = {}
        self._kept: list[object] = []  # what recordings read: else its memory could become something else
        self._values: weakref.WeakKeyDictionary[object, Hashable] = weakref.WeakKeyDictionary()

    @property
    def num_recorded(self) -> int:
        return len(self._recordings)

    @property
    def may_record(self) -> bool:
        """False once recording has failed too often: then every part runs call by call."""
        return self._failures < MOST_FAILURES

    def stop(self) -> None:
        """Record nothing any more; what is recorded stays."""
        self._failures = MOST_FAILURES

    def find(self, size: int, part: Part) -> Run | None:
        """Return what runs this part of a step of `size` sequences; None: `first` must, this time."""
        if not part.can_be_recorded:
            return part.run
        return self._recordings.get(self._key(size, part), None if self.may_record else part.run)

    def first(self, size: int, part: Part) -> Run | None:
        """Run a part call by call, which compiles and loads its kernels, then record it for the next step.

        Returns as `find` does.
        """
        part.run()
        if not self.may_record:
            return part.run
        try:
            recording = self._record(part.run)
        except Exception as error:  # noqa: BLE001 the part has run, and can run call by call
            self._failures += 1
            ending = "" if self.may_record else ", and so does whatever is not recorded yet"
            log.warning(
                "the %s of a decode step runs call by call%s: recording it failed: %s",
                part.name,
                ending,
                error,
            )
            return None if self.may_record else part.run
        self._recordings[self._key(size, part)] = recording
        self._kept.append(part.reads)
        return recording

    def _key(self, size: int, part: Part) -> Hashable:
        return (size, part.name, *map(self._value, part.reads))

    def _value(self, thing: object) -> Hashable:
        if not isinstance(thing, Attention | FeedForward):
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
        case Attention() | FeedForward() | Linear():
            return (type(thing), *((name, value_of(part)) for name, part in sorted(vars(thing).items())))
    assert isinstance(thing, Hashable)
    return thing


class CudaGraphs:
    """Records calls as CUDA graphs (CUDA C++ Programming Guide, "CUDA Graphs").

    All share one pool of memory, which holds only what passes within a part: parts run one after the other on
    one stream. Other threads may use the device meanwhile, but not wait for all of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # the default stream cannot be captured
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Raise RuntimeError if something in `run` cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        with _no_collection(), torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        replay: Run = graph.replay
        return replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing device memory in the middle, which ends a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return True for the same objects in the same order."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))

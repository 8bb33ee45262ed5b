"""Messages between workers: one msgpack struct per frame, some with one tensor as payload.

The leader of a pipeline has a link to every other worker; the first rank of each later stage has links to all
ranks of the next. Along these, steps and actions of morphs keep their order. The last stage answers the
leader.
"""

from __future__ import annotations

import functools
import operator
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from bus.messages import LayerShape, Number, Part
from bus.precisions import LOWEST, KVPrecision, Precision
from worker.engine.input_batch import ModelInput


class Peer(msgspec.Struct, frozen=True):
    """Another worker and how to reach it, as its card says."""

    worker: str
    epoch: int
    address: str  # "host:port"
    key: bytes


class GroupMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of messages within a group; `group` is the id of the transform that formed it."""

    group: str


class PipelineMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of messages within a pipeline, named by its id."""

    pipeline: str


class ProbeMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of messages that measure a link."""


# --------------------------------------------------------------------------- forming a group, in two phases


class Prepare(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The coordinator asks: can you enter this group, or split into subgroups of `low`? Answered by Vote."""

    leader: str
    model: str
    members: list[str]
    low: int
    grows: bool
    peers: dict[str, Peer]  # all members
    shape: list[LayerShape]  # shape of the leader, and so of the group
    kv_form: KVPrecision | None = "full"  # of the leader's KV cache; None: half-way to another
    context: int = 0  # the longest sequence that the leader's rotary tables serve; 0: any


class Vote(GroupMessage, frozen=True, kw_only=True, tag=True):
    """Answer to Prepare.

    An empty `reason` is a yes: the worker stands by until Commit or Abort. `numbers`: pages and blocks
    before and after. `rendezvous`: the one whose communicator it has kept, or "".
    """

    worker: str
    reason: str = ""
    rendezvous: str = ""
    numbers: dict[str, Number] = {}


class JoinRendezvous(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The coordinator tells all members to make the communicator in `store` (host:port).

    Of two communicators of the same members, that with the greater `rendezvous`, the later one, is kept.
    """

    rendezvous: str
    store: str


class RendezvousAhead(GroupMessage, frozen=True, kw_only=True, tag=True):
    """Make the communicator of a group that may form later, and keep it."""

    rendezvous: str
    members: list[str]
    peers: dict[str, Peer]
    store: str


class RendezvousDone(GroupMessage, frozen=True, kw_only=True, tag=True):
    """Answer to JoinRendezvous. `reason`: why there is no communicator; empty: there is one."""

    worker: str
    reason: str = ""


class Commit(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The coordinator decided: enter the group at the next boundary. `blocks`: of every subgroup."""

    blocks: int


class LeadSubgroup(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The future leader of a subgroup opens the link that it will use after the split."""


class Abort(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The change does not happen: sent by the coordinator, and by a future leader over its unused link."""

    reason: str


# --------------------------------------------------------------------------- between two steps


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An action that every member carries out after the same step."""


class MoveBoundary(Action, frozen=True, kw_only=True, tag=True):
    """Change the degree of the layers from `to` up to the boundary of now."""

    to: int


class FinishMerge(Action, frozen=True, kw_only=True, tag=True):
    """Use one set of blocks, since all layers are at the high degree."""

    blocks: int  # blocks in all
    pages: list[int]  # pages of each layer, by rank
    is_probed: bool = False  # members measure the bandwidth between them, which is not known yet


class Announce(Action, frozen=True, kw_only=True, tag=True):
    """Show the new shape on the cards: it was tried."""


class CountBlocks(Action, frozen=True, kw_only=True, tag=True):
    """Tell which blocks are in use with the next Ready, or also those `with_found`.

    These are free, and the prefix cache finds what they hold.
    """

    with_found: bool = False


class BeginSplit(Action, frozen=True, kw_only=True, tag=True):
    """Move blocks (from -> to), keep `blocks` for each subgroup, and begin to take layers back to `low`."""

    low: int
    blocks: int
    pages: list[int]  # pages of every layer that stay, by rank
    moves: dict[int, int]
    is_from_peers: bool = False  # the FFN rows that are missing; else each has its own host's
    layers_per_step: int = 1  # most layers that change at once


class EndSplit(Action, frozen=True, kw_only=True, tag=True):
    """Go on as subgroups: all layers are at the low degree."""


class LendBlocks(Action, frozen=True, kw_only=True, tag=True):
    """The giver (a rank) gives the taker so many of its free blocks."""

    giver: int
    taker: int
    blocks: int


class PrepareHalf(Action, frozen=True, kw_only=True, tag=True):
    """Map this variant of a half of a layer, at the member's shard, and copy it in beside the steps.

    ahead: the layer, part and precision that follow, to be read from a disk meanwhile.
    """

    layer: int
    part: Part
    precision: Precision
    ahead: tuple[int, Part, Precision] | None = None


class InstallHalf(Action, frozen=True, kw_only=True, tag=True):
    """Run on the prepared variant from the next step on and unmap the old one."""

    layer: int
    part: Part


class DropHalf(Action, frozen=True, kw_only=True, tag=True):
    """Unmap the prepared variant, if there is one."""

    layer: int
    part: Part


# Why the KV cache changes its size: an operator's order, a swap that needs the pages or sets them free.
KVPurpose = Literal["order", "swap"]


class GrowKV(Action, frozen=True, kw_only=True, tag=True):
    """Add `pages` to each layer's KV at each member; the instance has `blocks` blocks then."""

    pages: int
    blocks: int
    purpose: KVPurpose


class ShrinkKV(Action, frozen=True, kw_only=True, tag=True):
    """Move live blocks (from -> to), then take `pages` from each layer's KV at each member."""

    pages: int
    blocks: int
    moves: dict[int, int]
    purpose: KVPurpose


class MoveBlocks(Action, frozen=True, kw_only=True, tag=True):
    """Copy KV blocks (from -> to) in every layer; from here on they have these numbers."""

    moves: dict[int, int]


class CompileKV(Action, frozen=True, kw_only=True, tag=True):
    """Compile what reads and writes KV in 8 bits, beside the steps."""


class CountKV(Action, frozen=True, kw_only=True, tag=True):
    """Move live blocks (from -> to), then count KV blocks as `precision` has them: `blocks` in all."""

    precision: KVPrecision
    blocks: int
    moves: dict[int, int]


class ConvertKV(Action, frozen=True, kw_only=True, tag=True):
    """Hold the KV of a layer in `precision` from the next step on; `blocks` of it hold something."""

    layer: int
    precision: KVPrecision
    blocks: list[int]


class EnterGroup(Action, frozen=True, kw_only=True, tag=True):
    """Make this group a subgroup of the one that its members have voted for."""

    blocks: int  # blocks of every subgroup


HalfActions = PrepareHalf | InstallHalf | DropHalf
KVActions = CompileKV | CountKV | ConvertKV
MorphActions = HalfActions | GrowKV | ShrinkKV | MoveBlocks | KVActions
GroupActions = (
    EnterGroup | MoveBoundary | FinishMerge | Announce | CountBlocks | BeginSplit | EndSplit | LendBlocks
)
Actions = MorphActions | GroupActions


# --------------------------------------------------------------------------- steps


class MemberLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one member: blocks of KV, sequences, seconds."""

    used: int = 0  # blocks
    needed: int = 0  # blocks, at the peak of what runs and waits
    running: int = 0
    waiting: int = 0
    waited_s: float = 0.0  # how long the head of the queue has been here, while blocks are missing
    residence_s: float = 0.0  # mean time that a sequence runs; 0: none has ended yet
    preemptions: int = 0  # since the start
    prompt_tokens: int = 0  # to compute before a prompt that comes now has its turn
    prompt_rate: float = 0.0  # prompt tokens per second of the last steps; 0: unknown
    arriving: float = 0.0  # requests per second that came lately
    floor_refused: Precision = LOWEST  # highest floor of recently refused requests; the lowest: none


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of one member, as morphs need to know it; pages are the member's own.

    The members of a pipeline have layers [first, end) each. All requests are at its leader.
    """

    first: int
    end: int
    free_pages: int  # free pages of the device
    spare_pages: int  # those beyond the reserve for swaps; below 0: so many are missing
    own_pages: int  # free pages that belong to the KV cache; below 0: pages that swaps borrowed
    kv_pages: int  # pages of each layer of the KV cache
    growable_pages: int  # pages by which each layer of the KV cache can grow now
    most_pages: int  # most pages of each KV layer, if no other model had any
    useful_pages: int  # pages of each KV layer; more would lie idle
    copied: list[tuple[int, Part]]  # prepared halves whose copy has ended
    copy_error: str = ""  # error of a prepared half
    kv_form: KVPrecision | None = "full"  # of its KV cache; None: half-way to another
    is_kv_compiled: bool = False  # all that its KV in 8 bits needs
    kv_error: str = ""  # of compiling that
    num_used: int = 0  # blocks in use by the member's sequences
    load: MemberLoad = MemberLoad()
    headroom: int = 0  # blocks that these may fill soon
    floors: dict[Precision, int] = {}  # requests here that insist on a precision, by precision

    @property
    def num_layers(self) -> int:
        """The number of layers here."""
        return self.end - self.first


class Ready(GroupMessage, frozen=True, kw_only=True, tag=True):
    """A member's report to the leader before a step. Until the step is called a later one replaces it."""

    rank: int
    step: int
    work: ModelInput | None
    spare: int  # blocks that nothing here needs soon
    wanted: int  # blocks that its next sequence misses
    wanting_s: float  # how long the oldest that misses some has been there
    used: list[int]  # blocks in use, while layers change their degree or as a CountBlocks says
    num_used: int
    filled: int  # layers from here on have their wider weights in memory, or pages for what peers send
    status: MemberStatus
    max_tokens: int  # most tokens of a step that fit its memory
    running: int = 0  # sequences
    long_remaining: int = 0  # tokens to compute of one that no worker alone could hold; 1: it decodes
    given: dict[int, list[int]] = {}  # taker -> blocks, after a LendBlocks


class Step(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The leader calls a step: the inputs to run, and the actions that follow. Lists are by rank."""

    step: int
    works: list[ModelInput | None]
    allowed: list[int]  # tokens of each planner in the next one
    used: list[list[int]]
    num_used: list[int]
    grants: dict[int, list[int]]  # taker -> blocks
    after: list[Actions]


class RequestSplit(GroupMessage, frozen=True, kw_only=True, tag=True):
    """A member that is about to leave asks the leader to split the group first."""


class GroupEnded(GroupMessage, frozen=True, kw_only=True, tag=True):
    """The sender has left the group; nothing more follows."""

    reason: str


# --------------------------------------------------------------------------- forming a pipeline


class JoinPipeline(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """First message of the leader: you are this rank of this stage. Answered by PipelineJoined.

    `next`: all ranks of the next stage, for the first rank of a stage that is not the last.
    """

    leader: str
    stage: int
    rank: int = 0
    tp: int = 1  # ranks of each stage
    epoch: int  # epoch of the worker addressed
    first: int  # layers [first, end) of the model
    end: int
    hidden_size: int
    dtype: str
    block_tokens: int
    kv_precision: KVPrecision = "full"
    page_bytes: int
    digest: str = ""  # checkpoint digest; "": not compared
    context: int = 0  # the longest sequence that the leader's rotary tables serve; 0: any
    is_last: bool
    next: list[Peer] = []


class PipelineJoined(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """Answer to JoinPipeline.

    `reason`: why not; empty: the stage stands by and could have `blocks` now. `store` (host:port): where
    the ranks of this stage meet; from the first of several.
    """

    stage: int
    reason: str = ""
    store: str = ""
    blocks: int = 0
    shape: list[LayerShape] = []


class StartPipeline(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """KV blocks and, for several ranks, their rendezvous. Answered by StageStatus or StageFailed."""

    blocks: int
    rendezvous: str = ""
    store: str = ""


class StageStatus(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """The memory of a stage: sent when it starts, after every action, and when it changes."""

    ticket: int  # of the last action that was carried out
    status: MemberStatus


class StageFailed(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """The stage cannot go on and has released its pages."""

    stage: int
    reason: str


class StageDraining(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """The stage's worker drains: the leader lets running requests finish, then ends the pipeline."""

    stage: int
    reason: str


class EndPipeline(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """The leader ends the pipeline; every stage releases its pages."""

    reason: str


# --------------------------------------------------------------------------- steps of a pipeline, in order


class RunStage(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """One step; the payload is the residual [T, H], and nothing for ranks of the first stage.

    These embed the tokens themselves. If there is no other stage, they make their part of the logits, too.
    """

    step: int
    work: ModelInput


class RunHead(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """Rows for a rank of the first stage to make its part of the logits of; the payload is [R, H]."""


class CarryOut(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """An action of a morph, between the same two steps at every stage. Layers count in the whole model."""

    ticket: int
    action: MorphActions


class StageOutput(PipelineMessage, frozen=True, kw_only=True, tag=True):
    """Answer of the last stage: the payload is the residual [R, H] of the rows whose logits are wanted."""

    step: int


# --------------------------------------------------------------------------- measuring a link


class Echo(ProbeMessage, frozen=True, kw_only=True, tag=True):
    """Answered at once by the same message with the same payload."""


class MeasureAllReduce(ProbeMessage, frozen=True, kw_only=True, tag=True):
    """Ask to be rank 1 of 2 of a communicator that meets in `store`, and to make these all-reduces.

    The sender is rank 0. Answered by ProbeFailed if that is not possible.
    """

    store: str
    dtype: str
    sizes: list[int]  # elements of each tensor, in this order
    rounds: int  # over all sizes


class ProbeFailed(ProbeMessage, frozen=True, kw_only=True, tag=True):
    """The measurement does not take place."""

    reason: str


# --------------------------------------------------------------------------- encoding

Message = GroupMessage | PipelineMessage | ProbeMessage
_BASES = (GroupMessage, PipelineMessage, ProbeMessage)
_KINDS = functools.reduce(operator.or_, (kind for base in _BASES for kind in base.__subclasses__()))


def _pack(value: object) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"a {type(value).__name__} in a message")
    return value.dtype.str, value.shape, value.tobytes()


def _unpack(_: type, packed: tuple[str, list[int], bytes]) -> npt.NDArray[np.generic]:
    """Return an array over memory of its own, since torch refuses one that cannot be written to."""
    dtype, shape, data = packed
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(_KINDS, dec_hook=_unpack)


def encode(message: Message) -> bytes:
    """Return the msgpack bytes of `message`; an array is its dtype, shape and memory."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Message:
    """Return the message in `data`. Raises ValueError for bytes that are not a message."""
    return _decoder.decode(data)

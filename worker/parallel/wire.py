"""What members of a group tell each other, and how it is written: msgpack by msgspec, one message a frame."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from bus.messages import LayerShape, Number, Part, Precision
from worker.engine.work import Work


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All belong to a group, by its id: the transformation that made it."""

    group: str


# --------------------------------------------------------------------------- coming together


class Peer(msgspec.Struct, frozen=True):
    """A worker as its card tells of it."""

    worker: str
    epoch: int
    address: str
    key: bytes


class Invite(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: would you come into this formation, or in it go back to `low`? Answered by Answer."""

    leader: str
    model: str
    members: list[str]
    low: int
    grows: bool
    peers: dict[str, Peer]  # all members
    shape: list[LayerShape]  # of the leader, and so of the group


class Answer(Message, frozen=True, kw_only=True, tag=True):
    """To the leader. `reason`: why not; empty: it comes, and stands by. `numbers`: what it has and will have.
    `meeting`: the one whose communicator it has kept, if any."""

    worker: str
    reason: str = ""
    meeting: str = ""
    numbers: dict[str, Number] = {}


class Meet(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: make the communicator, with the others, in this store (host:port). Of two that the
    same members have, that of the greater `meeting` is kept: that one was called later."""

    meeting: str
    store: str


class MeetAhead(Message, frozen=True, kw_only=True, tag=True):
    """From one that may lead some day: make the communicator of these members now, and keep it."""

    meeting: str
    members: list[str]
    peers: dict[str, Peer]
    store: str


class Met(Message, frozen=True, kw_only=True, tag=True):
    """To the leader: it is made, or why not."""

    worker: str
    reason: str = ""


class Enter(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: from the next boundary on you are in. `blocks`: of every subgroup."""

    blocks: int


class Follow(Message, frozen=True, kw_only=True, tag=True):
    """From the one that will lead a subgroup when its group parts, over the link that it will use then."""


class Dismiss(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: it does not come about. The old shape serves on. From who would have led a subgroup:
    it will not speak over this link."""

    reason: str


# --------------------------------------------------------------------------- between two steps


class Action(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What every member does after the same step."""


class MoveBoundary(Action, frozen=True, kw_only=True, tag=True):
    """The layers from `to` up to the boundary of now change their degree."""

    to: int


class Settle(Action, frozen=True, kw_only=True, tag=True):
    """All layers are at the high degree: one set of blocks, so many, in so many pages of each layer."""

    blocks: int
    pages: list[int]  # by rank
    is_probed: bool = False  # all measure how fast they send each other, since nothing has told it yet


class Show(Action, frozen=True, kw_only=True, tag=True):
    """The new shape was tried: the cards may tell of it."""


class Census(Action, frozen=True, kw_only=True, tag=True):
    """Tell which blocks are in use with the next Ready."""


class PartingBegins(Action, frozen=True, kw_only=True, tag=True):
    """Blocks move home (from -> to), each subgroup keeps `blocks`, and layers begin to go back to `low`."""

    low: int
    blocks: int
    pages: list[int]  # of every layer, that stay; by rank
    moves: dict[int, int]
    is_from_peers: bool = False  # the FFN rows that are missing; else each has its own host's
    layers_per_step: int = 1  # that will change at most


class Parted(Action, frozen=True, kw_only=True, tag=True):
    """All layers are at the low degree: every subgroup goes on on its own."""


class Lend(Action, frozen=True, kw_only=True, tag=True):
    """The giver (a rank) gives the taker so many of its free blocks."""

    giver: int
    taker: int
    blocks: int


class PrepareHalf(Action, frozen=True, kw_only=True, tag=True):
    """Map this variant of a half of a layer, at the member's shard, and copy it in beside the steps."""

    layer: int
    part: Part
    precision: Precision


class InstallHalf(Action, frozen=True, kw_only=True, tag=True):
    """The next step runs on what was prepared; the old variant's pages are free."""


class DropHalf(Action, frozen=True, kw_only=True, tag=True):
    """What was prepared is not wanted any more."""


class Grow(Action, frozen=True, kw_only=True, tag=True):
    """So many pages more in each layer of each member, and so many blocks in all then."""

    pages: int
    blocks: int


class Shrink(Action, frozen=True, kw_only=True, tag=True):
    """So many pages fewer; live blocks move first (from -> to), and there are so many in all then."""

    pages: int
    blocks: int
    moves: dict[int, int]


class EnterNext(Action, frozen=True, kw_only=True, tag=True):
    """This group becomes a subgroup of the one that its members stand by for. `blocks`: of every subgroup."""

    blocks: int


Actions = (
    PrepareHalf
    | InstallHalf
    | DropHalf
    | Grow
    | Shrink
    | EnterNext
    | MoveBoundary
    | Settle
    | Show
    | Census
    | PartingBegins
    | Parted
    | Lend
)


# --------------------------------------------------------------------------- steps


class PackedWork(msgspec.Struct, frozen=True, kw_only=True):
    """`Work`; arrays as the bytes they have in memory."""

    token_ids: bytes
    q_lens: bytes
    context_lens: bytes
    blocks: bytes
    logit_rows: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // np.dtype(np.int64).itemsize


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """To the leader: what this planner has for the step. It may come again, with more, until the step is
    called."""

    rank: int
    step: int
    work: PackedWork | None
    spare: int  # blocks that nothing here needs soon
    wanted: int  # blocks that its next sequence misses
    wanting_s: float  # how long the oldest that misses some has been there
    used: list[int]  # blocks in use, while layers change their degree or after a Census
    num_used: int
    filled: int  # layers from here on have their wider weights in memory, or pages for what peers send
    has_prepared: bool  # the half of the last PrepareHalf is copied
    pages: int  # of each layer of its cache
    spare_pages: int  # of its device, beyond the reserve
    floor: Precision | Literal[""]  # no request here may run below it
    max_tokens: int  # of a step, that it has memory for
    running: int = 0  # sequences
    long_remaining: int = 0  # tokens to compute of one that no worker alone could hold; 1: it decodes
    given: dict[int, list[int]] = {}  # taker -> blocks, after a Lend


class Step(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: run this, then do that. By rank."""

    step: int
    works: list[PackedWork | None]
    allowed: list[int]  # tokens of each planner in the next one
    used: list[list[int]]
    num_used: list[int]
    grants: dict[int, list[int]]  # taker -> blocks
    after: list[Actions]


class PartPlease(Message, frozen=True, kw_only=True, tag=True):
    """To the leader: a member is about to leave, and would rather be alone then."""


class Bye(Message, frozen=True, kw_only=True, tag=True):
    """The group has fallen apart here: nothing more comes."""

    reason: str


Messages = (
    Invite | Answer | Meet | MeetAhead | Met | Enter | Follow | Dismiss | Ready | Step | PartPlease | Bye
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Messages] = msgspec.msgpack.Decoder(Messages)


def encode(message: Messages) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Messages:
    """Raises ValueError for what is no message."""
    return _decoder.decode(data)


def pack(work: Work) -> PackedWork:
    return PackedWork(
        token_ids=work.token_ids.tobytes(),
        q_lens=work.q_lens.tobytes(),
        context_lens=work.context_lens.tobytes(),
        blocks=np.ascontiguousarray(work.blocks).tobytes(),
        logit_rows=work.logit_rows.tobytes(),
    )


def unpack(packed: PackedWork) -> Work:
    """Arrays of its own, since torch takes none that it may not write to."""
    q_lens = np.frombuffer(bytearray(packed.q_lens), np.int64)
    return Work(
        token_ids=np.frombuffer(bytearray(packed.token_ids), np.int64),
        q_lens=q_lens,
        context_lens=np.frombuffer(bytearray(packed.context_lens), np.int64),
        blocks=np.frombuffer(bytearray(packed.blocks), np.int32).reshape(len(q_lens), -1),
        logit_rows=np.frombuffer(bytearray(packed.logit_rows), np.int64),
    )

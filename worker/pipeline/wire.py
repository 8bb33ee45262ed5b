"""What the stages of a pipeline tell each other: a msgpack head, and the bytes of one tensor behind some.

The leader speaks to every other worker over a connection of its own, and the first rank of each later stage
to every rank of the next over one that it opens when it joins. What goes along these from stage to stage, and
from the leader to the ranks beside it, `Run` and `Move`, keeps the order of the steps. The last stage's first
rank answers to the leader. Within a step the ranks of a stage add up what they made (`ranks`).
"""

from __future__ import annotations

import msgspec
import numpy as np

from bus.messages import LayerShape
from worker.engine.work import Work


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All belong to a pipeline, by its id."""

    pipeline: str


# --------------------------------------------------------------------------- the leader and a stage


class NextDoor(msgspec.Struct, frozen=True):
    """Of a rank of the next stage."""

    address: str
    key: bytes


class Join(Message, frozen=True, kw_only=True, tag=True):
    """From the leader, first: you are this rank of this stage. `next`: the doors of all ranks of the stage
    behind, for the first rank of one that is not the last."""

    leader: str
    stage: int
    rank: int = 0
    tp: int = 1  # ranks of each stage
    epoch: int  # of the worker that is meant
    first: int  # layers [first, end) of the model
    end: int
    hidden_size: int
    dtype: str
    block_tokens: int
    digest: str = ""  # of the checkpoint; "": not compared
    is_last: bool
    next: list[NextDoor] = []


class Joined(Message, frozen=True, kw_only=True, tag=True):
    """To the leader. `reason`: why not; empty: it stands by, and could have so many blocks now. `store`
    (host:port): of the first of several ranks, where they meet."""

    stage: int
    reason: str = ""
    store: str = ""
    blocks: int = 0
    shape: list[LayerShape] = []


class Start(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: have so many blocks, to the end, and meet the other ranks of your stage, if there are
    any. Answered by Started, or Broken."""

    blocks: int
    meeting: str = ""
    store: str = ""


class Started(Message, frozen=True, kw_only=True, tag=True):
    stage: int


class Broken(Message, frozen=True, kw_only=True, tag=True):
    """To the leader: this stage cannot go on, and has given its pages back."""

    stage: int
    reason: str


class Going(Message, frozen=True, kw_only=True, tag=True):
    """To the leader: this worker is to leave; let what runs end first, and then the pipeline."""

    stage: int
    reason: str


class Leave(Message, frozen=True, kw_only=True, tag=True):
    """From the leader: it is over; give everything back."""

    reason: str


# --------------------------------------------------------------------------- from stage to stage, in order


class Run(Message, frozen=True, kw_only=True, tag=True):
    """A step; behind it the residual [T, H]. Arrays as the bytes they have in memory."""

    step: int
    q_lens: bytes
    context_lens: bytes
    blocks: bytes
    logit_rows: bytes


class Move(Message, frozen=True, kw_only=True, tag=True):
    """What was in block `sources[i]` is to be in `targets[i]`."""

    sources: list[int]
    targets: list[int]


class Done(Message, frozen=True, kw_only=True, tag=True):
    """From the last stage to the leader; behind it the residual [R, H] of the rows whose logits were asked
    for."""

    step: int


# --------------------------------------------------------------------------- from one that measures (`probe`)


class Probe(Message, frozen=True, kw_only=True, tag=True):
    """Answered at once by the same, with the same tensor behind it."""


class Meet(Message, frozen=True, kw_only=True, tag=True):
    """Be rank 1 of 2 of a communicator that meets in `store` (host:port), and make these all-reduces with
    rank 0. Answered by Broken where it cannot."""

    store: str
    dtype: str
    sizes: list[int]  # elements of each, in this order
    rounds: int  # over all sizes


Messages = Join | Joined | Start | Started | Broken | Going | Leave | Run | Move | Done | Probe | Meet

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Messages] = msgspec.msgpack.Decoder(Messages)


def encode(message: Messages) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Messages:
    """Raises ValueError for what is no message."""
    return _decoder.decode(data)


def pack(pipeline: str, step: int, work: Work) -> Run:
    """Token ids stay with the leader: later stages read the residual."""
    return Run(
        pipeline=pipeline,
        step=step,
        q_lens=work.q_lens.tobytes(),
        context_lens=work.context_lens.tobytes(),
        blocks=np.ascontiguousarray(work.blocks).tobytes(),
        logit_rows=work.logit_rows.tobytes(),
    )


def unpack(run: Run) -> Work:
    """Arrays of its own, since torch takes none that it may not write to. Token ids are zeros: only their
    number says anything."""
    q_lens = np.frombuffer(bytearray(run.q_lens), np.int64)
    return Work(
        token_ids=np.zeros(int(q_lens.sum()), np.int64),
        q_lens=q_lens,
        context_lens=np.frombuffer(bytearray(run.context_lens), np.int64),
        blocks=np.frombuffer(bytearray(run.blocks), np.int32).reshape(len(q_lens), -1),
        logit_rows=np.frombuffer(bytearray(run.logit_rows), np.int64),
    )

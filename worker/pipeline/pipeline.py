"""The leader's end of a pipeline: links to the other workers, and the batches in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from bus.messages import LayerShape
from worker.distributed.messages import (
    EndPipeline,
    JoinPipeline,
    Message,
    MoveBlocks,
    Peer,
    PipelineJoined,
    PipelineStarted,
    RunStage,
    StageDraining,
    StageFailed,
    StageOutput,
    StartPipeline,
    pack,
)
from worker.distributed.transport import Link, Payload, connect, to_host
from worker.engine.executor import ExecutorLost
from worker.engine.input_batch import ModelInput
from worker.model import ModelConfig


class PipelineLost(ExecutorLost):
    """A stage is gone or does not answer: no batch in flight will come back."""


@dataclass(frozen=True, slots=True)
class RemoteStage:
    """A later stage: layers [first, end) at a worker. others: its ranks 1, 2, ..., if it has several."""

    worker: str
    epoch: int
    address: str
    key: bytes
    first: int
    end: int
    others: tuple[Peer, ...] = ()

    @property
    def peers(self) -> list[Peer]:
        """The workers of the stage in the order of their ranks."""
        return [Peer(self.worker, self.epoch, self.address, self.key), *self.others]


@dataclass(frozen=True, slots=True)
class _StageRank:
    """Rank `rank` of a stage, which has layers [first, end)."""

    stage: int
    rank: int
    first: int
    end: int
    peer: Peer


class Pipeline:
    """The leader's links to the other workers of a pipeline, and the batches in flight.

    The engine's thread owns it; threads of links put messages into the mailbox and `wake` it. `join`, then,
    when `is_joined`, `start`, then, when `is_started`, `send` and `take_done`: batches come back in the order
    in which they were sent. After PipelineLost only `close` may be called.
    """

    def __init__(
        self,
        pipeline: str,
        leader: str,
        behind: Sequence[RemoteStage],
        *,
        beside: Sequence[Peer] = (),
        timeout_s: float,
        wake: Callable[[], None],
        is_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to lead the remote stages.

        beside: ranks 1, 2, ... of the leader's own stage; every other stage has as many. timeout_s: for a
        silent link, and for a batch to come back.
        """
        if any(len(each.others) != len(beside) for each in behind):
            raise ValueError(f"{pipeline}: its stages have different numbers of ranks")
        self.beside, self.tp = list(beside), 1 + len(beside)
        self.id, self.leader, self.behind, self.timeout_s = pipeline, leader, list(behind), timeout_s
        self._wake, self._is_gpu, self._clock = wake, is_gpu, clock
        self._mail: SimpleQueue[tuple[Link, Message | str, torch.Tensor]] = SimpleQueue()
        # In the order of stages and ranks, without the leader; links, answers and starts likewise.
        self._stage_ranks: list[_StageRank] = []
        self._links: list[Link] = []
        self._joined: dict[int, PipelineJoined] = {}
        self._started: set[int] = set()
        self._sent: deque[tuple[int, float]] = deque()  # step, when
        self._done: deque[torch.Tensor] = deque()
        self._next_step = 0
        self._lost = ""
        self.going = ""  # a worker that drains, and why

    @property
    def num_stages(self) -> int:
        return 1 + len(self.behind)

    # ----------------------------------------------------------------------------- coming together

    def join(self, config: ModelConfig, dtype: torch.dtype, block_tokens: int, digest: str = "") -> None:
        """Ask all workers, each for its layers of this model.

        A stage that is still being loaded answers when it is ready.
        """
        own = (config.first_layer, config.first_layer + config.num_layers)
        self._stage_ranks = [
            _StageRank(0, rank, *own, peer) for rank, peer in enumerate(self.beside, start=1)
        ]
        self._stage_ranks += [
            _StageRank(stage, rank, each.first, each.end, peer)
            for stage, each in enumerate(self.behind, start=1)
            for rank, peer in enumerate(each.peers)
        ]
        for place in self._stage_ranks:
            link = connect(
                place.peer.address,
                place.peer.key,
                self._take,
                self._lose,
                timeout_s=self.timeout_s,
                is_pinned=self._is_gpu,
                on_idle=self._wake,  # to see what is overdue
            )
            self._links.append(link)
            link.send(
                JoinPipeline(
                    pipeline=self.id,
                    leader=self.leader,
                    stage=place.stage,
                    rank=place.rank,
                    tp=self.tp,
                    epoch=place.peer.epoch,
                    first=place.first,
                    end=place.end,
                    hidden_size=config.hidden_size,
                    dtype=str(dtype),
                    block_tokens=block_tokens,
                    digest=digest,
                    is_last=place.stage == len(self.behind),
                    next=self._next_peers(place),
                )
            )

    def _next_peers(self, place: _StageRank) -> list[Peer]:
        """Return the ranks of the next stage, for the first rank of a stage.

        The leader has its own links to the second stage.
        """
        if place.rank or not 0 < place.stage < len(self.behind):
            return []
        return self.behind[place.stage].peers

    @property
    def is_joined(self) -> bool:
        """True once all workers stand by. Raises PipelineLost."""
        self._read()
        return len(self._joined) == len(self._stage_ranks)

    @property
    def num_blocks_possible(self) -> int:
        """KV blocks of the worker with the least room, once all have joined."""
        return min(joined.blocks for joined in self._joined.values())

    @property
    def shape(self) -> list[LayerShape]:
        """Shape of the layers behind the leader's, once all have joined."""
        return [layer for at in self._firsts for layer in self._joined[at].shape]

    def start(self, blocks: int, rendezvous: str = "", store: str = "") -> None:
        """Let all workers have this many blocks, and the ranks of each stage meet.

        Those of the leader's stage in `store`.
        """
        stores = [store, *(self._joined[at].store for at in self._firsts)]
        for place, link in zip(self._stage_ranks, self._links, strict=True):
            link.send(
                StartPipeline(
                    pipeline=self.id, blocks=blocks, rendezvous=rendezvous, store=stores[place.stage]
                )
            )

    @property
    def is_started(self) -> bool:
        """True once all workers have their blocks. Raises PipelineLost."""
        self._read()
        return len(self._started) == len(self._stage_ranks)

    @property
    def _firsts(self) -> list[int]:
        """Places of the first ranks of the stages behind, in their order."""
        return [at for at, place in enumerate(self._stage_ranks) if place.stage and not place.rank]

    # ----------------------------------------------------------------------------- steps

    @property
    def num_on_their_way(self) -> int:
        return len(self._sent)

    @property
    def has_news(self) -> bool:
        """True if `take_done` has something to return, or to raise."""
        return bool(self._done or self._lost) or not self._mail.empty() or self._is_overdue

    def share(self, work: ModelInput, residual: torch.Tensor) -> None:
        """Begin a step: send the embedded rows [T, H] to the other ranks of this stage. `send` follows."""
        if self.beside:
            # On a CPU a payload is the tensor's own memory, and the leader's layers add to it meanwhile.
            self._send_to(0, self._step_message(work), to_host(residual.clone()))

    def send(self, work: ModelInput, residual: torch.Tensor) -> None:
        """Send this stage's result of a step on: the residual [T, H], which is not written to any more."""
        self._send_to(1, self._step_message(work), to_host(residual))
        self._sent.append((self._next_step, self._clock()))
        self._next_step += 1

    def _step_message(self, work: ModelInput) -> RunStage:
        return RunStage(pipeline=self.id, step=self._next_step, work=pack(work, has_token_ids=False))

    def move(self, moved: Mapping[int, int]) -> None:
        """Move KV blocks (from -> to) in every stage, behind all steps that were sent."""
        move = MoveBlocks(pipeline=self.id, sources=list(moved), targets=list(moved.values()))
        for stage in (0, 1):
            self._send_to(stage, move)

    def _send_to(self, stage: int, message: Message, payload: Payload | None = None) -> None:
        for place, link in zip(self._stage_ranks, self._links, strict=True):
            if place.stage == stage:
                link.send(message, payload)

    def take_done(self) -> torch.Tensor | None:
        """Return the residual [R, H] of the oldest batch in flight, uint8 in host memory.

        None if it is not back yet. Raises PipelineLost.
        """
        self._read()
        if self._is_overdue:
            self._lost = f"a step did not come back within {self.timeout_s:g} s"
            raise PipelineLost(self._lost)
        if not self._done:
            return None
        self._sent.popleft()
        return self._done.popleft()

    def close(self, reason: str) -> None:
        """End the pipeline: all other workers release their pages. Closing again does nothing."""
        for link in self._links:
            link.send(EndPipeline(pipeline=self.id, reason=reason))
            link.close()

    @property
    def _is_overdue(self) -> bool:
        return bool(self._sent) and not self._done and self._clock() > self._sent[0][1] + self.timeout_s

    def _read(self) -> None:
        while not self._lost:
            try:
                link, message, payload = self._mail.get_nowait()
            except Empty:
                return
            self._lost = self._note(link, message, payload)
        raise PipelineLost(self._lost)

    def _note(self, link: Link, message: Message | str, payload: torch.Tensor) -> str:
        """Handle a message. Returns why the pipeline is lost, or ""."""
        at = self._links.index(link)
        where = self._name(self._stage_ranks[at])
        match message:
            case str():
                return f"{where} is gone: {message}"
            case PipelineJoined(reason="") | PipelineStarted():
                if isinstance(message, PipelineJoined):
                    self._joined[at] = message
                else:
                    self._started.add(at)
            case PipelineJoined():
                return f"{where} does not join: {message.reason}"
            case StageDraining():
                self.going = self.going or f"{where}: {message.reason}"
            case StageFailed():
                return f"{where} has ended: {message.reason}"
            case StageOutput():
                expected = self._sent[len(self._done)][0] if len(self._sent) > len(self._done) else None
                if message.step != expected:
                    return f"{where} answers step {message.step}, {expected} is the next"
                self._done.append(payload)
            case _:
                return f"{where} says {type(message).__name__}"
        return ""

    def _name(self, place: _StageRank) -> str:
        rank = f"rank {place.rank} of " if self.tp > 1 else ""
        return f"{rank}stage {place.stage} at {place.peer.worker}"

    # ----------------------------------------------------------------------------- threads of connections

    def _take(self, link: Link, message: Message, payload: torch.Tensor) -> None:
        self._mail.put((link, message, payload))
        self._wake()

    def _lose(self, link: Link, reason: str) -> None:
        self._mail.put((link, reason, torch.empty(0)))
        self._wake()

"""The leader's end of a pipeline: links to the other workers, and the batches in flight."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from bus.messages import LayerShape
from bus.precisions import KVPrecision
from worker.distributed import messages
from worker.distributed.secure import ClusterTLS
from worker.distributed.transport import Link, Payload, connect, to_host
from worker.engine.executor import ExecutorLost
from worker.engine.input_batch import ModelInput
from worker.model import ModelConfig


class PipelineLost(ExecutorLost):
    """A stage is gone or does not answer: no batch in flight will come back."""


@dataclass(frozen=True, slots=True)
class RemoteStage:
    """A later stage: layers [first, end) at its workers, in the order of their ranks."""

    first: int
    end: int
    peers: Sequence[messages.Peer]


@dataclass(slots=True, eq=False)
class _RemoteRank:
    """A worker that is `rank` of a stage, its link, and what it has answered."""

    stage: int
    rank: int
    peer: messages.Peer
    link: Link
    joined: messages.PipelineJoined | None = None
    told: messages.StageStatus | None = None  # the last one, from its start on


class Pipeline:
    """The leader's links to the other workers of a pipeline, and the batches in flight, in their order.

    The engine's thread owns it; threads of links put messages into the mailbox and `wake` it. `join`, then,
    when `is_joined`, `start`, then, when `is_started`, `send` and `take_done`. After PipelineLost only
    `close`.
    """

    def __init__(
        self,
        pipeline: str,
        leader: str,
        behind: Sequence[RemoteStage],
        *,
        beside: Sequence[messages.Peer] = (),
        timeout_s: float,
        wake: Callable[[], None],
        is_gpu: bool = False,
        tls: ClusterTLS | None = None,
    ) -> None:
        """beside: ranks 1, 2, ... of the leader's own stage. timeout_s: for a silent link or a late batch."""
        self.beside, self.tp = beside, 1 + len(beside)
        if any(len(each.peers) != self.tp for each in behind):
            raise ValueError(f"{pipeline}: its stages have different numbers of ranks")
        self.id, self.leader, self.behind, self.timeout_s = pipeline, leader, behind, timeout_s
        self._wake, self._is_gpu, self._tls = wake, is_gpu, tls
        self._mail: SimpleQueue[tuple[Link, messages.Message | str, torch.Tensor]] = SimpleQueue()
        self._ranks: list[_RemoteRank] = []  # ranks by stage, without the leader
        self._sent: deque[tuple[int, float]] = deque()  # step, when
        self._done: deque[torch.Tensor] = deque()
        self._next_step = 0
        self._carried: deque[tuple[int, float]] = deque()  # tickets of actions that are not done, when
        self._last_ticket = 0
        self._lost = ""
        self.going = ""  # a worker that drains, and why

    @property
    def num_stages(self) -> int:
        return 1 + len(self.behind)

    # ----------------------------------------------------------------------------- coming together

    def join(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        block_tokens: int,
        page_bytes: int,
        digest: str = "",
        kv_precision: KVPrecision = "full",
    ) -> None:
        """Ask all workers, each for its layers. A stage that is being loaded answers when it is ready."""
        own = RemoteStage(config.first_layer, config.first_layer + config.num_layers, self.beside)
        for number, stage in enumerate([own, *self.behind]):
            # The leader has its own links to the second stage.
            following = self.behind[number].peers if 0 < number < len(self.behind) else []
            for rank, peer in enumerate(stage.peers, start=0 if number else 1):
                link = connect(
                    peer.address,
                    peer.key,
                    self._take,
                    self._lose,
                    timeout_s=self.timeout_s,
                    is_pinned=self._is_gpu,
                    on_idle=self._wake,  # the check for overdue answers
                    tls=self._tls,
                )
                self._ranks.append(_RemoteRank(number, rank, peer, link))
                join = messages.JoinPipeline(
                    pipeline=self.id,
                    leader=self.leader,
                    stage=number,
                    rank=rank,
                    tp=self.tp,
                    epoch=peer.epoch,
                    first=stage.first,
                    end=stage.end,
                    hidden_size=config.hidden_size,
                    dtype=str(dtype),
                    block_tokens=block_tokens,
                    kv_precision=kv_precision,
                    page_bytes=page_bytes,
                    digest=digest,
                    context=config.max_position_embeddings,
                    is_last=number == len(self.behind),
                    next=[] if rank else list(following),
                )
                link.send(join)

    @property
    def is_joined(self) -> bool:
        """True once all workers stand by. Raises PipelineLost."""
        self._read()
        return len(self._joined) == len(self._ranks)

    @property
    def num_blocks_possible(self) -> int:
        """KV blocks of the worker with the least room, once all have joined."""
        return min(joined.blocks for joined in self._joined)

    @property
    def shape(self) -> list[LayerShape]:
        """Shape of the layers behind the leader's, once all have joined."""
        return [layer for joined in self._joined_first for layer in joined.shape]

    def start(self, blocks: int, rendezvous: str = "", store: str = "") -> None:
        """Let all workers have `blocks`, and the ranks of each stage meet; the leader's in `store`."""
        stores = [store, *(joined.store for joined in self._joined_first)]
        for each in self._ranks:
            meeting = stores[each.stage]
            start = messages.StartPipeline(
                pipeline=self.id, blocks=blocks, rendezvous=rendezvous, store=meeting
            )
            each.link.send(start)

    @property
    def is_started(self) -> bool:
        """True once all workers have their blocks. Raises PipelineLost."""
        self._read()
        return len(self.statuses) == len(self._ranks)

    @property
    def _joined(self) -> list[messages.PipelineJoined]:
        return [each.joined for each in self._ranks if each.joined]

    @property
    def _joined_first(self) -> list[messages.PipelineJoined]:
        """Answers of the first ranks of the stages behind, in their order."""
        return [each.joined for each in self._ranks if each.joined and each.stage and not each.rank]

    # ----------------------------------------------------------------------------- steps

    @property
    def has_news(self) -> bool:
        """True if `take_done` has something to return, or to raise."""
        return bool(self._done or self._lost) or not self._mail.empty() or self._is_overdue

    def share(self, work: ModelInput) -> None:
        """Begin a step of the other ranks of this stage; they embed the tokens, too. `send` follows."""
        self._send_to(0, self._step_message(work))

    def share_rows(self, rows: torch.Tensor) -> None:
        """Let the other ranks of this stage make their part of the logits of rows [R, H]."""
        if self.beside:
            self._send_to(0, messages.RunHead(pipeline=self.id), to_host(rows))

    def send(self, work: ModelInput, residual: torch.Tensor) -> None:
        """Send this stage's result of a step on: the residual [T, H], which is not written to any more."""
        self._send_to(1, self._step_message(work), to_host(residual))
        self._sent.append((self._next_step, time.monotonic()))
        self._next_step += 1

    def _step_message(self, work: ModelInput) -> messages.RunStage:
        return messages.RunStage(pipeline=self.id, step=self._next_step, work=work)

    def carry_out(self, action: messages.MorphActions) -> int:
        """Have every stage carry out `action` behind all steps that were sent. Returns a ticket."""
        self._last_ticket += 1
        self._carried.append((self._last_ticket, time.monotonic()))
        for stage in (0, 1):
            self._send_to(stage, messages.CarryOut(pipeline=self.id, ticket=self._last_ticket, action=action))
        return self._last_ticket

    def is_done(self, ticket: int) -> bool:
        """Return whether all other workers have carried out the action of `ticket`."""
        return not self._carried or self._carried[0][0] > ticket

    @property
    def statuses(self) -> list[messages.MemberStatus]:
        """The statuses that the other workers sent last, in the order of stages and ranks."""
        return [each.told.status for each in self._ranks if each.told]

    @property
    def is_lost(self) -> bool:
        """True if a worker is gone or did not answer in time."""
        return bool(self._lost)

    def _send_to(self, stage: int, message: messages.Message, payload: Payload | None = None) -> None:
        for each in self._ranks:
            if each.stage == stage:
                each.link.send(message, payload)

    def take_done(self) -> torch.Tensor | None:
        """Return the residual [R, H] of the oldest batch, uint8, if it is back. Raises PipelineLost."""
        self._read()
        if self._is_overdue:
            self._lost = f"a step or an action did not come back within {self.timeout_s:g} s"
            raise PipelineLost(self._lost)
        if not self._done:
            return None
        self._sent.popleft()
        return self._done.popleft()

    def close(self, reason: str) -> None:
        """End the pipeline: all other workers release their pages. Closing again does nothing."""
        for each in self._ranks:
            each.link.send(messages.EndPipeline(pipeline=self.id, reason=reason))
            each.link.close()

    @property
    def _is_overdue(self) -> bool:
        steps = [] if self._done else list(self._sent)[:1]
        since = [began for _, began in (*steps, *list(self._carried)[:1])]
        return bool(since) and time.monotonic() > min(since) + self.timeout_s

    def _read(self) -> None:
        while not self._lost:
            try:
                link, message, payload = self._mail.get_nowait()
            except Empty:
                return
            self._lost = self._note(link, message, payload)
        raise PipelineLost(self._lost)

    def _note(self, link: Link, message: messages.Message | str, payload: torch.Tensor) -> str:
        """Handle a message. Returns why the pipeline is lost, or ""."""
        [sender] = [each for each in self._ranks if each.link is link]
        rank = f"rank {sender.rank} of " if self.tp > 1 else ""
        where = f"{rank}stage {sender.stage} at {sender.peer.worker}"
        match message:
            case str():
                return f"{where} is gone: {message}"
            case messages.PipelineJoined(reason=""):
                sender.joined = message
            case messages.StageStatus():
                sender.told = message
                done = min(each.told.ticket if each.told else 0 for each in self._ranks)
                while self._carried and self._carried[0][0] <= done:
                    self._carried.popleft()
            case messages.PipelineJoined():
                return f"{where} does not join: {message.reason}"
            case messages.StageDraining():
                self.going = self.going or f"{where}: {message.reason}"
            case messages.StageFailed():
                return f"{where} has ended: {message.reason}"
            case messages.StageOutput():
                expected = self._sent[len(self._done)][0] if len(self._sent) > len(self._done) else None
                if message.step != expected:
                    return f"{where} answers step {message.step}, {expected} is the next"
                self._done.append(payload)
            case _:
                return f"{where} says {type(message).__name__}"
        return ""

    # ----------------------------------------------------------------------------- threads of connections

    def _take(self, link: Link, message: messages.Message, payload: torch.Tensor) -> None:
        self._mail.put((link, message, payload))
        self._wake()

    def _lose(self, link: Link, reason: str) -> None:
        self._mail.put((link, reason, torch.empty(0)))
        self._wake()

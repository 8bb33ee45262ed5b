"""A part of a pipeline: layers, or a rank's share of them, and their KV, under the block numbers of a leader
elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from kernels import copy_blocks
from worker.distributed.communicator import PeerLost
from worker.distributed.messages import (
    EndPipeline,
    JoinPipeline,
    MoveBlocks,
    PipelineJoined,
    PipelineStarted,
    RunStage,
    StageDraining,
    StageFailed,
    StageOutput,
    StartPipeline,
    unpack,
)
from worker.engine.engine import DEVICE_ERRORS
from worker.engine.work import attention_plan, to_tensor
from worker.memory import KVCache
from worker.model import Model
from worker.model.shard import ALONE, Shard
from worker.parallel.links import knock
from worker.pipeline.hop import Hop, OnFrame, Received, to_host
from worker.pipeline.ranks import Ranks

log = logging.getLogger(__name__)


class Refused(Exception):
    """It cannot do what the leader wants; the reason."""


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a model, or the shard's part of them, loaded for a pipeline, and a cache as large as it may
    be. `release`: every page back."""

    pipeline: str
    stage: int
    epoch: int
    model: Model
    cache: KVCache
    release: Callable[[], None]
    digest: str = ""
    shard: Shard = ALONE

    @property
    def name(self) -> str:
        """For people."""
        rank = f"rank {self.shard.rank} of " if self.shard.size > 1 else ""
        return f"{rank}stage {self.stage} of {self.pipeline}"


class Follower:
    """`put` and `lose` from any thread; the engine's makes one `step` after the other while `can_step`,
    between those of its own instances. Whatever goes wrong ends it: the leader is told and every page given
    back."""

    def __init__(
        self,
        part: Part,
        *,
        host: str,
        timeout_s: float,
        join_within_s: float,
        wake: Callable[[], None],
        on_frame: OnFrame,
        on_ended: Callable[[str, str], None],
    ) -> None:
        """host: at which other ranks of its stage reach it. wake: `can_step`, perhaps. on_frame: what the
        next stage says. on_ended: in the engine's thread, the pipeline and why, when all pages are given
        back."""
        self.part, self.is_over, self.has_started = part, False, False
        self.reason = ""  # why it is over
        self.num_steps = 0
        self._timeout_s, self._wake, self._on_frame, self._on_ended = timeout_s, wake, on_frame, on_ended
        self._mail: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._leader: Hop | None = None
        self._leader_name = ""
        self._before: Hop | None = None  # that brings the steps
        self._next: list[Hop] = []  # to the ranks of the next stage
        self._join: JoinPipeline | None = None
        self._device = part.cache.pool.backend.device
        self._ranks = Ranks(
            part.shard, host, str(self._device), timeout_s, lambda: self._post(self._tell_started)
        )
        self._patience = threading.Timer(join_within_s, self._was_forgotten, (join_within_s,))
        self._patience.daemon = True
        self._patience.start()

    @property
    def pipeline(self) -> str:
        return self.part.pipeline

    # ----------------------------------------------------------------------------- from other threads

    def put(self, hop: Hop, message: Received, behind: torch.Tensor) -> None:
        self._post(lambda: self._take(hop, message, behind))

    def lose(self, hop: Hop, reason: str) -> None:
        self._post(lambda: self._lost(hop, reason))

    def _was_forgotten(self, seconds: float) -> None:
        def look() -> None:
            if self._leader is None:
                self.end(f"no leader came within {seconds:g} s")

        self._post(look)

    def _post(self, call: Callable[[], None]) -> None:
        self._mail.put(call)
        self._wake()

    # ----------------------------------------------------------------------------- the engine's thread

    @property
    def can_step(self) -> bool:
        return not self.is_over and not self._mail.empty()

    def step(self) -> None:
        """What came first. Raises only what makes the device useless."""
        try:
            self._mail.get_nowait()()
        except Empty:
            return
        except DEVICE_ERRORS:
            raise
        except Refused as error:
            self.end(str(error))
        except PeerLost as error:
            self.end(f"another rank of its stage is gone: {error}")
        except Exception as error:
            log.exception("%s failed", self.part.name)
            self.end(f"its step failed: {type(error).__name__}: {error}")

    def end(self, reason: str) -> None:
        """It is over here; the leader hears why. Repeating it is harmless."""
        if self.is_over:
            return
        self.is_over, self.reason = True, reason
        self._patience.cancel()
        if self._leader:
            self._leader.send(StageFailed(pipeline=self.pipeline, stage=self.part.stage, reason=reason))
            self._leader.close()
        for hop in self._next:
            hop.close()
        self._ranks.close()  # before the pages go: a GPU may still wait in a sum
        self.part.release()
        log.info("%s has ended: %s", self.part.name, reason)
        self._on_ended(self.pipeline, reason)

    def ask_to_end(self, reason: str) -> None:
        """Its worker is to leave: the leader lets requests end before."""
        if self._leader and not self.is_over:
            self._leader.send(StageDraining(pipeline=self.pipeline, stage=self.part.stage, reason=reason))

    def _lost(self, hop: Hop, reason: str) -> None:
        if hop is self._leader:
            self.end(f"its leader {self._leader_name} is gone: {reason}")
        elif hop is self._before or hop in self._next:
            self.end(f"the stage {'behind' if hop in self._next else 'before'} it is gone: {reason}")

    def _take(self, hop: Hop, message: Received, behind: torch.Tensor) -> None:
        match message:
            case JoinPipeline():
                self._answer(hop, message)
            case StartPipeline() if hop is self._leader:
                self._start(message)
            case RunStage():
                self._before = hop
                self._run(message, behind)
            case MoveBlocks():
                self._before = hop
                self._move(message)
            case EndPipeline() if hop is self._leader:
                self.end(f"its leader {self._leader_name} ended it: {message.reason}")
            case StartPipeline() | EndPipeline():
                pass  # from one that does not lead it
            case StageFailed():  # the next stage's word, before its connection ends
                raise Refused(f"stage {message.stage} behind it has ended: {message.reason}")
            case _:
                raise Refused(f"{type(message).__name__} is nothing that a stage can do")

    # ----------------------------------------------------------------------------- coming together

    def _answer(self, hop: Hop, join: JoinPipeline) -> None:
        """Joins, or tells why not and stays as it is."""
        part = self.part
        if reason := self._refusal(join):
            hop.send(PipelineJoined(pipeline=self.pipeline, stage=part.stage, reason=reason))
            return
        self._leader, self._leader_name, self._join = hop, join.leader, join
        self._next = [
            Hop(
                knock(door.address, door.key),
                self._timeout_s,
                self._on_frame,
                self.lose,
                is_pinned=hop.is_pinned,
            )
            for door in join.next
        ]
        hop.send(
            PipelineJoined(
                pipeline=self.pipeline,
                stage=part.stage,
                store=self._ranks.store,
                blocks=part.cache.num_blocks,
                shape=part.model.shape(),
            )
        )

    def _refusal(self, join: JoinPipeline) -> str:
        part, config = self.part, self.part.model.config
        if self._leader:
            return f"{self._leader_name} leads it already"
        layers = (config.first_layer, config.first_layer + config.num_layers)
        for name, own, wanted in (
            ("stage", part.stage, join.stage),
            ("rank", part.shard.rank, join.rank),
            ("number of ranks", part.shard.size, join.tp),
            ("worker's epoch", part.epoch, join.epoch),
            ("range of layers", layers, (join.first, join.end)),
            ("hidden size", config.hidden_size, join.hidden_size),
            ("dtype", str(part.model.dtype), join.dtype),
            ("block_tokens", part.cache.block_tokens, join.block_tokens),
        ):
            if own != wanted:
                return f"its {name} is {own}; {join.leader} wants {wanted}"
        if join.digest and part.digest and join.digest != part.digest:
            return f"its checkpoint is another one than {join.leader}'s"
        return ""

    def _start(self, start: StartPipeline) -> None:
        cache = self.part.cache
        if cache.num_blocks < start.blocks:
            raise Refused(f"{start.blocks} KV blocks are wanted and it has {cache.num_blocks}")
        cache.limit(start.blocks)
        self._ranks.meet(start.meeting, start.store)
        self._tell_started()

    def _tell_started(self) -> None:
        """When the ranks of its stage have met."""
        if self.has_started or not self._ranks.have_met:
            return
        self.has_started = True
        assert self._leader
        self._leader.send(PipelineStarted(pipeline=self.pipeline, stage=self.part.stage))

    # ----------------------------------------------------------------------------- steps

    def _run(self, run: RunStage, behind: torch.Tensor) -> None:
        """Its share of the step; what the ranks made together is sent on by the first of them."""
        model, cache, work = self.part.model, self.part.cache, unpack(run.work)
        assert self._leader and self._join
        residual = (
            behind.view(model.dtype).view(-1, model.config.hidden_size).to(self._device, non_blocking=True)
        )
        rows = to_tensor(work.logit_rows, self._device) if self._join.is_last else None
        plan = attention_plan(work, cache.block_tokens, self._device)
        residual = model.run(residual, plan, cache, rows, self._ranks.group)
        self.num_steps += 1
        if self.part.shard.rank:
            return
        made = to_host(residual)
        if self._join.is_last:
            self._leader.send(StageOutput(pipeline=self.pipeline, step=run.step), made)
        for hop in self._next:
            hop.send(run, made)

    def _move(self, move: MoveBlocks) -> None:
        sources, targets = (torch.tensor(each, device=self._device) for each in (move.sources, move.targets))
        for layer in self.part.cache.layers:
            copy_blocks(layer, sources, targets)
        for hop in self._next:
            hop.send(move)

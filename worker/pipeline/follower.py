"""A later stage of a pipeline: layers and their KV, under the block numbers of a leader elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import torch

from kernels import copy_blocks
from worker.engine.engine import DEVICE_ERRORS
from worker.engine.work import attention_plan, to_tensor
from worker.memory import KVCache
from worker.model import Model
from worker.parallel.links import knock
from worker.pipeline.hop import Hop, OnFrame, to_host
from worker.pipeline.wire import (
    Broken,
    Done,
    Join,
    Joined,
    Leave,
    Messages,
    Move,
    Run,
    Start,
    Started,
    unpack,
)

log = logging.getLogger(__name__)


class Refused(Exception):
    """It cannot do what the leader wants; the reason."""


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of a model, loaded for a pipeline, and a cache as large as it may be. `release`: every page
    back."""

    pipeline: str
    stage: int
    epoch: int
    model: Model
    cache: KVCache
    release: Callable[[], None]
    digest: str = ""


class Follower:
    """`put` and `lose` from any thread; the engine's makes one `step` after the other while `can_step`,
    between those of its own instances. Whatever goes wrong ends it: the leader is told and every page given
    back."""

    def __init__(
        self,
        part: Part,
        *,
        timeout_s: float,
        join_within_s: float,
        wake: Callable[[], None],
        on_frame: OnFrame,
        on_ended: Callable[[str, str], None],
    ) -> None:
        """wake: `can_step`, perhaps. on_frame: what the next stage says. on_ended: in the engine's thread,
        the pipeline and why, when all pages are given back."""
        self.part, self.is_over, self.has_started = part, False, False
        self.reason = ""  # why it is over
        self.num_steps = 0
        self._timeout_s, self._wake, self._on_frame, self._on_ended = timeout_s, wake, on_frame, on_ended
        self._mail: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._leader: Hop | None = None
        self._leader_name = ""
        self._before: Hop | None = None  # that brings the steps
        self._next: Hop | None = None
        self._join: Join | None = None
        self._device = part.cache.pool.backend.device
        self._patience = threading.Timer(join_within_s, self._was_forgotten, (join_within_s,))
        self._patience.daemon = True
        self._patience.start()

    @property
    def pipeline(self) -> str:
        return self.part.pipeline

    # ----------------------------------------------------------------------------- from other threads

    def put(self, hop: Hop, message: Messages, behind: torch.Tensor) -> None:
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
        except Exception as error:
            log.exception("stage %d of %s failed", self.part.stage, self.pipeline)
            self.end(f"its step failed: {type(error).__name__}: {error}")

    def end(self, reason: str) -> None:
        """It is over here; the leader hears why. Repeating it is harmless."""
        if self.is_over:
            return
        self.is_over, self.reason = True, reason
        self._patience.cancel()
        if self._leader:
            self._leader.send(Broken(pipeline=self.pipeline, stage=self.part.stage, reason=reason))
            self._leader.close()
        if self._next:
            self._next.close()
        self.part.release()
        log.info("stage %d of %s has ended: %s", self.part.stage, self.pipeline, reason)
        self._on_ended(self.pipeline, reason)

    def _lost(self, hop: Hop, reason: str) -> None:
        if hop is self._leader:
            self.end(f"its leader {self._leader_name} is gone: {reason}")
        elif hop in (self._before, self._next):
            self.end(f"the stage {'behind' if hop is self._next else 'before'} it is gone: {reason}")

    def _take(self, hop: Hop, message: Messages, behind: torch.Tensor) -> None:
        match message:
            case Join():
                self._answer(hop, message)
            case Start() if hop is self._leader:
                self._start(message.blocks)
            case Run():
                self._before = hop
                self._run(message, behind)
            case Move():
                self._before = hop
                self._move(message)
            case Leave() if hop is self._leader:
                self.end(f"its leader {self._leader_name} ended it: {message.reason}")
            case Start() | Leave():
                pass  # from one that does not lead it
            case Broken():  # the next stage's word, before its connection ends
                raise Refused(f"stage {message.stage} behind it has ended: {message.reason}")
            case _:
                raise Refused(f"{type(message).__name__} is nothing that a stage can do")

    # ----------------------------------------------------------------------------- coming together

    def _answer(self, hop: Hop, join: Join) -> None:
        """Joins, or tells why not and stays as it is."""
        part = self.part
        if reason := self._refusal(join):
            hop.send(Joined(pipeline=self.pipeline, stage=part.stage, reason=reason))
            return
        self._leader, self._leader_name, self._join = hop, join.leader, join
        if join.next_address:
            self._next = Hop(
                knock(join.next_address, join.next_key),
                self._timeout_s,
                self._on_frame,
                self.lose,
                is_pinned=hop.is_pinned,
            )
        hop.send(
            Joined(
                pipeline=self.pipeline,
                stage=part.stage,
                blocks=part.cache.num_blocks,
                shape=part.model.shape(),
            )
        )

    def _refusal(self, join: Join) -> str:
        part, config = self.part, self.part.model.config
        if self._leader:
            return f"{self._leader_name} leads it already"
        layers = (config.first_layer, config.first_layer + config.num_layers)
        for name, own, wanted in (
            ("stage", part.stage, join.stage),
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

    def _start(self, blocks: int) -> None:
        cache = self.part.cache
        if cache.num_blocks < blocks:
            raise Refused(f"{blocks} KV blocks are wanted and it has {cache.num_blocks}")
        cache.limit(blocks)
        self.has_started = True
        assert self._leader
        self._leader.send(Started(pipeline=self.pipeline, stage=self.part.stage))

    # ----------------------------------------------------------------------------- steps

    def _run(self, run: Run, behind: torch.Tensor) -> None:
        model, cache, work = self.part.model, self.part.cache, unpack(run)
        residual = behind.view(model.dtype).view(-1, model.config.hidden_size)
        rows = None if self._next else to_tensor(work.logit_rows, self._device)
        plan = attention_plan(work, cache.block_tokens, self._device)
        made = to_host(model.run(residual.to(self._device, non_blocking=True), plan, cache, rows))
        self.num_steps += 1
        if self._next:
            self._next.send(run, made)
        else:
            assert self._leader
            self._leader.send(Done(pipeline=self.pipeline, step=run.step), made)

    def _move(self, move: Move) -> None:
        sources, targets = (torch.tensor(each, device=self._device) for each in (move.sources, move.targets))
        for layer in self.part.cache.layers:
            copy_blocks(layer, sources, targets)
        if self._next:
            self._next.send(move)

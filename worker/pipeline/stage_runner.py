"""One stage of a pipeline, or one rank of it, run for a leader elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import torch

from worker.distributed import messages
from worker.distributed.communicator import PeerLost
from worker.distributed.transport import Link, to_host
from worker.engine.engine import DEVICE_ERRORS
from worker.engine.input_batch import attention_plan, to_tensor
from worker.memory import KVCache
from worker.model import Model
from worker.model.shard import ALONE, Shard
from worker.morph.target import MemberTarget
from worker.pipeline.ranks import Ranks

log = logging.getLogger(__name__)


class _Refused(Exception):
    """The stage cannot do what its leader wants; the message says why."""


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """Layers of a model, or a shard of them, for a pipeline, and their memory: as much KV as possible."""

    pipeline: str
    stage: int
    epoch: int
    model: Model
    target: MemberTarget
    release: Callable[[], None]
    digest: str = ""
    shard: Shard = ALONE

    @property
    def cache(self) -> KVCache:
        """The KV cache of these layers."""
        return self.target.resizer.cache

    @property
    def name(self) -> str:
        """The stage's name in messages and logs."""
        rank = f"rank {self.shard.rank} of " if self.shard.size > 1 else ""
        return f"{rank}stage {self.stage} of {self.pipeline}"


class RemoteStageRunner:
    """Runs one stage. Any failure ends it: the leader hears why, and every page is released.

    Any thread may call `put` and `lose`; the engine's thread calls `step` while `can_step`.
    """

    def __init__(
        self,
        stage: LoadedStage,
        *,
        host: str,
        timeout_s: float,
        join_within_s: float,
        wake: Callable[[], None],
        connect: Callable[[messages.Peer], Link],
        on_ended: Callable[[str, str], None],
    ) -> None:
        """Wait for the leader.

        wake: called when `can_step` may have become true. connect: opens a link for `put` and `lose`.
        on_ended: called in the engine's thread with pipeline and reason, once all pages are released.
        """
        self.stage, self.is_over, self.has_started = stage, False, False
        self.reason = ""  # why it is over
        self._wake, self._connect, self._on_ended = wake, connect, on_ended
        self._mail: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._leader: Link | None = None
        self._leader_name = ""
        self._source: Link | None = None  # over which steps come
        self._next: list[Link] = []  # links to the ranks of the next stage
        self._join: messages.JoinPipeline | None = None
        self._told: tuple[int, ...] = ()  # the facts of the status that was sent last
        self._ticket = 0  # of the last action that was carried out
        self._device = stage.cache.pool.backend.device
        on_met = partial(self._post, self._tell_started)
        self._ranks = Ranks(stage.shard, host, str(self._device), timeout_s, on_met)
        give_up = partial(self._give_up, join_within_s)
        self._patience = threading.Timer(join_within_s, self._post, (give_up,))
        self._patience.daemon = True
        self._patience.start()

    @property
    def pipeline(self) -> str:
        return self.stage.pipeline

    # ----------------------------------------------------------------------------- from other threads

    def put(self, link: Link, message: messages.PipelineMessage, payload: torch.Tensor) -> None:
        self._post(partial(self._take, link, message, payload))

    def lose(self, link: Link, reason: str) -> None:
        self._post(partial(self._lost, link, reason))

    def _post(self, call: Callable[[], None]) -> None:
        self._mail.put(call)
        self._wake()

    # ----------------------------------------------------------------------------- the engine's thread

    @property
    def can_step(self) -> bool:
        return not self.is_over and (not self._mail.empty() or self._has_news)

    def step(self) -> None:
        """Handle the first message in the mailbox, and tell the leader of a new status.

        Raises only what makes the device unusable.
        """
        try:
            if not self._mail.empty():
                self._mail.get_nowait()()
            self._tell()
        except DEVICE_ERRORS:
            raise
        except _Refused as error:
            self.end(str(error))
        except PeerLost as error:
            self.end(f"another rank of its stage is gone: {error}")
        except Exception as error:
            log.exception("%s failed", self.stage.name)
            self.end(f"its step failed: {type(error).__name__}: {error}")

    def end(self, reason: str) -> None:
        """End the stage and tell the leader why. Ending it again does nothing."""
        if self.is_over:
            return
        self.is_over, self.reason = True, reason
        self._patience.cancel()
        if self._leader:
            failed = messages.StageFailed(pipeline=self.pipeline, stage=self.stage.stage, reason=reason)
            self._leader.send(failed)
            self._leader.close()
        for link in self._next:
            link.close()
        self._ranks.close()  # before the pages go: a GPU may still wait in a sum
        self.stage.release()
        log.info("%s has ended: %s", self.stage.name, reason)
        self._on_ended(self.pipeline, reason)

    def ask_to_end(self, reason: str) -> None:
        """Tell the leader that this worker drains: requests may finish first."""
        if self._leader and not self.is_over:
            drains = messages.StageDraining(pipeline=self.pipeline, stage=self.stage.stage, reason=reason)
            self._leader.send(drains)

    def _give_up(self, seconds: float) -> None:
        if self._leader is None:
            self.end(f"no leader came within {seconds:g} s")

    def _lost(self, link: Link, reason: str) -> None:
        if link is self._leader:
            self.end(f"its leader {self._leader_name} is gone: {reason}")
        elif link is self._source or link in self._next:
            self.end(f"the stage {'behind' if link in self._next else 'before'} it is gone: {reason}")

    def _take(self, link: Link, message: messages.PipelineMessage, payload: torch.Tensor) -> None:
        match message:
            case messages.JoinPipeline():
                self._answer(link, message)
            case messages.StartPipeline() if link is self._leader:
                self._start(message)
            case messages.RunStage():
                self._source = link
                self._run(message, payload)
            case messages.RunHead():
                self.stage.model.logits(self._rows(payload), self._ranks.group)
            case messages.CarryOut():
                self._source = link
                self._carry_out(message)
            case messages.EndPipeline() if link is self._leader:
                self.end(f"its leader {self._leader_name} ended it: {message.reason}")
            case messages.StartPipeline() | messages.EndPipeline():
                pass  # not from its leader
            case messages.StageFailed():  # sent by the next stage before its link closes
                raise _Refused(f"stage {message.stage} behind it has ended: {message.reason}")
            case _:
                raise _Refused(f"{type(message).__name__} is nothing that a stage can do")

    # ----------------------------------------------------------------------------- coming together

    def _answer(self, link: Link, join: messages.JoinPipeline) -> None:
        """Join, or answer why not and stay as before."""
        stage = self.stage
        if reason := self._refusal(join):
            link.send(messages.PipelineJoined(pipeline=self.pipeline, stage=stage.stage, reason=reason))
            return
        self._leader, self._leader_name, self._join = link, join.leader, join
        self._next = [self._connect(peer) for peer in join.next]
        joined = messages.PipelineJoined(
            pipeline=self.pipeline,
            stage=stage.stage,
            store=self._ranks.store,
            blocks=stage.cache.num_blocks,
            shape=stage.model.shape(),
        )
        link.send(joined)

    def _refusal(self, join: messages.JoinPipeline) -> str:
        stage, config = self.stage, self.stage.model.config
        if self._leader:
            return f"{self._leader_name} leads it already"
        layers = (config.first_layer, config.first_layer + config.num_layers)
        for name, own, wanted in (
            ("stage", stage.stage, join.stage),
            ("rank", stage.shard.rank, join.rank),
            ("number of ranks", stage.shard.size, join.tp),
            ("worker's epoch", stage.epoch, join.epoch),
            ("range of layers", layers, (join.first, join.end)),
            ("hidden size", config.hidden_size, join.hidden_size),
            ("dtype", str(stage.model.dtype), join.dtype),
            ("block_tokens", stage.cache.block_tokens, join.block_tokens),
            ("KV cache (kv_dtype)", stage.cache.precision, join.kv_precision),
            (
                "longest sequence (worker.max_model_len)",
                config.max_position_embeddings,
                join.context or config.max_position_embeddings,
            ),
            ("size of a page", stage.cache.pool.page_bytes, join.page_bytes),
        ):
            if own != wanted:
                return f"its {name} is {own}; {join.leader} wants {wanted}"
        if join.digest and stage.digest and join.digest != stage.digest:
            return f"its checkpoint is another one than {join.leader}'s"
        return ""

    def _start(self, start: messages.StartPipeline) -> None:
        cache = self.stage.cache
        if cache.num_blocks < start.blocks:
            raise _Refused(f"{start.blocks} KV blocks are wanted and it has {cache.num_blocks}")
        self.stage.target.resizer.keep(start.blocks)
        self._ranks.meet(start.rendezvous, start.store)
        self._tell_started()

    @property
    def _facts(self) -> tuple[int, ...]:
        """The numbers that the status follows from: it is not made in each step, which costs more."""
        target = self.stage.target
        resizer = target.resizer
        return self._ticket, resizer.cache.pool.num_free, resizer.reserve_pages, target.num_prepared

    @property
    def _has_news(self) -> bool:
        """True if the status is another than the leader knows."""
        return self.has_started and self._facts != self._told

    def _tell(self) -> None:
        """Send the leader the status if it has changed."""
        if not self.is_over and self._has_news:
            assert self._leader
            self._told, status = self._facts, self.stage.target.status()
            told = messages.StageStatus(pipeline=self.pipeline, ticket=self._ticket, status=status)
            self._leader.send(told)

    def _tell_started(self) -> None:
        """Answer the leader once the ranks of this stage have met."""
        if self.has_started or not self._ranks.have_met:
            return
        self.has_started = True
        self._tell()

    # ----------------------------------------------------------------------------- steps

    def _run(self, run: messages.RunStage, payload: torch.Tensor) -> None:
        """Run this rank's share of a step. The first rank sends the result of all ranks on."""
        model, cache, work = self.stage.model, self.stage.cache, run.work
        assert self._leader and self._join
        group, is_first = self._ranks.group, model.config.has_ends
        plan = attention_plan(work, cache.block_tokens, self._device)
        if is_first:
            residual = model.embed(to_tensor(work.token_ids, self._device), group)
        else:
            residual = self._rows(payload)
        rows = to_tensor(work.logit_rows, self._device) if self._join.is_last else None
        residual = model.run(residual, plan, cache, rows, group)
        if is_first and self._join.is_last:
            model.logits(residual, group)
        if group:
            group.settle()
        if self.stage.shard.rank:
            return
        made = to_host(residual)
        if self._join.is_last:
            self._leader.send(messages.StageOutput(pipeline=self.pipeline, step=run.step), made)
        for link in self._next:
            link.send(run, made)

    def _rows(self, payload: torch.Tensor) -> torch.Tensor:
        """Return the rows [.., H] that another worker sent."""
        model = self.stage.model
        sent = payload.view(model.dtype).view(-1, model.config.hidden_size)
        return sent.to(self._device, non_blocking=True)

    def _carry_out(self, sent: messages.CarryOut) -> None:
        """Carry out an action of a morph behind the steps that came before, and pass it on."""
        for link in self._next:
            link.send(sent)
        self.stage.target.carry_out_at_stage(sent.action)
        self._ticket = sent.ticket

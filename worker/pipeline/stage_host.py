"""The stages that one worker runs for leaders elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from worker.distributed.messages import EndPipeline, JoinPipeline, Peer, PipelineMessage, StageFailed
from worker.distributed.transport import Link, Transport
from worker.morph.target import MemberTarget
from worker.pipeline.stage_runner import LoadedStage, RemoteStageRunner

MAX_EARLY = 64  # leaders that came before their stage was loaded


class StageHost:
    """The engine's thread owns the runners; threads of links put messages into their mailboxes."""

    def __init__(self, transport: Transport) -> None:
        self.wake: Callable[[], None] = lambda: None  # a runner may have work; called in any thread
        # Called in the engine's thread with the pipeline and why it ended, once its pages are released.
        self.on_ended: Callable[[str, str], None] = lambda pipeline, reason: None
        self.host, self.timeout_s, self.tls = transport.host, transport.timeout_s, transport.tls
        self._lock = threading.Lock()  # guards the next two
        self._runners: dict[str, RemoteStageRunner] = {}
        self._early: dict[str, tuple[Link, JoinPipeline]] = {}
        self._endpoint = transport.endpoint(PipelineMessage, self._take, self._lost)

    @property
    def runners(self) -> list[RemoteStageRunner]:
        with self._lock:
            return list(self._runners.values())

    def add(self, stage: LoadedStage, join_within_s: float) -> RemoteStageRunner:
        """Run `stage` for its leader, who may have connected already. Raises ValueError for a second one."""
        runner = RemoteStageRunner(
            stage,
            host=self.host,
            timeout_s=self.timeout_s,
            join_within_s=join_within_s,
            wake=lambda: self.wake(),
            connect=self._connect,
            on_ended=self._ended,
        )
        with self._lock:
            if stage.pipeline in self._runners:
                raise ValueError(f"a stage of {stage.pipeline} is here already")
            self._runners[stage.pipeline] = runner
            early = self._early.pop(stage.pipeline, None)
        if early:
            runner.put(*early, torch.empty(0))
        return runner

    @property
    def targets(self) -> list[MemberTarget]:
        """The layers and the KV of the stages that run here."""
        return [each.stage.target for each in self.runners if not each.is_over]

    @property
    def has_ranks(self) -> bool:
        """True if a stage here waits for other ranks within its steps (`worker.pipeline.ranks`)."""
        return any(each.stage.shard.size > 1 and not each.is_over for each in self.runners)

    @property
    def is_empty(self) -> bool:
        """True if no stage runs here."""
        return all(runner.is_over for runner in self.runners)

    @property
    def can_step(self) -> bool:
        return any(runner.can_step for runner in self.runners)

    def step(self) -> None:
        """Let each runner with work take one step, so that none starves another."""
        for runner in self.runners:
            if runner.can_step:
                runner.step()

    def end(self, pipeline: str, reason: str) -> bool:
        """End the stage of `pipeline`. Returns False if there is none here."""
        with self._lock:
            runner = self._runners.get(pipeline)
        if runner:
            runner.end(reason)
        return runner is not None

    def ask_to_end(self, reason: str) -> None:
        """Tell the leaders that this worker drains: they let requests finish and end their pipelines."""
        for runner in self.runners:
            runner.ask_to_end(reason)

    def fence(self) -> None:
        """End all stages: their leaders know an epoch of this worker that is over."""
        for runner in self.runners:
            runner.end("its worker has lost its lease")

    def close(self) -> None:
        """End all stages and release their pages; the worker leaves."""
        for runner in self.runners:
            runner.end("the worker leaves")
        self._endpoint.close()

    def _ended(self, pipeline: str, reason: str) -> None:
        with self._lock:
            self._runners.pop(pipeline, None)
        self.on_ended(pipeline, reason)

    def _connect(self, peer: Peer) -> Link:
        return self._endpoint.connect(peer.address, peer.key)

    def _take(self, link: Link, message: PipelineMessage, payload: torch.Tensor) -> None:
        with self._lock:
            runner = self._runners.get(message.pipeline)
            if runner is None and isinstance(message, JoinPipeline) and len(self._early) < MAX_EARLY:
                self._early[message.pipeline] = link, message
                return
            if runner is None and isinstance(message, EndPipeline):
                self._early.pop(message.pipeline, None)
        if runner:
            runner.put(link, message, payload)
        elif not isinstance(message, StageFailed | EndPipeline):
            reason = "there is no such stage any more"
            link.send(StageFailed(pipeline=message.pipeline, stage=-1, reason=reason))

    def _lost(self, link: Link, reason: str) -> None:
        with self._lock:
            self._early = {name: early for name, early in self._early.items() if early[0] is not link}
        for runner in self.runners:
            runner.lose(link, reason)

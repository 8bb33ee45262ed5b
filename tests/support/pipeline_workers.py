"""Workers of one process that are stages of a pipeline: an engine's thread each, real sockets between
them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.common.engines import fill_cache
from bench.common.loading import load_model
from bus.messages import PageCounts, SamplingParams, Stage, TokenLogprobs
from bus.morphs import MorphReport
from tests.support.threaded_worker import ThreadedWorker
from worker.distributed.messages import Peer
from worker.distributed.transport import Transport
from worker.engine.build import make_cache, useful_blocks
from worker.engine.core import EngineCore
from worker.engine.engine import Engine, StepResult
from worker.engine.grammars import GrammarCompiler
from worker.engine.outputs import Output
from worker.engine.sequence import Limits, own_request
from worker.memory import CpuBackend, KVCache, PagePool
from worker.model import Model
from worker.model.shard import ALONE, Shard
from worker.morph.manager import MorphManager
from worker.morph.variants import NoVariants, Variants
from worker.pipeline.build import leader_target, stage_target, start_leading
from worker.pipeline.executor import PipelineExecutor
from worker.pipeline.pipeline import RemoteStage
from worker.pipeline.split import in_turn
from worker.pipeline.stage_host import StageHost
from worker.pipeline.stage_runner import LoadedStage
from worker.service.engine_thread import EngineThread, Snapshot
from worker.shape.host_store import HostMemory
from worker.shape.variants import LayerVariants

WAIT_S = 30.0
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=256, block_tokens=4)


class StageWorker(ThreadedWorker):
    """`ended` pipelines, and why; `cached[request]`: tokens of its prompt found in the prefix cache."""

    def __init__(self, name: str, *, megabytes: float = 8, timeout_s: float = 20.0) -> None:
        super().__init__(name)
        self.pool = PagePool(CpuBackend(4096), int(megabytes * 1024 * 1024))
        self.transport = Transport("127.0.0.1", timeout_s)
        self.stages = StageHost(self.transport)
        self.engine = Engine()
        self.engine.stages = self.stages
        self.logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.cached: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.told_pages: PageCounts | None = None  # in the last snapshot
        self.morphs = MorphManager(name, {})
        self.reports: list[MorphReport] = []
        self.thread = EngineThread(
            self.engine,
            self.pool.counts,
            self.morphs,
            snapshot_s=1.0,
            on_results=self._results,
            on_snapshot=self._told,
            on_reports=self._reports,
            on_death=self._died,
        )
        self.stages.wake = self.wake
        self.stages.on_ended = self._ended
        self.thread.fence(self.epoch)
        self.thread.start()

    def _reports(self, reports: list[MorphReport]) -> None:
        with self._changed:
            self.reports += reports
            self._changed.notify_all()

    def end_of(self, morph: str) -> MorphReport:
        def ended() -> list[MorphReport]:
            return [report for report in self.reports if report.id == morph and report.state != "running"]

        self.wait(lambda: bool(ended()), f"the end of morph {morph}")
        return ended()[0]

    def _told(self, snapshot: Snapshot) -> None:
        self.told_pages = snapshot.pages

    def wake(self) -> None:
        self.thread._inbox.put(lambda: None)

    def submit(
        self,
        instance: str,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        embeds: bool = False,
        **sampling: Any,
    ) -> None:
        params = sampling_of(max_tokens, **sampling)
        self.tokens[name] = []
        self.thread.submit(
            instance,
            replace(own_request(name, prompt, params), cache_salt="", embeds=embeds),
        )

    def is_empty(self) -> bool:
        return bool(self.call(lambda: self.pool.num_free == self.pool.num_pages))

    def stop(self) -> None:
        if self.thread._thread.is_alive():
            self.call(self.stages.close)
            self.thread.stop()
        self.transport.close()

    def take(self, result: StepResult, output: Output) -> None:
        delta, known = output.delta, self.logprobs.setdefault(output.request.request_id, [])
        known += delta.prompt_logprobs or []
        self.cached[delta.request_id] = self.cached.get(delta.request_id, 0) + delta.cached_tokens
        known += delta.logprobs or []

    def _ended(self, pipeline: str, reason: str) -> None:
        with self._changed:
            self.ended[pipeline] = reason
            self._changed.notify_all()


def sampling_of(max_tokens: int, **sampling: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, **sampling})


def load(
    folder: Path,
    pool: PagePool,
    layers: tuple[int, int],
    limits: Limits,
    dtype: torch.dtype,
    shard: Shard = ALONE,
    host_dir: Path | None = None,
) -> tuple[Model, KVCache, Variants]:
    """Load layers with as much KV as there is room for.

    host_dir: of the images of variants; None: it has none.
    """
    model = load_model(folder, pool, dtype=dtype, layers=layers, rank=shard)
    variants: Variants = NoVariants()
    if host_dir:
        variants = LayerVariants(model, pool, precisions=["int8", "int4"], memory=HostMemory(host_dir))
    cache = make_cache(pool, model, limits, "m")
    fill_cache(pool, cache, model, limits)
    return model, cache, variants


def release(model: Model, cache: KVCache, variants: Variants) -> None:
    cache.release()
    variants.release()
    model.release()


def follow(
    folder: Path,
    worker: StageWorker,
    pipeline: str,
    layers: tuple[int, int],
    *,
    stage: int = 1,
    epoch: int = 1,
    limits: Limits = LIMITS,
    dtype: torch.dtype = torch.float32,
    join_within_s: float = WAIT_S,
    shard: Shard = ALONE,
    host_dir: Path | None = None,
) -> None:
    model, cache, variants = load(folder, worker.pool, layers, limits, dtype, shard, host_dir)
    target = stage_target(model, cache, variants, useful_blocks=useful_blocks(limits))
    worker.morphs.equip(target)

    def let_go() -> None:
        target.drop_all()
        release(model, cache, variants)

    part = LoadedStage(pipeline, stage, epoch, model, target, let_go, shard=shard)
    worker.stages.add(part, join_within_s)


class Line:
    """One instance over workers: layers [bounds[i], bounds[i + 1]) at each `tp` of them in turn. `with` gives
    everything back."""

    def __init__(
        self,
        folder: Path,
        bounds: list[int],
        *,
        tp: int = 1,
        blocks: int = 60,
        max_blocks: int = 0,
        workers: list[StageWorker] | None = None,
        timeout_s: float = 20.0,
        limits: Limits = LIMITS,
        name: str = "m",
        dtype: torch.dtype = torch.float32,
        host_dir: Path | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._host_dir = host_dir
        parts = list(pairwise(bounds))
        self.workers = workers or [StageWorker(f"w{i}", timeout_s=timeout_s) for i in range(len(parts) * tp)]
        self.leader, self.id = self.workers[0], f"{name}@{self.workers[0].name}"
        for i, worker in enumerate(self.workers[1:], start=1):
            stage, shard = i // tp, Shard(i % tp, tp)
            worker.call(partial(self._follow, folder, worker, parts[stage], stage, limits, dtype, shard))
        seats = [
            Peer(worker.name, worker.epoch, worker.transport.address, worker.transport.key)
            for worker in self.workers
        ]
        behind = [
            RemoteStage(*layers, seats[stage * tp : (stage + 1) * tp])
            for stage, layers in enumerate(parts[1:], start=1)
        ]
        model, cache, variants = self.leader.call(
            partial(load, folder, self.leader.pool, parts[0], limits, dtype, Shard(0, tp), host_dir)
        )
        self._release = partial(release, model, cache, variants)
        if max_blocks:
            self.leader.call(partial(cache.limit, max_blocks))
        steps = start_leading(
            self.id,
            self.leader.name,
            model,
            cache,
            limits,
            behind,
            beside=seats[1:tp],
            blocks=blocks,
            timeout_s=timeout_s,
            wake=self.leader.wake,
            grammars=grammars,
        )
        self.instance: EngineCore = self.leader.call(lambda: _run(steps))
        assert isinstance(self.instance.executor, PipelineExecutor)
        self.model, self.cache, self.executor = model, cache, self.instance.executor
        stages = [Stage(workers=[], first=first, end=end) for first, end in parts]
        self.target = leader_target(
            self.instance,
            cache,
            variants,
            in_turn(range(bounds[-1]), stages),
            useful_blocks=useful_blocks(limits),
        )
        self.leader.call(self._serve)

    def _serve(self) -> None:
        self.leader.engine.add_instance(self.instance)
        self.leader.morphs.add(self.target)

    def _follow(
        self,
        folder: Path,
        worker: StageWorker,
        layers: tuple[int, int],
        stage: int,
        limits: Limits,
        dtype: Any,
        shard: Shard,
    ) -> None:
        follow(
            folder,
            worker,
            self.id,
            layers,
            stage=stage,
            limits=limits,
            dtype=dtype,
            shard=shard,
            host_dir=self._host_dir,
        )

    def release(self) -> None:
        """The leader's own pages."""
        self._release()

    def submit(self, name: str, prompt: list[int], max_tokens: int, **sampling: Any) -> None:
        self.leader.submit(self.id, name, prompt, max_tokens, **sampling)

    def end(self, reason: str = "retired") -> None:
        """Remove the instance as a Retire does."""

        def release() -> None:
            self.leader.engine.send_away(self.id, reason)
            self.leader.engine.remove_instance(self.id)
            self.leader.morphs.targets.pop(self.id)
            self.instance.close()
            self.release()

        self.leader.call(release)

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.stop()


def _run(steps: Any) -> Any:
    ends_at = time.monotonic() + WAIT_S
    while True:
        try:
            next(steps)
            assert time.monotonic() < ends_at
            time.sleep(0.005)
        except StopIteration as end:
            return end.value

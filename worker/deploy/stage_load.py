"""Load one stage of several: as `worker.deploy.load`, up to where the stages meet.

A later stage waits until its leader has fixed the number of blocks. Without a leader it gives its pages back.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from functools import partial

from bus.messages import InstanceCard
from bus.morphs import Deploy
from worker.deploy.load import LoadRun
from worker.deploy.model_host import ModelHost
from worker.distributed.messages import Peer
from worker.engine.build import canary_steps, useful_blocks
from worker.morph.losses import losses_of
from worker.morph.run import NotApplied, Peers, Steps
from worker.morph.target import Target
from worker.pipeline.build import leader_target, stage_target, start_leading
from worker.pipeline.executor import PipelineExecutor
from worker.pipeline.pipeline import PipelineLost, RemoteStage
from worker.pipeline.split import in_turn, leader_of, over_layers, pipeline_of
from worker.pipeline.stage_host import StageHost
from worker.pipeline.stage_runner import LoadedStage
from worker.shape.copier import Copier

# For requests to end before a stage elsewhere leaves; that worker does not wait longer than it may itself.
GOING_WAIT_S = 30.0
JOIN_WITHIN_S = 300.0  # time for the leader's own load; the controller gives up sooner


class StageLoadRun(LoadRun):
    """The load of a later stage, or of another rank of the first; it gets no requests and shows no card."""

    def __init__(self, command: Deploy, host: ModelHost, copier: Copier) -> None:
        """Prepare the load of one stage. Raises NotApplied."""
        super().__init__(command, host, copier)
        _refuse_second_group(command, host)

    def _serve(self) -> Steps:
        command, loader = self._command, self._loader
        _refuse_second_group(command, self._host)  # another may have come meanwhile
        yield from self._fill_cache()
        loader.model.complete()
        self._target = target = stage_target(
            loader.model,
            loader.cache,
            loader.variants,
            useful_blocks=useful_blocks(loader.limits),
            reserve_pages=self._host.reserve_pages,
        )
        self._host.morphs.equip(target)
        loader.let_convert(target)
        part = LoadedStage(
            pipeline_of(command),
            command.stage,
            command.epoch,
            loader.model,
            target,
            self._let_go,
            command.digest,
            loader.config.own.rank,
        )
        follower = _stages(self._host).add(part, JOIN_WITHIN_S)
        self._host.update_reserve()
        self._host.on_changed()
        self._stage = f"waiting for {leader_of(command)}, which leads"
        try:
            while not follower.has_started:
                if follower.is_over:
                    raise NotApplied("failed", follower.reason)
                yield False
        except GeneratorExit:
            follower.end("its deployment was given up")
            raise

    def _let_go(self) -> None:
        self._target.drop_all()
        self._loader.release()
        self._host.update_reserve()
        self._return_lent_pages()
        self._host.on_changed()

    def _came(self) -> None:
        pass


class PipelineLoadRun(LoadRun):
    """The load of the first stage, which leads the pipeline."""

    def __init__(self, command: Deploy, host: ModelHost, copier: Copier, peers: Peers) -> None:
        """peers: by worker, where the stages are reached. Raises NotApplied where one is missing."""
        super().__init__(command, host, copier)
        self._beside = [_peer(command, 0, worker, peers) for worker in command.stages[0].workers[1:]]
        self._behind = [_behind(command, number, peers) for number in range(1, len(command.stages))]
        _refuse_second_group(command, host)

    def _open(self) -> Generator[bool, None, Target]:
        command, loader, host = self._command, self._loader, self._host
        _refuse_second_group(command, host)  # another may have come meanwhile
        yield from self._fill_cache()
        cache, pages = loader.cache, loader.cache.pages_per_layer
        loader.model.complete()
        self._stage = "waiting for the other stages"
        try:
            instance = yield from start_leading(
                command.instance,
                host.worker,
                loader.model,
                cache,
                loader.limits,
                self._behind,
                beside=self._beside,
                host=_stages(host).host,
                timeout_s=_stages(host).timeout_s,
                tls=_stages(host).tls,
                wake=lambda: _stages(host).wake(),
                blocks=max(1, command.blocks),
                digest=command.digest,
                grammars=loader.make_grammars(),
            )
        except PipelineLost as error:
            raise NotApplied("failed", str(error)) from error
        self._stage = "its first request"
        try:
            for _ in canary_steps(instance):
                yield instance.can_step
        except BaseException:
            instance.close()
            raise
        instance.on_lost = partial(host.retire, command.instance, wait_s=0.0)
        assert isinstance(instance.executor, PipelineExecutor)
        instance.executor.on_going = partial(host.retire, command.instance, wait_s=GOING_WAIT_S)
        precisions = loader.variants.precisions
        losses = losses_of(loader.num_layers, precisions, over_layers(loader.losses), precisions[0])
        target = leader_target(
            instance,
            cache,
            loader.variants,
            in_turn(loader.order, command.stages),
            losses,
            useful_blocks=useful_blocks(loader.limits),
            own_pages=(pages - cache.pages_per_layer) * cache.num_layers,
            reserve_pages=host.reserve_pages,
        )
        target.kv_loss = loader.kv_loss
        loader.let_convert(target)
        return target

    def _card(self, target: Target) -> InstanceCard:
        stages = self._command.stages
        return replace(
            super()._card(target),
            tp=len(stages[0].workers),
            pp=len(stages),
            stages=list(stages),
            workers=[worker for stage in stages for worker in stage.workers],
            num_layers=stages[-1].end,
            degrees=[1],
        )


def _behind(command: Deploy, number: int, peers: Peers) -> RemoteStage:
    stage = command.stages[number]
    workers = [_peer(command, number, worker, peers) for worker in stage.workers or [""]]
    return RemoteStage(stage.first, stage.end, workers)


def _peer(command: Deploy, number: int, worker: str, peers: Peers) -> Peer:
    peer = peers.get(worker)
    if peer is None:
        why = f"stage {number} at {worker} cannot be reached: it is not there, or has no worker.group_host"
        raise NotApplied("failed", why)
    return Peer(worker, command.epochs.get(worker, peer.epoch), peer.address, peer.key)


def _refuse_second_group(command: Deploy, host: ModelHost) -> None:
    """Raise NotApplied for a second group of ranks (`worker.pipeline.ranks`)."""
    stages = _stages(host)
    leads = any(one.card.is_divided and one.card.tp > 1 for one in host.models.values())
    if len(command.stages[0].workers) > 1 and (stages.has_ranks or leads):
        why = "it is a rank of a stage of several workers already, and could wait for both crosswise"
        raise NotApplied("conflict", f"{host.worker}: {why}")


def _stages(host: ModelHost) -> StageHost:
    if host.stages is None:
        raise NotApplied("failed", "this worker takes no part in pipelines: worker.group_host is empty")
    return host.stages

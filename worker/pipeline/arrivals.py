"""A Deploy of one stage of several, as it runs: as `worker.deploy.arrival`, up to where the stages meet.

::

    a later stage   its weights, as much KV as there is room for; then it waits for its leader, and has ended
                    when the leader has told it how many blocks there are
    the first one   its weights and KV; then it asks the others, and a first request goes through all of them

A stage that nobody leads, since the leader's Deploy failed or was cancelled, gives its pages back.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import replace

from bus.messages import Deploy, InstanceCard
from worker.deploy.arrival import ArrivalRun, CardOf, Steps
from worker.deploy.site import Site
from worker.distributed.messages import Peer
from worker.engine.build import canary_steps
from worker.morph.outcome import NotApplied
from worker.morph.resizer import KVResizer
from worker.morph.run import Clock
from worker.morph.target import Target
from worker.pipeline.build import start_leading
from worker.pipeline.executor import PipelineExecutor
from worker.pipeline.kept import KeptVariants
from worker.pipeline.pipeline import PipelineLost, RemoteStage
from worker.pipeline.split import leader_of, pipeline_of
from worker.pipeline.stage_host import StageHost
from worker.pipeline.stage_runner import LoadedStage
from worker.shape.copier import Copier

JOIN_WITHIN_S = 300.0  # for the leader's own load; who orders it gives up before


class FollowerArrival(ArrivalRun):
    """Of a later stage, or another rank of the first: nobody's requests come here, so no card is shown."""

    def __init__(
        self,
        command: Deploy,
        site: Site,
        loader: Copier,
        card_of: CardOf,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises NotApplied."""
        super().__init__(command, site, loader, card_of, clock=clock)
        _refuse_second_group(command, site)

    def _serve(self) -> Steps:
        command, newcomer = self._command, self._newcomer
        _refuse_second_group(command, self._site)  # another may have come meanwhile
        yield from self._fill_cache()
        assert newcomer.cache
        newcomer.model.complete()
        part = LoadedStage(
            pipeline_of(command),
            command.stage,
            command.epoch,
            newcomer.model,
            newcomer.cache,
            self._let_go,
            command.digest,
            newcomer.shard,
        )
        follower = _stages(self._site).add(part, JOIN_WITHIN_S)
        self._site.on_changed()
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
        self._newcomer.release()
        self._give_back_all()
        self._site.on_changed()

    def _came(self) -> None:
        pass


class LeaderArrival(ArrivalRun):
    """Of the first stage."""

    def __init__(
        self,
        command: Deploy,
        site: Site,
        loader: Copier,
        card_of: CardOf,
        peers: Mapping[str, Peer],
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """peers: by worker, where the stages are reached. Raises NotApplied where one is missing."""
        super().__init__(command, site, loader, lambda *of: self._card(card_of(*of)), clock=clock)
        self._beside = [_seat(command, 0, worker, peers) for worker in command.stages[0].workers[1:]]
        self._behind = [_behind(command, number, peers) for number in range(1, len(command.stages))]
        _refuse_second_group(command, site)

    def _open(self) -> Generator[bool, None, Target]:
        command, newcomer, site = self._command, self._newcomer, self._site
        _refuse_second_group(command, site)  # another may have come meanwhile
        yield from self._fill_cache()
        cache = newcomer.cache
        assert cache
        newcomer.model.complete()
        self._stage = "waiting for the other stages"
        try:
            instance = yield from start_leading(
                command.instance,
                site.worker,
                newcomer.model,
                cache,
                newcomer.limits,
                self._behind,
                beside=self._beside,
                host=_stages(site).host,
                timeout_s=_stages(site).timeout_s,
                wake=lambda: _stages(site).wake(),
                blocks=max(1, command.blocks),
                digest=command.digest,
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
        instance.on_lost = lambda reason: site.on_lost(command.instance, reason)
        assert isinstance(instance.executor, PipelineExecutor)
        instance.executor.on_going = lambda reason: site.on_going(command.instance, reason)
        useful = min(newcomer.useful_kv_pages, cache.num_layers * cache.pages_per_layer)
        resizer = KVResizer(instance, cache, reserve_pages=0, useful_pages=useful, owns_rest=False)
        kept = KeptVariants(newcomer.variants, command.precision, cache.num_layers)
        return Target(instance, kept, resizer, newcomer.order)

    def _card(self, card: InstanceCard) -> InstanceCard:
        stages = self._command.stages
        return replace(
            card,
            tp=len(stages[0].workers),
            pp=len(stages),
            stages=list(stages),
            workers=[worker for stage in stages for worker in stage.workers],
            num_layers=stages[-1].end,
            degrees=[1],
        )


def _behind(command: Deploy, number: int, peers: Mapping[str, Peer]) -> RemoteStage:
    stage = command.stages[number]
    first, *others = [_seat(command, number, worker, peers) for worker in stage.workers or [""]]
    return RemoteStage(
        first.worker, first.epoch, first.address, first.key, stage.first, stage.end, tuple(others)
    )


def _seat(command: Deploy, number: int, worker: str, peers: Mapping[str, Peer]) -> Peer:
    peer = peers.get(worker)
    if peer is None:
        why = f"stage {number} at {worker} cannot be reached: it is not there, or has no worker.group_host"
        raise NotApplied("failed", why)
    return Peer(worker, command.epochs.get(worker, peer.epoch), peer.address, peer.key)


def _refuse_second_group(command: Deploy, site: Site) -> None:
    """Why: `worker.pipeline.ranks`."""
    stages = _stages(site)
    leads = any(one.card.pp > 1 and one.card.tp > 1 for one in site.residents.values())
    if len(command.stages[0].workers) > 1 and (stages.has_ranks or leads):
        why = "it is a rank of a stage of several workers already, and could wait for both crosswise"
        raise NotApplied("conflict", f"{site.worker}: {why}")


def _stages(site: Site) -> StageHost:
    if site.stages is None:
        raise NotApplied("failed", "this worker takes no part in pipelines: worker.group_host is empty")
    return site.stages

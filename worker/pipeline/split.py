"""The layers of each stage, and the part of them of each worker, as a Deploy says. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bus.messages import Stage
from bus.morphs import Deploy
from worker.model.config import ModelConfig
from worker.model.shard import Shard
from worker.morph.losses import Measured
from worker.morph.run import NotApplied


def own_part(config: ModelConfig, command: Deploy, worker: str) -> ModelConfig:
    """Return what `worker` has of the model: its layers, and its part of them as one of several ranks.

    Raises NotApplied for stages that do not fit, and ModelError for a degree that cannot be.
    """
    stages = command.stages
    if not command.is_divided:
        return config
    check_stages(config, stages)
    if not 0 <= command.stage < len(stages) or worker not in stages[command.stage].workers:
        raise NotApplied("failed", f"there is no stage {command.stage} of {len(stages)} for {worker}")
    own = stages[command.stage]
    rank = Shard(own.workers.index(worker), len(own.workers))
    return config.part(own.first, own.end).of_rank(rank)


def check_stages(config: ModelConfig, stages: list[Stage]) -> None:
    """Raise NotApplied unless the stages are all the layers, in order, on as many workers each."""
    at = 0
    for number, stage in enumerate(stages):
        if not stage.workers or len(stage.workers) != len(stages[0].workers):
            why = f"stage {number} is for {len(stage.workers)} workers, stage 0 for {len(stages[0].workers)}"
            raise NotApplied("failed", f"{why}: all stages of a pipeline have the same degree")
        if stage.first != at or stage.end <= at:
            why = f"stage {number} has layers [{stage.first}, {stage.end}); layer {at} is next"
            raise NotApplied("failed", why)
        at = stage.end
    if at != config.num_layers:
        raise NotApplied("failed", f"the stages end at layer {at}; the model has {config.num_layers}")
    workers = [worker for stage in stages for worker in stage.workers]
    if len(set(workers)) < len(workers):
        raise NotApplied("failed", f"a worker has two places in the stages: {', '.join(workers)}")


def in_turn(order: Sequence[int], stages: Sequence[Stage]) -> list[int]:
    """Return the layers of all stages in turn, by the share of its layers that each has given before.

    All stages have as many KV blocks: pages that one alone sets free are of no use. order: within a stage.
    """
    place = {layer: i for i, layer in enumerate(order)}
    turns = []
    for stage in stages:
        own = sorted(range(stage.first, stage.end), key=place.__getitem__)
        turns += [((i + 0.5) / len(own), layer) for i, layer in enumerate(own)]
    return [layer for _, layer in sorted(turns)]


def over_layers(measured: Measured) -> Measured:
    """Return the losses with each layer's half at the mean of all: stages lose bits in turn (`in_turn`)."""
    return {
        precision: {part: [fmean(losses)] * len(losses) for part, losses in of_part.items()}
        for precision, of_part in measured.items()
    }


def leader_of(command: Deploy) -> str:
    """Return the leader, or "" for a first stage without workers, which `check_stages` refuses."""
    return next(iter(command.stages[0].workers), "")


def pipeline_of(command: Deploy) -> str:
    """Return the id of the pipeline, which is that of the instance that the leader serves."""
    return f"{command.model}@{leader_of(command)}"

"""Which layers of a model each stage has, as a Deploy says. Pure."""

from __future__ import annotations

from bus.messages import Deploy
from worker.model.config import ModelConfig
from worker.morph.outcome import NotApplied


def own_part(config: ModelConfig, command: Deploy) -> ModelConfig:
    """What the worker that it is sent to has of the model. Raises NotApplied for stages that are not all the
    layers in their order, at a worker each."""
    stages, at = command.stages, 0
    if len(stages) <= 1:
        return config
    if not 0 <= command.stage < len(stages):
        raise NotApplied("failed", f"there is no stage {command.stage} among {len(stages)}")
    workers = [worker for stage in stages for worker in stage.workers]
    for number, stage in enumerate(stages):
        if len(stage.workers) != 1:
            raise NotApplied(
                "failed",
                f"stage {number} is for {len(stage.workers)} workers: the stages of a pipeline have one each;"
                " take either tp or pp",
            )
        if stage.first != at or stage.end <= at:
            raise NotApplied(
                "failed", f"stage {number} has layers [{stage.first}, {stage.end}); layer {at} is next"
            )
        at = stage.end
    if at != config.num_layers:
        raise NotApplied("failed", f"the stages end at layer {at}; the model has {config.num_layers}")
    if len(set(workers)) < len(workers):
        raise NotApplied("failed", f"a worker has two stages: {', '.join(workers)}")
    own = stages[command.stage]
    return config.part(own.first, own.end)


def pipeline_of(command: Deploy) -> str:
    """Its id: the instance that the first stage's worker serves."""
    return f"{command.model}@{command.stages[0].workers[0]}"

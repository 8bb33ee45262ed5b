"""The decisions of `reconcile`: a record in its new state, with the commands that take it there. Pure.

Record and commands go out together or not at all. Ids of commands are made of the record, so that a
controller that starts again sends none twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bus.deployments import Deployment, DeploymentState, Measure, ModelCard, ModelState, Profile
from bus.messages import Number, Stage
from bus.morphs import CancelMorph, Cause, Deploy, Retire, Transform
from controller.planning.intent import goal

Command = Deploy | Retire | Measure | Transform | CancelMorph
MAX_ATTEMPTS = 3  # attempts in a row to measure, to load, or to give back
ORDERED = "ordered"  # why a deployment retires that nothing replaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A step of a model or a deployment.

    `record` is written, `erased` deleted. `commands`: worker and command; each morph among them has an event
    with `cause` and `why`. `announced`: an event reports the record, with the costs that were `compared`.
    """

    record: ModelCard | Deployment | None = None
    erased: Deployment | Profile | None = None
    commands: tuple[tuple[str, Command], ...] = ()
    announced: bool = False
    compared: Mapping[str, Number] = field(default_factory=dict)
    cause: Cause | Literal[""] = ""
    why: str = ""

    @property
    def kind(self) -> str:
        """The kind of the record's event."""
        assert self.record is not None
        noun = "model" if isinstance(self.record, ModelCard) else "deployment"
        return f"{noun}_{self.record.state}"

    @property
    def subject(self) -> str:
        """The subject of the record's event."""
        assert self.record is not None
        return self.record.name if isinstance(self.record, ModelCard) else self.record.id

    @property
    def numbers(self) -> dict[str, Number]:
        """The numbers of the record's event."""
        return {"attempts": self.record.attempts, **self.compared} if self.record is not None else {}

    @property
    def morphs(self) -> list[Deploy | Retire | Transform]:
        """The morphs among the commands."""
        commands = [command for _, command in self.commands]
        return [one for one in commands if isinstance(one, Deploy | Retire | Transform)]


def model_becomes(card: ModelCard, state: ModelState, now_ms: int, reason: str) -> Transition:
    """Change the state of a model that no worker measures any more."""
    record = replace(card, state=state, since_ms=now_ms, reason=reason, worker="", epoch=0, progress="")
    return Transition(record=record, announced=True)


def becomes(deployment: Deployment, state: DeploymentState, now_ms: int, reason: str) -> Transition:
    """Change the state of a deployment. Its stages stay until its workers have given them up."""
    instance = deployment.instance if state == "serving" else ""
    record = replace(deployment, state=state, since_ms=now_ms, reason=reason, instance=instance)
    return Transition(record=record, announced=True)


def because(transition: Transition, deployment: Deployment, cause: Cause, why: str) -> Transition:
    """Give the morphs of `transition` their cause: the deployment, its intent, and why now."""
    text = f"deployment {deployment.id} of {deployment.model} ({goal(deployment.intent)}): {why}"
    return replace(transition, cause=cause, why=text)


def noted(deployment: Deployment, reason: str) -> Transition | None:
    """Keep the state and note another reason; None if the reason is the same."""
    return None if deployment.reason == reason else Transition(record=replace(deployment, reason=reason))


def measure_id(card: ModelCard) -> str:
    """Return the id of the Measure that is under way."""
    return f"measure-{card.digest[:8]}-{card.since_ms}-{card.worker}"


def deployment_of(command_id: str) -> str:
    """Return the deployment that a Deploy is of."""
    return command_id.partition("-")[0]


def deploys(deployment: Deployment, card: ModelCard, blocks: int) -> tuple[tuple[str, Command], ...]:
    """Return a command for every worker: the whole model, or its part of what is divided."""
    assert deployment.configuration is not None
    shape, epochs = deployment.configuration, deployment.epochs
    alone = not deployment.is_divided

    def command(worker: str, number: int, stage: Stage) -> Deploy:
        return Deploy(
            id=deployment.deploy_id(worker),
            epoch=epochs[worker],
            instance=deployment.instance_at(worker),
            model=deployment.model,
            path=card.path,
            stages=[replace(stage, workers=[worker])] if alone else deployment.stages,
            stage=0 if alone else number,
            epochs={worker: epochs[worker]} if alone else epochs,
            precision=shape.precision,
            kv_dtype=shape.kv_dtype,
            blocks=blocks,
            digest=card.digest,
        )

    stages = enumerate(deployment.stages)
    return tuple((worker, command(worker, *stage)) for stage in stages for worker in stage[1].workers)


def transform(
    command_id: str, model: str, workers: list[str], epochs: Mapping[str, int], tp: int, wait_s: float = 0.0
) -> tuple[str, Command]:
    """Return the leader and the command to serve `model` on `workers` at degree `tp`."""
    leader, epochs = workers[0], {worker: epochs[worker] for worker in workers}
    return leader, Transform(
        id=command_id,
        epoch=epochs[leader],
        instance=f"{model}@{leader}",
        workers=workers,
        epochs=epochs,
        tp=tp,
        wait_s=wait_s,
    )

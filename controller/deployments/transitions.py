"""What `reconcile` decides: a record in its new state, with the commands that take it there. Pure.

Record and commands go out together or not at all. So a record tells which commands went out: ids are made of
what it says, and a controller that starts again sends none of them twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from bus.deployments import Deployment, DeploymentState, Measure, ModelCard, ModelState, Profile
from bus.messages import CancelMorph, Cause, Deploy, Number, Retire, Stage, Transform
from controller.planning.intent import goal

Command = Deploy | Retire | Measure | Transform | CancelMorph
MAX_ATTEMPTS = 3  # in a row, to measure, to load, or to give back
ORDERED = "ordered"  # why a deployment retires that nothing replaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """`record`: to be written; None: it stays as it is. `removed`: it goes. `erased`: so does a profile of no
    model. `commands`: worker and command,
    of which every morph is told with its `cause` and `why`. `told`: an event says so, with the costs that
    were `compared`."""

    record: ModelCard | Deployment | None = None
    removed: bool = False
    erased: Profile | None = None
    commands: tuple[tuple[str, Command], ...] = ()
    told: bool = False
    compared: Mapping[str, Number] = field(default_factory=dict)
    cause: Cause | Literal[""] = ""
    why: str = ""

    @property
    def kind(self) -> str:
        """Of its event."""
        assert self.record is not None
        noun = "model" if isinstance(self.record, ModelCard) else "deployment"
        return f"{noun}_{self.record.state}"

    @property
    def subject(self) -> str:
        assert self.record is not None
        return self.record.name if isinstance(self.record, ModelCard) else self.record.id

    @property
    def morphs(self) -> list[Deploy | Retire | Transform]:
        commands = [command for _, command in self.commands]
        return [one for one in commands if isinstance(one, Deploy | Retire | Transform)]

    @property
    def numbers(self) -> dict[str, Number]:
        return {"attempts": self.record.attempts, **self.compared} if self.record is not None else {}


def model_becomes(card: ModelCard, state: ModelState, now_ms: int, reason: str) -> Transition:
    """Nobody measures it any more."""
    record = replace(card, state=state, since_ms=now_ms, reason=reason, worker="", epoch=0, progress="")
    return Transition(record=record, told=True)


def becomes(deployment: Deployment, state: DeploymentState, now_ms: int, reason: str) -> Transition:
    """Its stages stay: somebody has to give up what is on them."""
    instance = deployment.instance if state == "serving" else ""
    record = replace(deployment, state=state, since_ms=now_ms, reason=reason, instance=instance)
    return Transition(record=record, told=True)


def because(transition: Transition, deployment: Deployment, cause: Cause, why: str) -> Transition:
    """Its morphs are for this deployment, and what it is to be."""
    told = f"deployment {deployment.id} of {deployment.model} ({goal(deployment.intent)}): {why}"
    return replace(transition, cause=cause, why=told)


def noted(deployment: Deployment, reason: str) -> Transition | None:
    """The same state, and news of it; None: there are none."""
    return None if deployment.reason == reason else Transition(record=replace(deployment, reason=reason))


# --------------------------------------------------------------------------- ids


def measure_id(card: ModelCard) -> str:
    return f"measure-{card.digest[:8]}-{card.since_ms}-{card.worker}"


def deploy_id(deployment: Deployment, worker: str) -> str:
    return f"{deployment.id}-{deployment.loads}-{worker}"


def deployment_of(command_id: str) -> str:
    """Whose a Deploy is."""
    return command_id.partition("-")[0]


def workers_of(deployment: Deployment) -> list[str]:
    """In the order of their stages."""
    return [worker for stage in deployment.stages for worker in stage.workers]


def shown_by(deployment: Deployment) -> list[str]:
    """Whose cards tell of it while it serves: all members of a group; of a pipeline the leader's alone, which
    gives it up when a stage is gone."""
    workers = workers_of(deployment)
    return workers[:1] if is_pipeline(deployment) else workers


def is_pipeline(deployment: Deployment) -> bool:
    """Of several stages. Its ranks have their shares from the start: nothing transforms it."""
    return len(deployment.stages) > 1


def degree_by_transform(deployment: Deployment) -> int:
    """That a group is to be made of once its workers serve alone."""
    one = deployment.configuration
    return one.tp if one is not None and not is_pipeline(deployment) else 1


def instance_at(deployment: Deployment, worker: str) -> str:
    return f"{deployment.model}@{worker}"


# --------------------------------------------------------------------------- commands


def deploys(deployment: Deployment, card: ModelCard, blocks: int) -> tuple[tuple[str, Command], ...]:
    """A command for every worker. The workers of a group each load the whole model, alone; those of a
    pipeline their share of a stage each."""
    assert deployment.configuration is not None
    commands: list[tuple[str, Command]] = []
    alone = not is_pipeline(deployment)
    for number, stage in enumerate(deployment.stages):
        for worker in stage.workers:
            commands.append(
                (
                    worker,
                    Deploy(
                        id=deploy_id(deployment, worker),
                        epoch=deployment.epochs[worker],
                        instance=instance_at(deployment, worker),
                        model=deployment.model,
                        path=card.path,
                        stages=[replace(stage, workers=[worker])] if alone else deployment.stages,
                        stage=0 if alone else number,
                        epochs={worker: deployment.epochs[worker]} if alone else deployment.epochs,
                        precision=deployment.configuration.precision,
                        blocks=blocks,
                        digest=card.digest,
                    ),
                )
            )
    return tuple(commands)


def transform(
    command_id: str, model: str, workers: list[str], epochs: Mapping[str, int], tp: int, wait_s: float = 0.0
) -> tuple[str, Command]:
    leader = workers[0]
    command = Transform(
        id=command_id,
        epoch=epochs[leader],
        instance=f"{model}@{leader}",
        workers=workers,
        epochs={worker: epochs[worker] for worker in workers},
        tp=tp,
        wait_s=wait_s,
    )
    return leader, command


def whole(workers: list[str], num_layers: int) -> list[Stage]:
    """One stage of all layers."""
    return [Stage(workers=workers, first=0, end=num_layers)]


How = Literal["up", "apart"]


def transform_id(deployment: Deployment, how: How) -> str:
    return f"{deployment.id}-{deployment.loads}-{how}"

"""The cluster of `deployment_world` with pipelines as they are: the leader's card alone shows one, what
the others have of it nobody sees. Redis may lose its data, and the controller what it knew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bus.catalogue import Contents
from bus.checkpoints import Checkpoint
from bus.morphs import CancelMorph, Deploy, MorphOutcome, Retire
from controller.deployments.transitions import Command, Transition
from tests.support.deployment_world import NUM_LAYERS, ROOM, Worker, World, instance

PATIENCE_MS = 300_000  # of a stage that nobody leads


@dataclass
class Part:
    """The part of a pipeline on a worker that another one leads, or is to lead."""

    worker: str
    command: Deploy
    since_ms: int
    is_led: bool = False

    @property
    def load(self) -> str:
        return load_of(self.command.id)

    @property
    def leader(self) -> str:
        return self.command.stages[0].workers[0]


class PipelineWorld(World):
    def __init__(self, *workers: str, **shape: int) -> None:
        self.parts: list[Part] = []
        self.leading: list[Part] = []  # leaders that wait for the others
        super().__init__(*workers, **shape)

    def join(self, name: str, **facts: Any) -> Worker:
        """End with its lease everything that it had a part in."""
        alone = [card for card in facts.pop("instances", []) if card.pp == 1]
        worker = super().join(name, instances=alone, **facts)
        self._mend()
        return worker

    def die(self, name: str) -> None:
        super().die(name)
        self._mend()

    def forget(self) -> None:
        """Redis loses its data and the controller starts again; workers come back as others."""
        folders = {f"/{name}": Checkpoint(NUM_LAYERS, "d") for name in ("a", "b", "m")}
        self.contents, self.checkpoints = Contents(), folders
        self.reports, self.complaints, self.ordered = {}, {}, []
        for name, worker in list(self.workers.items()):
            self.join(name, instances=worker.instances)
        self.restart_controller()

    def turn(self, after_ms: int = 500) -> list[Transition]:
        self._mend(after_ms)
        return super().turn(after_ms)

    def _obey(self, worker: Worker, command: Command) -> MorphOutcome:
        outcome = super()._obey(worker, command)
        if isinstance(command, CancelMorph):
            for part in [*self.parts, *self.leading]:
                if part.command.id == command.morph_id and not part.is_led:
                    self._drop(part, "failed")
        if isinstance(command, Retire):
            self._mend()
        return outcome

    def _load(self, worker: Worker, command: Deploy) -> MorphOutcome:
        models = [card.model for card in worker.instances] + [one.command.model for one in self._at(worker)]
        if command.model in models or len(models) >= ROOM:
            return "conflict"
        if len(command.stages) == 1:
            return super()._load(worker, command)
        part = Part(worker.id, command, self.now_ms)
        (self.leading if part.leader == worker.id else self.parts).append(part)
        self._mend()
        told = self.reports.get(command.id)
        return told.state if told else "running"

    def _at(self, worker: Worker) -> Iterator[Part]:
        return (part for part in [*self.parts, *self.leading] if part.worker == worker.id)

    # ------------------------------------------------------------------------------------- pipelines

    def _mend(self, after_ms: int = 0) -> None:
        """Let workers with all others lead, those that lost one give up, and those not led in time go."""
        for part in [*self.parts, *self.leading]:
            if not self._is_there(part):
                self._drop(part, "stale")
        for part in list(self.leading):
            if len(self._behind(part)) == _num_ranks(part.command) - 1:
                self._lead(part)
        for worker in self.workers.values():
            worker.instances[:] = [card for card in worker.instances if card.pp == 1 or self._is_whole(card)]
        led = {load_of(card.deployed) for worker in self.workers.values() for card in worker.instances}
        for part in list(self.parts):
            is_late = not part.is_led and self.now_ms + after_ms - part.since_ms > PATIENCE_MS
            if is_late or (part.is_led and part.load not in led):
                self._drop(part, "failed")

    def _is_there(self, part: Part) -> bool:
        worker = self.workers.get(part.worker)
        return worker is not None and worker.epoch == part.command.epoch

    def _behind(self, lead: Part) -> list[Part]:
        return [part for part in self.parts if part.load == lead.load]

    def _is_whole(self, card: Any) -> bool:
        there = [part for part in self.parts if part.load == load_of(card.deployed)]
        return len(there) == len(card.workers) - 1

    def _lead(self, lead: Part) -> None:
        command = lead.command
        card = instance(
            command.model,
            lead.worker,
            deployed=command.id,
            tp=len(command.stages[0].workers),
            pp=len(command.stages),
            degrees=[1],
            stages=command.stages,
        )
        workers = [worker for stage in command.stages for worker in stage.workers]
        self.workers[lead.worker].instances.append(replace(card, workers=workers))
        self.leading.remove(lead)
        self._tell(lead, "applied")
        for part in self._behind(lead):
            part.is_led = True
            self._tell(part, "applied")

    def _drop(self, part: Part, state: MorphOutcome) -> None:
        (self.parts if part in self.parts else self.leading).remove(part)
        if not part.is_led:
            self._tell(part, state)

    def _tell(self, part: Part, state: MorphOutcome) -> None:
        if worker := self.workers.get(part.worker):
            self.reports[part.command.id] = self.report(part.command, state, "deploy", worker)


def load_of(command_id: str) -> str:
    """The deployment, and which of its loads: alike at all of its workers."""
    return command_id.rpartition("-")[0]


def _num_ranks(command: Deploy) -> int:
    return sum(len(stage.workers) for stage in command.stages)

"""A command on its way to its end, and its reports."""

from __future__ import annotations

import time
from collections.abc import Mapping

from bus.messages import Morph, MorphOutcome, MorphReport, Number, Transform
from bus.morphs import KIND_OF
from worker.morph.run import NotApplied, Run, Steps

EXCLUSIVE = {"transform", "deploy", "retire"}  # kinds that run beside no other morph of their instance


class Job:
    """One command under one epoch. `start` gives it its run."""

    def __init__(self, command: Morph, worker: str, epoch: int, reason: str = "") -> None:
        self.command, self.epoch, self._reason = command, epoch, reason
        self.kind = KIND_OF[type(command)]
        self.boundary_s = 0.0  # that the engine spent on it
        self._told = ""
        self._worker = worker
        self._started_ms, self._began_s = _now_ms(), time.monotonic()
        self._run: Run | None = None
        self._steps: Steps | None = None

    def start(self, run: Run) -> None:
        self._run, self._steps = run, run.steps()

    @property
    def run(self) -> Run:
        assert self._run
        return self._run

    def step(self) -> bool:
        """Do the next unit of work, as `Run.steps` says. Raises StopIteration when the morph is applied."""
        assert self._steps
        return next(self._steps)

    def undo(self) -> None:
        """Undo what is half done. Raises MappingFailed."""
        assert self._steps
        self._steps.close()

    def news(self) -> str:
        """Return the progress if it has changed since the last call, else ""."""
        before, self._told = self._told, self.run.progress
        return self._told if self._told != before else ""

    @property
    def reason_applied(self) -> str:
        """The reason of a morph that is applied: `already at tp 2; nothing changed`, or that of its order."""
        return f"already at {self.run.already}; nothing changed" if self.run.already else self._reason

    def refuse_beside(self, other: Job) -> None:
        """Raise NotApplied if this job would mix with `other`, which came first."""
        if other.command.instance != self.command.instance:
            return
        if EXCLUSIVE & {self.kind, other.kind}:
            raise NotApplied("conflict", f"morph {other.command.id}, a {other.kind}, is running")
        if self._run and (shared := self._run.touches & other.run.touches):
            raise NotApplied("conflict", f"morph {other.command.id} is changing the {min(shared, key=str)}")

    def report(
        self, state: MorphOutcome, reason: str, numbers: Mapping[str, Number] | None = None
    ) -> MorphReport:
        """Make a report; `numbers` are added to those of the run."""
        told = {**(self._run.numbers() if self._run else {}), **(numbers or {})}
        if state != "running":
            told["boundary_seconds"] = round(self.boundary_s, 6)
            told["seconds"] = round(time.monotonic() - self._began_s, 6)
        return MorphReport(
            id=self.command.id,
            kind=self.kind,
            target=self.command.instance,
            worker=self._worker,
            epoch=self.epoch,
            state=state,
            reason=reason,
            started_ms=self._started_ms,
            ended_ms=None if state == "running" else _now_ms(),
            numbers=told,
            workers=self.command.workers if isinstance(self.command, Transform) else [],
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

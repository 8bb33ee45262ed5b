"""A command on its way to its end, and what is reported of it."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping

from bus.messages import Morph, MorphOutcome, MorphReport, Number, Swap, Transform
from bus.morphs import KIND_OF
from worker.morph.plan import Half
from worker.morph.run import Clock, NotApplied, Run


class Job:
    """One command under one epoch. `start` gives it its run."""

    def __init__(self, command: Morph, worker: str, epoch: int, clock: Clock) -> None:
        self.command, self.epoch = command, epoch
        self.kind = KIND_OF[type(command)]
        self.touches: frozenset[Half] = frozenset()
        self.boundary_s = 0.0  # that the engine spent on it
        self.news = ""
        self._worker, self._clock = worker, clock
        self._started_ms, self._began_s = _now_ms(), clock()
        self._run: Run | None = None
        self._steps: Generator[bool, None, None] | None = None

    @property
    def deadline(self) -> float | None:
        return self._run.deadline if self._run else None

    def start(self, run: Run) -> None:
        self._run, self._steps = run, run.steps()

    def step(self) -> bool:
        """Do the next unit of work, as `Run.steps` says. Raises StopIteration when the morph is applied."""
        assert self._steps is not None
        return next(self._steps)

    @property
    def has_news(self) -> bool:
        """True if the morph advanced since the last call, by as much as people want to see."""
        before, self.news = self.news, self._run.progress if self._run else ""
        return self.news != before

    @property
    def already(self) -> str:
        """The reason of a morph that found what it was to make; else an empty string.

        For example: `already at tp 2; nothing changed`.
        """
        shape = ""
        numbers = self._run.numbers() if self._run else {}
        if self.kind == "transform" and numbers["tp_before"] == numbers["tp_after"]:
            shape = f"tp {numbers['tp_after']}"
        elif isinstance(self.command, Swap) and not self.touches:
            shape = self.command.precision
        return f"already at {shape}; nothing changed" if shape else ""

    @property
    def is_beyond_return(self) -> bool:
        """True if the morph goes on to its end, even if it is cancelled."""
        return self._run is not None and self._run.is_beyond_return

    def undo(self) -> None:
        """Undo what is half done. Raises MappingFailed."""
        assert self._steps is not None
        self._steps.close()

    def refuse_beside(self, other: Job) -> None:
        """Raise NotApplied if this job would mix with `other`, which came first."""
        if other.command.instance != self.command.instance:
            return
        if {"transform", "deploy", "retire"} & {self.kind, other.kind}:
            raise NotApplied("conflict", f"morph {other.command.id}, a {other.kind}, is running")
        if self.kind == other.kind == "resize":
            about = "the size of its KV cache"
        elif shared := self.touches & other.touches:
            about = f"the {min(shared, key=str)}"
        else:
            return
        raise NotApplied("conflict", f"morph {other.command.id} is changing {about}")

    def report(
        self, state: MorphOutcome, reason: str, numbers: Mapping[str, Number] | None = None
    ) -> MorphReport:
        """Make a report; `numbers` are added to those of the run."""
        told = {**(self._run.numbers() if self._run else {}), **(numbers or {})}
        if state != "running":
            told["boundary_seconds"] = round(self.boundary_s, 6)
            told["seconds"] = round(self._clock() - self._began_s, 6)
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

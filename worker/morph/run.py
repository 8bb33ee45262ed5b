"""The parts that all morphs have in common: the command on its way, its run, and its reports."""

from __future__ import annotations

import time
from collections.abc import Generator, Hashable, Mapping
from typing import Any

from bus.clock import now_ms
from bus.messages import Number
from bus.morphs import KIND_OF, Morph, MorphOutcome, MorphReport, Transform

Steps = Generator[bool, None, None]  # the type of `Run.steps`
Peers = Mapping[str, Any]  # addresses in a group or a pipeline, by worker
EXCLUSIVE = {"kv", "transform", "deploy", "retire"}  # kinds that run beside no other morph of their instance


class NotApplied(Exception):
    """Raised to end a morph, with what its MorphReport will say; the old shape goes on serving."""

    def __init__(self, state: MorphOutcome, reason: str, **numbers: Number) -> None:
        self.state, self.reason, self.numbers = state, reason, numbers
        super().__init__(reason)


class Run:
    """A morph while it runs; its constructor raises NotApplied for what can never be applied.

    The manager makes one of its steps after the other, at step boundaries, for as long as there is time.
    """

    awaits_copies = False  # what it waits for is a copy of this worker's thread alone
    is_beyond_return = (
        False  # goes on to its end even if cancelled: half-way there is no old shape to go back to
    )
    touches: frozenset[Hashable] = frozenset()  # parts of the instance that no other morph may change now
    already = ""  # the shape, where the morph found what it was to make

    def __init__(self, wait_s: float) -> None:
        """Allow the morph to wait `wait_s` without advancing."""
        self._patience = Patience(wait_s)

    def steps(self) -> Steps:
        """Yield at the end of every unit of work: True if it could go on at once, False if it waits.

        Ends when the morph is applied, and raises when it is not; closing it undoes what is half done.
        """
        raise NotImplementedError

    def numbers(self) -> dict[str, Number]:
        """Return what the morph took so far."""
        raise NotImplementedError

    @property
    def deadline(self) -> float | None:
        """Monotonic seconds when the morph gives up waiting; None: something else will wake it."""
        return self._patience.deadline

    @property
    def progress(self) -> str:
        """The progress of the morph, for people; empty where its end is enough."""
        return ""

    def _pause(self, obstacle: NotApplied) -> Steps:
        """Let the others go on. Raises `obstacle` when the morph has waited for as long as it may."""
        if not self._patience.wait():
            raise obstacle
        yield False


class Patience:
    """The time that a morph has waited without advancing."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self.total_s = 0.0
        self._since: float | None = None

    @property
    def deadline(self) -> float | None:
        return None if self._since is None else self._since + self._wait_s

    def wait(self) -> bool:
        """Note that the morph does not advance; return False when it has waited for as long as it may."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now < self._since + self._wait_s

    def get_on(self) -> None:
        if self._since is not None:
            self.total_s += time.monotonic() - self._since
            self._since = None


class Job:
    """One command under one epoch. `start` gives it its run."""

    def __init__(self, command: Morph, worker: str, epoch: int, reason: str = "") -> None:
        self.command, self.epoch, self._reason = command, epoch, reason
        self.kind = KIND_OF[type(command)]
        self.boundary_s = 0.0  # engine time spent on it
        self.awaited_s = 0.0  # of it, for copies that another thread makes
        self._told = ""
        self._worker = worker
        self._started_ms, self._began_s = now_ms(), time.monotonic()
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
        all_numbers = {**(self._run.numbers() if self._run else {}), **(numbers or {})}
        if state != "running":
            all_numbers["boundary_seconds"] = round(self.boundary_s, 6)
            if self.awaited_s:
                all_numbers["awaited_seconds"] = round(self.awaited_s, 6)
            all_numbers["seconds"] = round(time.monotonic() - self._began_s, 6)
        return MorphReport(
            id=self.command.id,
            kind=self.kind,
            target=self.command.instance,
            worker=self._worker,
            epoch=self.epoch,
            state=state,
            reason=reason,
            started_ms=self._started_ms,
            ended_ms=None if state == "running" else now_ms(),
            numbers=all_numbers,
            workers=self.command.workers if isinstance(self.command, Transform) else [],
        )

"""Step time while the engines of 4 workers come together and part, by the layers that change in a step.

Four processes with the worker's engine thread, links, morph executor and resharder each, without a bus. Every
worker decodes sequences of its own all the time. For each setting: some steps alone, up to TP4, some steps
together, back to TP1. A step's time is from one of the leader's results to the next.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
from bus.messages import MorphReport, SamplingParams, Transform
from bus.settings import WorkerSettings
from worker.core import Request
from worker.engine.engine import StepResult
from worker.parallel.wire import Peer
from worker.service.engine_thread import EngineThread
from worker.service.loading import load

MODEL = "bench"
PROMPT_TOKENS, MAX_TOKENS = 128, 1800
CALM_STEPS = 12
WAIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    tp: int
    boundary: int  # of the group; 0: one degree for all layers


@dataclass(frozen=True, slots=True)
class Change:
    """One transformation and the steps of it, from the leader."""

    layers_per_step: int
    tp: int  # that it went to
    steps: list[Step]
    moving_seconds: float  # what was added between steps, in all
    bytes_exchanged: int


def measure(
    folder: Path, settings: Sequence[int], rounds: int, **options: Any
) -> tuple[list[Change], list[Step]]:
    """Changes, and steps without any (alone and together). `settings`: layers per step."""
    changes: list[Change] = []
    calm: list[Step] = []
    with group(folder, 4, **options) as leader:
        for _ in range(rounds):
            for layers in settings:
                for tp in (4, 1):
                    calm += leader.watch(CALM_STEPS)
                    changes.append(leader.change(tp, layers))
    return changes, calm


class Leader:
    """The first worker's end of the line, seen from the parent."""

    def __init__(self, lines: list[Connection], peers: list[Peer]) -> None:
        self._lines, self._peers = lines, peers
        self._ids = itertools.count()

    def watch(self, number: int) -> list[Step]:
        """The next steps; the first of them may still belong to a change, and is not told."""
        self._ask("steps")
        seen: list[Step] = []
        while len(seen) <= number:
            time.sleep(0.05)
            seen += self._ask("steps")
        return seen[1:]

    def change(self, tp: int, layers_per_step: int) -> Change:
        """Raises RuntimeError where it does not come about."""
        command = Transform(
            id=f"change {next(self._ids)}",
            epoch=1,
            instance=f"{MODEL}@{self._peers[0].worker}",
            workers=[peer.worker for peer in self._peers],
            epochs={peer.worker: 1 for peer in self._peers},
            tp=tp,
            layers_per_step=layers_per_step,
        )
        self._ask("steps")
        report: MorphReport = self._ask("change", command, {peer.worker: peer for peer in self._peers})
        if report.state != "applied":
            raise RuntimeError(f"to TP{tp}: {report.state}: {report.reason}")
        numbers = report.numbers
        return Change(
            layers_per_step,
            tp,
            list(self._ask("steps")),
            float(numbers["moving_seconds"]),
            int(numbers["bytes_exchanged"]),
        )

    def _ask(self, *what: Any) -> Any:
        line = self._lines[0]
        line.send(what)
        if not line.poll(WAIT_S):
            raise TimeoutError(f"no answer to {what[0]!r} in {WAIT_S:g} s")
        answer = line.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


@contextmanager
def group(folder: Path, size: int, **options: Any) -> Iterator[Leader]:
    """Workers that decode; gone afterwards."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(size)]
    processes = [
        spawn.Process(target=_serve, args=(pipe[1], f"w{i}", folder, options), daemon=True)
        for i, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    lines = [pipe[0] for pipe in pipes]
    try:
        peers = []
        for line, (_, other) in zip(lines, pipes, strict=True):
            other.close()  # so that a worker that dies is heard of
            if not line.poll(WAIT_S):
                raise TimeoutError("a worker does not start")
            peers.append(line.recv())
        yield Leader(lines, peers)
    finally:
        for line in lines:
            with suppress(OSError):
                line.send(("stop",))
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()


# ------------------------------------------------------------------------------------- in a worker's process


def _serve(line: Connection, name: str, folder: Path, options: dict[str, Any]) -> None:
    worker = _Worker(name, folder, **options)
    line.send(worker.peer)
    while True:
        what, *arguments = line.recv()
        if what == "stop":
            worker.thread.stop()
            return
        try:
            line.send(worker.take_steps() if what == "steps" else worker.change(*arguments))
        except RuntimeError as error:
            line.send(error)


class _Worker:
    def __init__(self, name: str, folder: Path, *, megabytes: int, sequences: int) -> None:
        settings = WorkerSettings(
            models=[f"{MODEL}={folder}"],
            device="cpu",
            dtype="float32",
            memory_mb=megabytes,
            max_tp=4,
            threads=1,
            variants=[],
        )
        loaded = load(settings, name, lambda text: None)
        assert loaded.grouping is not None
        self._grouping = loaded.grouping
        self._instance = self._grouping.place.instance
        self._steps: list[Step] = []
        self._last = time.perf_counter()
        self._ends: dict[str, MorphReport] = {}
        self._death: BaseException | None = None
        self.thread = EngineThread(
            loaded.engine,
            loaded.pages,
            loaded.morphs,
            loaded.grouping,
            snapshot_s=1.0,
            on_results=self._stepped,
            on_snapshot=lambda snapshot: None,
            on_reports=self._reported,
            on_death=lambda error: setattr(self, "_death", error),
        )
        self.peer = Peer(name, 1, self._grouping.address, self._grouping.link_key)
        self.thread.fence(1)
        self.thread.start()
        for i in range(sequences):
            prompt = [(31 * i + 37 * j) % 8000 for j in range(PROMPT_TOKENS)]
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0)
            self.thread.submit(
                self._instance.id, Request(id=f"{name}-{i}", prompt_token_ids=prompt, sampling=sampling)
            )

    def take_steps(self) -> list[Step]:
        taken, self._steps = self._steps, []
        return taken

    def change(self, command: Transform, peers: dict[str, Peer]) -> MorphReport:
        self.thread.morph(command, peers)
        ends_at = time.monotonic() + WAIT_S
        while command.id not in self._ends:
            if self._death or time.monotonic() > ends_at:
                raise RuntimeError(f"{command.id} does not end: {self._death}")
            time.sleep(0.005)
        return self._ends.pop(command.id)

    def _stepped(self, epoch: int, results: list[StepResult]) -> None:
        now, party = time.perf_counter(), self._grouping.party
        boundary = party.formation.boundary if party else 0
        self._steps.append(Step(now - self._last, self._instance.tp, boundary))
        self._last = now

    def _reported(self, reports: list[MorphReport]) -> None:
        for report in reports:
            if report.state != "running":
                self._ends[report.id] = report

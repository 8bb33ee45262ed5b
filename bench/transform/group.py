"""Step time while the engines of 4 workers form a group and split, by the layers that change in a step.

Four processes with the worker's engine thread, links, morph executor and resharder each, without a bus. Every
worker decodes its own sequences all the time. For each setting: some steps alone, up to TP4, some steps
together, back to TP1. A step's time is from one of the leader's results to the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kernels  # noqa: F401 before torch: it settles how torch's threads wait

# isort: split
from bench.common.processes import END, Children
from bus.messages import SamplingParams
from bus.morphs import Morph, MorphReport, Transform
from bus.settings import WorkerSettings
from worker.distributed.messages import Peer
from worker.engine.engine import StepResult
from worker.engine.sequence import own_request
from worker.service.engine_thread import EngineThread
from worker.service.groups import GroupMembership
from worker.service.start_up import load

MODEL = "bench"
PROMPT_TOKENS, MAX_TOKENS = 128, 1800
CALM_STEPS = 12
WAIT_S, START_S = 120.0, 300.0


@dataclass(frozen=True, slots=True)
class GroupStep:
    seconds: float
    tp: int
    boundary: int  # boundary of the group; 0 if all layers have one degree


@dataclass(frozen=True, slots=True)
class Made:
    """One token of a request, and the shape at the end of its step."""

    token_id: int
    logprob: float
    tp: int
    boundary: int


@dataclass(frozen=True, slots=True)
class Change:
    """One transformation and its steps, from the leader."""

    layers_per_step: int
    tp: int  # afterwards
    steps: list[GroupStep]
    moving_seconds: float  # added between steps, in all
    bytes_exchanged: int


def measure(
    folder: Path, settings: Sequence[int], rounds: int, **options: Any
) -> tuple[list[Change], list[GroupStep]]:
    """Return changes, and steps without a change (alone and together). `settings` are layers per step."""
    changes: list[Change] = []
    calm: list[GroupStep] = []
    with Leader(folder, 4, **options) as leader:
        for _ in range(rounds):
            for layers in settings:
                for tp in (4, 1):
                    calm += leader.watch(CALM_STEPS)
                    changes.append(leader.change(tp, layers))
    return changes, calm


class Leader(Children):
    """Workers that decode, each in a process, seen from the parent; a context that ends them."""

    def __init__(self, folder: Path, size: int, make: type[Worker] | None = None, **options: Any) -> None:
        """Start the processes; `make`, by default `Worker`, makes a worker of `options` in each."""
        super().__init__(
            _serve, [(make or Worker, f"w{i}", folder, options) for i in range(size)], timeout_s=WAIT_S
        )
        self._peers: list[Peer] = self.ready(START_S)
        self._ids = itertools.count()

    def watch(self, number: int) -> list[GroupStep]:
        """Return the next steps, without the first, which may still belong to a change."""
        self.ask(0, "take_steps")
        seen: list[GroupStep] = []
        while len(seen) <= number:
            time.sleep(0.05)
            seen += self.ask(0, "take_steps")
        return seen[1:]

    def change(self, tp: int, layers_per_step: int, members: Sequence[int] = ()) -> Change:
        """Change the degree of `members`, by default all, in the order of their shards; the first leads.

        Raises RuntimeError if the change is not applied.
        """
        peers = [self._peers[i] for i in members] or self._peers
        command = Transform(
            id=f"change {next(self._ids)}",
            epoch=1,
            instance=f"{MODEL}@{peers[0].worker}",
            workers=[peer.worker for peer in peers],
            epochs={peer.worker: 1 for peer in peers},
            tp=tp,
            layers_per_step=layers_per_step,
        )
        first = members[0] if members else 0
        self.ask(first, "take_steps")
        report: MorphReport = self.ask(first, "change", command, {peer.worker: peer for peer in peers})
        if report.state != "applied":
            raise RuntimeError(f"to TP{tp}: {report.state}: {report.reason}")
        numbers = report.numbers
        return Change(
            layers_per_step,
            tp,
            list(self.ask(first, "take_steps")),
            float(numbers["moving_seconds"]),
            int(numbers["bytes_exchanged"]),
        )


# ------------------------------------------------------------------------------------- in a worker's process


def _serve(line: Any, make: type[Worker], name: str, folder: Path, options: dict[str, Any]) -> None:
    worker = make(name, folder, **options)
    line.send(worker.peer)
    while True:
        what, *arguments = line.recv()
        if what == END:
            worker.thread.stop()
            return
        try:
            line.send(getattr(worker, what)(*arguments))
        except RuntimeError as error:
            line.send(error)


class Worker:
    """A worker's engine; its methods are called in the main thread of its process."""

    def __init__(self, name: str, folder: Path, *, megabytes: int, sequences: int, **settings_: Any) -> None:
        """Start decoding `sequences`. `settings_` differ from those of a worker on the CPU."""
        values: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_tp": 4, "threads": 1}
        settings = WorkerSettings(
            **values | {"models": [f"{MODEL}={folder}"], "memory_mb": megabytes, "variants": []} | settings_
        )
        self._loaded = loaded = load(settings, name, lambda text: None)
        groups, transport = GroupMembership(loaded), loaded.transport
        groups.update()
        assert groups.grouping is not None and transport is not None
        self._grouping = groups.grouping
        self._instance = self._grouping.local.instance
        self._steps: list[GroupStep] = []
        self._made: dict[str, list[Made]] = {}  # results by request
        self._ended: dict[str, float] = {}  # requests, and when
        self._last = time.perf_counter()
        self._ends: dict[str, MorphReport] = {}
        self._death: BaseException | None = None
        self.thread = EngineThread(
            loaded.engine,
            loaded.pool.counts,
            loaded.morphs,
            groups.grouping,
            snapshot_s=1.0,
            on_results=self._stepped,
            on_snapshot=lambda snapshot: None,
            on_reports=self._reported,
            on_death=lambda error: setattr(self, "_death", error),
        )
        self.peer = Peer(name, 1, transport.address, transport.key)
        self.thread.fence(1)
        self.thread.start()
        for i in range(sequences):
            prompt = [(31 * i + 37 * j) % 8000 for j in range(PROMPT_TOKENS)]
            self._submit(
                f"{name}-{i}", prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=0, temperature=0.0)
            )

    def begin(self, prompts: dict[str, list[int]], max_tokens: int) -> None:
        """Decode these prompts greedily; return when each has its first token."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, logprobs=0)
        self._made = {name: [] for name in prompts}
        for name, prompt in prompts.items():
            self._submit(name, prompt, sampling)
        self._wait(lambda: all(self._made.values()), "first tokens")

    def end(self, more: int) -> dict[str, list[Made]]:
        """Wait for `more` tokens of each prompt of `begin`, unless it has ended.

        Return all tokens and cancel.
        """
        wanted = {name: len(made) + more for name, made in self._made.items()}
        self._wait(
            lambda: all(len(self._made[n]) >= number or n in self._ended for n, number in wanted.items()),
            "more tokens",
        )
        self.thread.cancel(list(wanted))
        return {name: list(made) for name, made in self._made.items()}

    def take_steps(self) -> list[GroupStep]:
        taken, self._steps = self._steps, []
        return taken

    def change(self, command: Morph, peers: dict[str, Peer]) -> MorphReport:
        self.thread.morph(command, peers)
        self._wait(lambda: command.id in self._ends, f"the end of {command.id}")
        return self._ends.pop(command.id)

    def _submit(self, name: str, prompt: list[int], sampling: SamplingParams) -> None:
        self.thread.submit(
            self._instance.id,
            own_request(name, prompt, sampling),
        )

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + WAIT_S
        while not until():
            if self._death or time.monotonic() > ends_at:
                raise RuntimeError(f"no {what}: {self._death or f'waited {WAIT_S:g} s'}")
            time.sleep(0.005)

    def _stepped(self, epoch: int, results: list[StepResult]) -> None:
        now, executor = time.perf_counter(), self._grouping.executor
        boundary = executor.formation.boundary if executor else 0
        self._steps.append(GroupStep(now - self._last, self._instance.tp, boundary))
        self._last = now
        for result in results:
            for delta in (output.delta for output in result.outputs):
                if delta.logprobs and (made := self._made.get(delta.request_id)) is not None:
                    made += [
                        Made(one.token_id, one.logprob, self._instance.tp, boundary) for one in delta.logprobs
                    ]
                if delta.finish_reason:
                    self._ended[delta.request_id] = now

    def _reported(self, reports: list[MorphReport]) -> None:
        for report in reports:
            if report.state != "running":
                self._ends[report.id] = report

"""A worker of a test's own process: an engine in its thread, without a bus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from bus.messages import RejectReason
from worker.engine.engine import StepResult
from worker.engine.outputs import Output
from worker.service.engine_thread import EngineThread

WAIT_S = 60.0
POLL_S = 0.01  # not all that is waited for is told: a degree changes in the engine's thread


class ThreadedWorker:
    """`tokens[request]` as published, `ends[request]` its finish reason or error. `thread` is made, with
    `_results` and `_died`, and started by who inherits this."""

    thread: EngineThread

    def __init__(self, name: str) -> None:
        self.name, self.epoch = name, 1
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.embeddings: dict[str, bytes] = {}
        self.reject_reasons: dict[str, RejectReason | None] = {}
        self.death: BaseException | None = None
        self._changed = threading.Condition()

    def call(self, work: Callable[[], Any]) -> Any:
        """Call in the engine's thread, between two steps; return what it returns and raise what it raises."""
        done, made, errors = threading.Event(), list[Any](), list[BaseException]()

        def run() -> None:
            try:
                made.append(work())
            except BaseException as error:  # noqa: BLE001 the waiting side raises it again
                errors.append(error)
            done.set()

        self.thread._inbox.put(run)
        assert done.wait(WAIT_S), f"{self.name} does not come to a boundary"
        if errors:
            raise errors[0]
        return made[0]

    def wait(self, until: Callable[[], bool], what: str, within_s: float = WAIT_S) -> None:
        """Until something that results and reports change is so. AssertionError when it takes too long."""
        ends_at = time.monotonic() + within_s
        with self._changed:
            while not until():
                assert self.death is None, self.death
                left_s = ends_at - time.monotonic()
                assert left_s > 0, f"{self.name} waited {within_s} s for {what}"
                self._changed.wait(min(left_s, POLL_S))

    def wait_ends(self, *names: str) -> None:
        self.wait(lambda: all(name in self.ends for name in names), f"the ends of {names}")

    def take(self, result: StepResult, output: Output) -> None:
        """More of what a step made, for those who keep more."""

    def _results(self, epoch: int, results: list[StepResult]) -> None:
        with self._changed:
            for result in results:
                for output in result.outputs:
                    delta, name = output.delta, output.request.request_id
                    assert name not in self.ends, f"{name} goes on after its end"
                    if delta.error is None:
                        assert delta.index == len(self.tokens[name]), f"{name}: a token is lost or repeated"
                    self.tokens[name] += delta.token_ids
                    if delta.embedding is not None:
                        self.embeddings[name] = delta.embedding
                    self.take(result, output)
                    if delta.finish_reason:
                        self.ends[name] = delta.error or delta.finish_reason
                        self.reject_reasons[name] = delta.reject_reason
            self._changed.notify_all()

    def _died(self, error: BaseException) -> None:
        with self._changed:
            self.death = error
            self._changed.notify_all()

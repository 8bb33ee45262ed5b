"""Unload a model while others serve: take no requests, finish the last ones, remove it, give its pages back.

Until the model is removed the unload may be cancelled. From then on it goes to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bus.messages import Number
from bus.morphs import Retire
from worker.deploy.model_host import HostedModel, ModelHost
from worker.morph.run import Patience, Run, Steps

TURN_S = 0.05  # between two looks whether another load or unload has ended, which wakes no one
HURRY_S = 5.0  # time for the service to read all requests; then they count as read


class UnloadRun(Run):
    """One Retire."""

    def __init__(self, command: Retire, host: ModelHost) -> None:
        super().__init__(command.wait_s)
        self._command, self._host = command, host
        self._hurry = Patience(HURRY_S)
        self._looks_at: float | None = None  # again, whether it is its turn
        self._is_drained = False  # no request comes to the instance any more
        self._num_sent_away = self._pages = 0

    @property
    def deadline(self) -> float | None:
        return self._looks_at or self._hurry.deadline or super().deadline

    def numbers(self) -> dict[str, Number]:
        return {
            "requests_sent_away": self._num_sent_away,
            "pages_unmapped": self._pages,
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Steps:
        host, name = self._host, self._command.instance
        while host.busy_with:
            self._looks_at = time.monotonic() + TURN_S
            yield False
        self._looks_at = None
        host.busy_with = self._command.id
        try:
            host.post(host.listener.on_unloading, name, self._drained)
            yield from self._part_with_requests()
            hosted, self.is_beyond_return = host.remove(name), True
            yield from self._release(hosted)
            while host.return_lent_pages():
                yield True
        finally:
            host.busy_with = ""
            if self.is_beyond_return:
                host.on_changed()
            listener = host.listener
            host.post(listener.on_unloaded if self.is_beyond_return else listener.on_unload_aborted, name)

    def _drained(self) -> None:
        self._is_drained = True

    def _part_with_requests(self) -> Steps:
        host, name = self._host, self._command.instance
        instance = host.models[name].target.instance
        while instance.has_work or not self._is_drained:
            if not self._patience.wait():
                break
            yield False
        self._patience.get_on()
        if not self._is_drained:
            host.post(host.listener.on_unload_urgent, name)
        while not self._is_drained and self._hurry.wait():
            yield False
        self._num_sent_away = host.engine.send_away(name, f"{name} is retired")

    def _release(self, hosted: HostedModel) -> Steps:
        """Release all parts, on which no step runs, even if this generator is closed half-way."""
        target, host = hosted.target, self._host
        ranges = [loaded.memory.release for loaded in hosted.model.ranges]
        rest = iter([target.resizer.cache.release, target.variants.release, *ranges, hosted.model.release])
        try:
            for release in rest:
                self._give(release)
                yield True
        finally:
            for release in rest:
                self._give(release)
            host.update_reserve()

    def _give(self, release: Callable[[], None]) -> None:
        before = self._host.pool.num_free
        release()
        self._pages += self._host.pool.num_free - before

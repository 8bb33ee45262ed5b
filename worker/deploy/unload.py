"""Unload a model while others serve: a Retire as it runs.

::

    leaves        service    its card without it, so that gateways stop sending; what was sent is read
    last requests engine     for as long as the order waits; then the rest goes on elsewhere
    removed       engine     from the next step on it is not here
    pages         engine     range by range: host images, variants, KV, weights; then what others lent

Until it is removed it may be called off. From then on it goes to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator

from bus.messages import Number, Retire
from worker.deploy.model_host import HostedModel, ModelHost
from worker.morph.run import Clock, Patience

Steps = Generator[bool, None, None]

TURN_S = 0.05  # between two looks whether another load or unload has ended, which wakes no one
HURRY_S = 5.0  # for the service to have read what was sent; then it is taken for read


class UnloadRun:
    """One Retire, as it runs."""

    def __init__(self, command: Retire, host: ModelHost, *, clock: Clock = time.monotonic) -> None:
        self._command, self._host, self._clock = command, host, clock
        self._patience = Patience(command.wait_s, clock)
        self._hurry = Patience(HURRY_S, clock)
        self._looks_at: float | None = None  # again, whether it is its turn
        self._is_removed = False
        self._num_sent_away = self._pages = 0

    progress = ""

    @property
    def is_beyond_return(self) -> bool:
        return self._is_removed

    @property
    def deadline(self) -> float | None:
        return self._looks_at or self._hurry.deadline or self._patience.deadline

    def numbers(self) -> dict[str, Number]:
        return {
            "requests_sent_away": self._num_sent_away,
            "pages_unmapped": self._pages,
            "wait_seconds": round(self._patience.total_s, 6),
        }

    def steps(self) -> Steps:
        host, name = self._host, self._command.instance
        while host.busy_with:
            self._looks_at = self._clock() + TURN_S
            yield False
        self._looks_at = None
        host.busy_with = self._command.id
        try:
            host.begin_unload(name)
            yield from self._part_with_requests()
            resident, self._is_removed = host.remove(name), True
            yield from self._release(resident)
            while host.return_lent_pages():
                yield True
        finally:
            host.busy_with = ""
            host.end_unload(name, is_gone=self._is_removed)

    def _part_with_requests(self) -> Steps:
        host, name = self._host, self._command.instance
        instance = host.models[name].target.instance
        while instance.has_work or not host.is_drained(name):
            if not self._patience.wait():
                break
            yield False
        self._patience.get_on()
        if not host.is_drained(name) and host.listener:
            host.listener.on_unload_urgent(name)
        while not host.is_drained(name) and self._hurry.wait():
            yield False
        self._num_sent_away = host.engine.send_away(name, f"{name} is retired")

    def _release(self, resident: HostedModel) -> Steps:
        """Release all pages, even if this generator is closed half-way."""
        rest = self._parts(resident)
        try:
            for release in rest:
                self._give(release)
                yield True
        finally:
            for release in rest:
                self._give(release)

    def _give(self, release: Callable[[], None]) -> None:
        before = self._host.pool.num_free
        release()
        self._pages += self._host.pool.num_free - before

    def _parts(self, resident: HostedModel) -> Iterator[Callable[[], None]]:
        """Yield what releases each part; no step runs on any of them."""
        target, host = resident.target, self._host
        yield target.resizer.cache.release
        yield target.variants.release
        for loaded in resident.model.ranges:
            yield loaded.memory.release
        yield resident.model.release
        yield host.update_reserve

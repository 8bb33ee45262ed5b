"""Loading, in a thread of its own: the lease is renewed meanwhile and SIGTERM is heard."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bus.settings import WorkerSettings
from worker.service.membership import Membership
from worker.service.tasks import end

if TYPE_CHECKING:  # importing torch takes seconds, and CannotServe needs none
    from worker.deploy.model_host import ModelHost

log = logging.getLogger("worker")

PROGRESS_S = 0.5  # how often progress is shown on the card
PROGRESS_LOG_S = 2.0
STOP_S = 5.0  # a load stops at its next tensor; a compiler may take longer


class CannotServe(Exception):
    """Settings or a model folder that can never work. The message is one line that says what to change."""


Progress = Callable[[str], None]  # called in the loading thread, as often as the loader likes
Loader = Callable[[WorkerSettings, str, Progress], "ModelHost"]  # settings, worker id; raises CannotServe


class _Stopped(Exception):
    """Raised into the loader through its progress callback."""


class LoadTask:
    """The loading of one worker's models."""

    def __init__(self, load: Loader, settings: WorkerSettings, worker: str) -> None:
        self._load, self._settings, self._worker = load, settings, worker
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[ModelHost] = self._loop.create_future()
        self._latest = ""
        self._is_stopping = False

    async def run(
        self, membership: Membership, stop: asyncio.Event, renewal: asyncio.Task[None]
    ) -> ModelHost | None:
        """Load; None if `stop` was set first. Raises what the loader or the lease's renewal raises."""
        threading.Thread(target=self._work, name="load", daemon=True).start()
        stopping = asyncio.create_task(stop.wait())
        try:
            await self._show_progress(membership, [self._done, stopping, renewal])
        finally:
            await end(stopping)
        if self._done.done():
            return self._done.result()
        await self._stop(membership, exit_status=1 if renewal.done() else 0)
        if renewal.done():
            renewal.result()
        return None

    async def _show_progress(self, membership: Membership, until: list[asyncio.Future[Any]]) -> None:
        shown, logged_at = "", time.monotonic()
        while not any(future.done() for future in until):
            await asyncio.wait(until, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
            if self._latest != shown:
                shown = self._latest
                await membership.update(progress=shown)
                if time.monotonic() - logged_at >= PROGRESS_LOG_S:
                    logged_at = time.monotonic()
                    log.info("%s", shown)

    async def _stop(self, membership: Membership, exit_status: int) -> None:
        self._is_stopping = True
        await asyncio.wait([self._done], timeout=STOP_S)
        if not self._done.done():
            # Python would end under the native code of the loading thread, which aborts the process.
            await membership.leave()
            os._exit(exit_status)
        self._done.exception()

    def _work(self) -> None:  # runs in the loading thread
        try:
            loaded = self._load(self._settings, self._worker, self._progress)
        except BaseException as error:  # noqa: BLE001 the waiting side raises it again
            self._loop.call_soon_threadsafe(self._done.set_exception, error)
        else:
            self._loop.call_soon_threadsafe(self._done.set_result, loaded)

    def _progress(self, text: str) -> None:
        if self._is_stopping:
            raise _Stopped
        self._latest = text

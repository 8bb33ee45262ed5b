"""The engine's numbers, several times a second while busy, and a watchdog over its steps."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from bus.client import Bus, BusFull, BusUnavailable
from bus.clock import now_ms
from bus.messages import GpuTelemetry, WorkerTelemetry
from worker.service.engine_thread import EngineThread, Snapshot

log = logging.getLogger(__name__)

EXIT_STATUS = 1  # a restart helps


class TelemetryReporter:
    """Publishes the engine's numbers when it has new ones or the idle interval is over."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        epoch: Callable[[], int],
        thread: EngineThread,
        *,
        busy_interval_s: float,
        idle_interval_s: float,
        gpu: Callable[[], GpuTelemetry | None] = lambda: None,
    ) -> None:
        self._bus, self._worker, self._epoch, self._thread = bus, worker, epoch, thread
        self._busy_interval_s, self._idle_interval_s = busy_interval_s, idle_interval_s
        self._gpu = gpu
        self.group: tuple[str, ...] = ()  # whose shape the next report tells of
        self._snapshot: Snapshot | None = None
        self._is_new = asyncio.Event()
        self._reported_at, self._reported_busy_s, self._busy = time.monotonic(), 0.0, 0.0

    def take(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._is_new.set()

    async def run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle_interval_s):
                    await self._is_new.wait()
            self._is_new.clear()
            if self._snapshot:
                with suppress(BusUnavailable, BusFull):  # the next report says it all again
                    await self._bus.publish(self._bus.names.telemetry, self._report(self._snapshot))
            await asyncio.sleep(self._busy_interval_s)

    @property
    def latest(self) -> WorkerTelemetry | None:
        """The numbers of the latest snapshot, with `busy` as last reported; None before the first."""
        return self._telemetry(self._snapshot) if self._snapshot else None

    def _report(self, snapshot: Snapshot) -> WorkerTelemetry:
        now, busy_s = time.monotonic(), self._thread.busy_seconds()
        busy = (busy_s - self._reported_busy_s) / max(now - self._reported_at, 1e-6)
        self._reported_at, self._reported_busy_s = now, busy_s
        self._busy = min(1.0, max(0.0, busy))
        return self._telemetry(snapshot)

    def _telemetry(self, snapshot: Snapshot) -> WorkerTelemetry:
        return WorkerTelemetry(
            worker=self._worker,
            epoch=self._epoch(),
            at_ms=now_ms(),
            busy=self._busy,
            pages=snapshot.pages,
            instances=[replace(one, workers=list(self.group)) for one in snapshot.instances],
            steps=snapshot.steps,
            gpu=self._gpu(),
        )


async def watch_steps(thread: EngineThread, limit_s: float) -> None:
    """End the process when a step lasts longer than `limit_s`; the requests go on elsewhere."""
    while True:
        await asyncio.sleep(min(limit_s / 4, 2.0))
        if (seconds := thread.step_seconds()) > limit_s:
            log.critical(
                "a step has been running for %.0f s, the limit is %.0f s (worker.watchdog_s); "
                "the process ends here, see below where each thread was",
                seconds,
                limit_s,
            )
            faulthandler.dump_traceback()
            os._exit(EXIT_STATUS)

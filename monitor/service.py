"""The monitor's process: telemetry in, metrics and moments out.

Its state is in memory only: after a restart it reads again the telemetry that is still in the stream.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from bus.client import Bus, BusFull, BusUnavailable, Restart
from bus.clock import MessageClock, now_ms
from bus.messages import Metrics, WorkerTelemetry
from bus.service import run_until
from bus.settings import MonitorSettings, Settings
from monitor.moments import Rhythm, moment_of
from monitor.smoothing import Smoother

log = logging.getLogger("monitor")


async def main(settings: Settings, bus: Bus, stop: asyncio.Event) -> None:
    """Run until `stop` is set. Raises RedisProblem."""
    monitor = Monitor(settings.monitor, bus)
    log.info("following telemetry")
    await run_until(stop, monitor.follow(), monitor.report())


class Monitor:
    """A smoother between two loops: `follow` fills it, `report` publishes its metrics."""

    def __init__(self, settings: MonitorSettings, bus: Bus) -> None:
        self._settings = settings
        self._bus = bus
        self._news = asyncio.Event()  # load, or another shape
        self._rhythm = Rhythm()
        self._start_afresh()
        bus.on_restart(self._restarted)

    def _start_afresh(self) -> None:
        self._clock = MessageClock()
        mine = self._settings
        self._smoother = Smoother(window_s=mine.window_s, smoothing=mine.smoothing, stale_s=mine.stale_s)

    def _restarted(self, restart: Restart) -> None:
        if restart.data_lost:  # another server, maybe another clock
            self._start_afresh()

    async def follow(self) -> None:
        """Read reports from the oldest there is, so that a window that began earlier is whole at once."""
        async with self._bus.reader(self._bus.names.telemetry, WorkerTelemetry, start="0") as reader:
            async for batch in reader:
                for entry_id, report in batch:
                    at_s = self._clock.observe(entry_id, time.monotonic())
                    if self._smoother.observe(at_s, report):
                        self._news.set()
                if self._smoother.has_load(self._now()):
                    self._news.set()

    async def report(self) -> None:
        """Publish every `interval_s` under load, else every `idle_interval_s` or at news."""
        while True:
            await asyncio.sleep(self._settings.interval_s)
            if not self._smoother.has_load(self._now()):
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.idle_interval_s - self._settings.interval_s):
                        await self._news.wait()
            self._news.clear()
            await self._publish(self._smoother.metrics(self._now(), now_ms()))

    async def _publish(self, metrics: Metrics) -> None:
        names, batch = self._bus.names, self._bus.batch()
        batch.publish(names.metrics, metrics)
        if self._rhythm.is_due(time.monotonic(), self._smoother.has_load(self._now())):
            batch.publish(names.moments, moment_of(metrics))
        try:
            await batch.send()
        except BusUnavailable:
            await self._bus.wait_up()
        except BusFull as full:  # readers see that the last metrics grow old, and hold
            log.debug("metrics are not published: %s", full)

    def _now(self) -> float:
        return self._clock.now(time.monotonic())

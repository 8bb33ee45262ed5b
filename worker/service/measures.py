"""Measure commands of a worker: what is stored answers at once, the rest the engine's thread measures."""

from __future__ import annotations

import asyncio
import logging
import time

from bus.client import Bus, BusFull, BusUnavailable
from bus.deployments import Measure, Profile
from bus.messages import Event
from worker.profiler.measurer import CannotMeasure, Measurer
from worker.profiler.measuring import News
from worker.service.engine_thread import EngineThread
from worker.service.tasks import end

log = logging.getLogger("worker")

PROGRESS_S = 2.0  # between two events about one profile
RETRY_S = 0.5


class Measures:
    """`begin` from the event loop. A profile ends in its key, or in an event that says why there is none."""

    def __init__(self, bus: Bus, worker: str, thread: EngineThread, measurer: Measurer | None) -> None:
        """measurer: None where nothing is measured."""
        self._bus, self._worker, self._thread, self._measurer = bus, worker, thread, measurer
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    def begin(self, command: Measure) -> None:
        """The same command again changes nothing."""
        if command.id not in self._tasks:
            self._tasks[command.id] = asyncio.create_task(self._run(command), name=f"measure {command.model}")

    def cancel(self, command_id: str) -> None:
        """Where the engine's thread has it not yet, or no more; there `EngineThread.cancel_morph` does it."""
        if (task := self._tasks.get(command_id)) and not task.done():
            self._cancelled.add(command_id)

    def refuse(self, reason: str) -> None:
        """Those that run are given up."""
        self._measurer = None
        self._thread.measure(lambda measuring: measuring.cancel_all(reason))

    async def close(self) -> None:
        await end(*self._tasks.values())

    async def _run(self, command: Measure) -> None:
        try:
            profile = await self._measure(command, self._measurer)
        except CannotMeasure as problem:
            log.warning("%s is not measured: %s", command.model, problem)
            await self._send(self._event("profile_failed", command, str(problem)))
        except Exception as error:
            log.exception("measuring %s failed", command.model)
            await self._send(self._event("profile_failed", command, f"{type(error).__name__}: {error}"))
        else:
            await self._send(profile)

    async def _measure(self, command: Measure, measurer: Measurer | None) -> Profile:
        if measurer is None:
            raise CannotMeasure("this worker measures nothing, or no longer")
        if found := await asyncio.to_thread(measurer.find, command):
            log.info("%s was measured before: %.1f s of the device", command.model, found.device_seconds)
            return found
        profiler = await asyncio.to_thread(measurer.prepare, command)
        self._check_wanted(command)
        news: asyncio.Queue[News] = asyncio.Queue()

        def tell(one: News) -> None:
            self._loop.call_soon_threadsafe(news.put_nowait, one)

        self._thread.measure(lambda measuring: measuring.begin(command.id, profiler, tell))
        await self._until_over(command, news)
        profile = await asyncio.to_thread(measurer.keep, command, profiler)
        self._check_wanted(command)
        log.info(
            "measured %s in %.1f s of the device and at most %.1f MiB",
            command.model,
            profile.device_seconds,
            profile.peak_bytes / 2**20,
        )
        return profile

    def _check_wanted(self, command: Measure) -> None:
        if command.id in self._cancelled:
            raise CannotMeasure("cancelled")

    async def _until_over(self, command: Measure, news: asyncio.Queue[News]) -> None:
        """Raises CannotMeasure."""
        told_at = 0.0
        while not (one := await news.get()).is_over:
            if time.monotonic() - told_at >= PROGRESS_S:
                told_at = time.monotonic()
                log.info("measuring %s: %s", command.model, one.progress)
                await self._send(self._event("profile_progress", command, one.progress))
        if one.problem:
            raise CannotMeasure(one.problem)

    def _event(self, kind: str, command: Measure, reason: str) -> Event:
        return Event(
            kind=kind,
            source=self._worker,
            subject=command.model,
            reason=reason,
            at_ms=time.time_ns() // 1_000_000,
            morph_id=command.id,
        )

    async def _send(self, told: Event | Profile) -> None:
        """However long Redis is away; news of progress is not worth that."""
        is_news = isinstance(told, Event) and told.kind == "profile_progress"
        while True:
            try:
                if isinstance(told, Event):
                    await self._bus.publish(self._bus.names.events, told)
                else:
                    await self._bus.catalogue.write(told)
                return
            except (BusUnavailable, BusFull) as error:
                if is_news:
                    return
                log.debug("not yet: %s", error)
                await asyncio.sleep(RETRY_S)
                await self._bus.wait_up()

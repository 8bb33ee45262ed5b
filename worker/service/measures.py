"""The Measure commands of a worker: a stored profile answers at once; else the engine's thread measures."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from bus.client import Bus, BusFull, BusUnavailable
from bus.clock import now_ms
from bus.deployments import Measure, Profile
from bus.messages import Event
from worker.profiler.measurer import CannotMeasure, Measurer
from worker.profiler.runner import ProfileProgress, ProfileRunner
from worker.service.engine_thread import EngineThread
from worker.service.tasks import end, until_taken

log = logging.getLogger("worker")

PROGRESS_S = 2.0  # between two events about one profile


class Measures:
    """Runs Measure commands. A profile ends in its key, or in an event that says why there is none."""

    def __init__(
        self, bus: Bus, worker: str, thread: EngineThread, runner: ProfileRunner, measurer: Measurer | None
    ) -> None:
        """Answer with `measurer`, None if this worker measures nothing; `runner` belongs to `thread`."""
        self._bus, self._worker, self._thread = bus, worker, thread
        self._runner, self._measurer = runner, measurer
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cancelled: set[str] = set()

    def begin(self, command: Measure) -> None:
        """Begin a command, from the event loop. Repeating it changes nothing."""
        if command.id not in self._tasks:
            self._tasks[command.id] = asyncio.create_task(self._run(command), name=f"measure {command.model}")

    def cancel(self, command_id: str) -> None:
        """Cancel a command that the engine's thread does not have; else `EngineThread.cancel_morph` does."""
        if (task := self._tasks.get(command_id)) and not task.done():
            self._cancelled.add(command_id)

    def refuse(self, reason: str) -> None:
        """Refuse further commands and cancel those that run."""
        self._measurer = None
        self._thread.call(lambda: self._runner.cancel_all(reason))

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
            raise CannotMeasure("this worker does not measure, or no longer")
        if found := await asyncio.to_thread(measurer.find, command):
            log.info("%s was measured before: %.1f s of the device", command.model, found.device_seconds)
            return found
        profiler = await asyncio.to_thread(measurer.prepare, command)
        self._check_wanted(command)
        news: asyncio.Queue[ProfileProgress] = asyncio.Queue()

        def tell(one: ProfileProgress) -> None:
            self._loop.call_soon_threadsafe(news.put_nowait, one)

        self._thread.call(lambda: self._runner.begin(command.id, profiler, tell))
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

    async def _until_over(self, command: Measure, news: asyncio.Queue[ProfileProgress]) -> None:
        """Report progress until the profile ends. Raises CannotMeasure."""
        reported_at = 0.0
        while not (one := await news.get()).is_over:
            if time.monotonic() - reported_at >= PROGRESS_S:
                reported_at = time.monotonic()
                log.info("measuring %s: %s", command.model, one.progress)
                with suppress(BusUnavailable, BusFull):
                    event = self._event("profile_progress", command, one.progress)
                    await self._bus.publish(self._bus.names.events, event)
        if one.problem:
            raise CannotMeasure(one.problem)

    def _event(self, kind: str, command: Measure, reason: str) -> Event:
        return Event(
            kind=kind,
            source=self._worker,
            subject=command.model,
            reason=reason,
            at_ms=now_ms(),
            morph_id=command.id,
        )

    async def _send(self, message: Event | Profile) -> None:
        """Send an event or a profile, however long Redis is away."""
        if isinstance(message, Event):
            await until_taken(self._bus, lambda: self._bus.publish(self._bus.names.events, message))
        else:
            await until_taken(self._bus, lambda: self._bus.catalogue.write(message))

"""What becomes of morphs, on the stream `events`, in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable

from bus.client import Bus, BusFull, BusUnavailable
from bus.messages import MorphReport

log = logging.getLogger(__name__)

MAX_WAITING = 1000  # while Redis is away; then the oldest are lost
FULL_RETRY_S = 1.0
REST_S = 2.0  # for the last reports of a worker that leaves


class MorphReports:
    """`put` from the event loop; `run` publishes. Whoever reads them knows a morph by its id: a report whose
    answer from Redis was lost comes twice."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[MorphReport] = deque(maxlen=MAX_WAITING)
        self._filled = asyncio.Event()

    def put(self, reports: Iterable[MorphReport]) -> None:
        self._waiting.extend(reports)
        self._filled.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self._publish_all()

    async def send_rest(self) -> None:
        """At the end, when `run` was cancelled: what still waits, and what ended with the engine's thread. A
        Redis that is away gets none of it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._publish_all()

    async def _publish_all(self) -> None:
        while self._waiting:
            report = self._waiting.popleft()
            try:
                await self._publish(report)
            except BaseException:
                self._waiting.appendleft(report)
                raise

    async def _publish(self, report: MorphReport) -> None:
        while True:
            try:
                return await self._bus.publish(self._bus.names.events, report)
            except BusUnavailable:
                await self._bus.wait_up()
            except BusFull as error:
                log.warning("Redis is full, morph reports wait: %s", error)
                await asyncio.sleep(FULL_RETRY_S)

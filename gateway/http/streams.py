"""The open streams: one watch for all of them, instead of a timer each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.http.sse import EventStream


class Streams:
    """Sends the comment lines that keep silent streams open in proxies."""

    def __init__(self, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._open: dict[EventStream, None] = {}
        self._any = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def kept_alive(self, stream: EventStream) -> Iterator[None]:
        self._open[stream] = None
        self._any.set()
        try:
            yield
        finally:
            del self._open[stream]
            if not self._open:
                self._any.clear()

    async def run(self) -> None:
        """For ever; sleeps while no stream is open."""
        while True:
            await self._any.wait()
            await asyncio.sleep(min(1.0, self._keepalive_s / 4))
            now = time.monotonic()
            for stream in self._open:
                stream.keep_alive(now, self._keepalive_s)

"""Server-sent events, written straight to a call's socket.

The reader of the tokens stream pushes events and flushes once per batch: no task wakes up per token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gateway.http.connection import ClientSocket

DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": keepalive\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"transfer-encoding", b"chunked"),  # without it clients take a lost connection for the end
]


class EventStream:
    """The events of one call, written after `open`.

    max_pending, max_pending_mb: events, and their size, that may wait for the client.
    """

    __slots__ = (
        "_is_open",
        "_moved",
        "_pending",
        "_socket",
        "max_pending",
        "max_pending_mb",
        "num_pending_bytes",
        "written_at",
    )

    def __init__(self, socket: ClientSocket, max_pending: int, max_pending_mb: int) -> None:
        self._socket = socket
        self.max_pending, self.max_pending_mb = max_pending, max_pending_mb
        self.num_pending_bytes = 0
        self._pending: list[bytes] = []
        self._is_open = False
        self._moved = asyncio.Event()  # the client took something, or left
        self.written_at = 0.0

    @property
    def is_over_limit(self) -> bool:
        is_over = self.num_pending_bytes > self.max_pending_mb * 1024 * 1024
        return is_over or len(self._pending) > self.max_pending

    def open(self) -> None:
        self._is_open = True
        self._socket.on_writable = self._on_writable
        self.written_at = time.monotonic()
        self.flush()

    def push(self, event: bytes) -> None:
        self._pending.append(event)
        self.num_pending_bytes += len(event)

    def flush(self) -> None:
        """Write all that waits in one chunk, unless the client is behind."""
        if not self._pending or not self._is_open or self._socket.is_paused or self._socket.is_lost:
            return
        self._socket.write_chunk(b"".join(self._pending))
        self._pending.clear()
        self.num_pending_bytes = 0
        self.written_at = time.monotonic()

    def on_lost(self) -> None:
        """Stop waiting for a client that left."""
        self._moved.set()

    def _on_writable(self) -> None:
        self.flush()
        self._moved.set()

    def keep_alive(self, now: float, after_s: float) -> None:
        """Write a comment if nothing was written for `after_s`: proxies cut silent streams."""
        can_write = self._is_open and not self._socket.is_paused and not self._pending
        if can_write and now - self.written_at >= after_s:
            self._socket.write_chunk(KEEPALIVE)
            self.written_at = now

    async def drained(self, within_s: float) -> bool:
        """Return True if the client took the rest in time, apart from what the socket buffers hold."""
        self.flush()
        try:
            async with asyncio.timeout(within_s):
                while (self._pending or self._socket.is_paused) and not self._socket.is_lost:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return not self._socket.is_lost


class Streams:
    """The open streams, kept alive by one task for all of them."""

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
        """Keep streams alive until cancelled; sleep while none is open."""
        while True:
            await self._any.wait()
            await asyncio.sleep(min(1.0, self._keepalive_s / 4))
            now = time.monotonic()
            for stream in self._open:
                stream.keep_alive(now, self._keepalive_s)

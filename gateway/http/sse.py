"""Server-sent events of one call, written straight to its socket.

The reader of the tokens stream pushes events and flushes once per batch: no task wakes up per token. While
the client does not read, events pile up here to a bound, and the other streams never notice.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from gateway.errors import ApiError
from gateway.http.connection import ClientSocket

DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": keepalive\n\n"
HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"transfer-encoding", b"chunked"),  # without it a lost connection looks like a proper end to clients
]


def error_event(error: ApiError) -> bytes:
    """The only form of failure in a stream that clients notice: an object with a message under `error`."""
    return b"data: %b\n\n" % error.body()


class EventStream:
    """`max_pending`: events that may wait for the client; `is_over_limit` tells its owner that it is time
    to give up. Nothing is written before `open`, when the status line and headers are out."""

    __slots__ = ("_is_open", "_moved", "_pending", "_socket", "max_pending", "written_at")

    def __init__(self, socket: ClientSocket, max_pending: int) -> None:
        self._socket = socket
        self.max_pending = max_pending
        self._pending: list[bytes] = []
        self._is_open = False
        self._moved = asyncio.Event()  # set when the client took something, or left
        self.written_at = 0.0

    @property
    def is_over_limit(self) -> bool:
        return len(self._pending) > self.max_pending

    def open(self) -> None:
        self._is_open = True
        self._socket.on_writable = self._on_writable
        self.written_at = time.monotonic()
        self.flush()

    def push(self, event: bytes) -> None:
        self._pending.append(event)

    def flush(self) -> None:
        """All that waits, in one chunk, unless the client is behind."""
        if not self._pending or not self._is_open or self._socket.is_paused or self._socket.is_lost:
            return
        self._socket.write_chunk(b"".join(self._pending))
        self._pending.clear()
        self.written_at = time.monotonic()

    def on_lost(self) -> None:
        """The client left: nobody takes the rest."""
        self._moved.set()

    def _on_writable(self) -> None:
        self.flush()
        self._moved.set()

    def keep_alive(self, now: float, after_s: float) -> None:
        """A comment, if nothing went out for a while: proxies cut silent streams."""
        if (
            now - self.written_at >= after_s
            and self._is_open
            and not self._socket.is_paused
            and not self._pending
        ):
            self._socket.write_chunk(KEEPALIVE)
            self.written_at = now

    async def drained(self, within_s: float) -> bool:
        """Whether the client took the rest in time, but for what the socket buffers hold."""
        self.flush()
        try:
            async with asyncio.timeout(within_s):
                while (self._pending or self._socket.is_paused) and not self._socket.is_lost:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return not self._socket.is_lost

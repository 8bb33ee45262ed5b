"""The socket side: uvicorn's HTTP protocol with limits, and a direct line to a stream's socket.

uvicorn closes a connection that idles *between* requests. One that never sends a request, or sends its
headers letter by letter, it keeps for ever; here both are closed after `header_timeout_s`, and when all
places are taken the connection that has been silent longest makes room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import bad_json, overloaded

EXTENSION = "instar.link"


def _nothing() -> None:
    pass


class ClientSocket:
    """What a stream needs of its socket, in `scope["extensions"]["instar.link"]`: write without a task
    wake-up per token, see back-pressure, learn at once that the client left. The owner of the current
    request sets the callbacks and calls `release` at the end."""

    __slots__ = ("is_lost", "is_paused", "on_lost", "on_writable", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.is_paused = False
        self.is_lost = False
        self.release()

    def release(self) -> None:
        self.on_lost: Callable[[], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing

    def write_chunk(self, body: bytes) -> None:
        """One chunk of a chunked HTTP/1.1 body."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class Protocol(HttpToolsProtocol):
    """Class attributes are settings: uvicorn makes the instances. `silent` holds the connections that have
    not sent a whole request head yet, the oldest first."""

    header_timeout_s: ClassVar[float] = 10.0
    max_connections: ClassVar[int] = 4096
    silent: ClassVar[dict[Protocol, None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.link = ClientSocket(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections and not self._make_room():
            error = overloaded(f"{self.max_connections} connections are open (gateway.max_connections)")
            self._refuse(b"503 Service Unavailable", error.body(), b"retry-after: 1\r\n")
            return
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        super().connection_lost(exc)
        self.link.is_lost = True
        self.link.on_lost()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:  # a further request on this connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._head_arrived()
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self.link}
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """A refusal may be out before the body is in. What still comes of it is dropped, since closing now
        would take the answer from a client that is still sending; but not for ever. (With requests in the
        pipeline `cycle` is the last of those, and its turn only comes.)"""
        if not self.pipeline and self.cycle.more_body:
            self._expect_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.link.is_paused = True

    def resume_writing(self) -> None:
        super().resume_writing()
        self.link.is_paused = False
        self.link.on_writable()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all."""
        self._refuse(b"400 Bad Request", bad_json(msg).body())

    def _expect_head(self) -> None:
        self.silent[self] = None
        self._head_timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _head_arrived(self) -> None:
        self.silent.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _make_room(self) -> bool:
        """Closes the connection that has been silent longest; False if all are at work."""
        oldest = next(iter(self.silent), None)
        if oldest is None:
            return False
        oldest._head_arrived()
        oldest.transport.abort()
        return True

    def _refuse(self, status: bytes, body: bytes, headers: bytes = b"") -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
            status,
            len(body),
        )
        self.transport.write(head + headers + b"connection: close\r\n\r\n" + body)
        self.transport.close()

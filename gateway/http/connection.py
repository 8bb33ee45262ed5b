"""uvicorn's HTTP protocol with limits, and direct access to a stream's socket.

Connections without a whole request head are closed after `header_timeout_s`, or for another at the limit. So
are those with a longer head than `max_head_bytes`, and those whose client takes nothing of an answer for
`write_timeout_s`; the reader of a stream has a limit of its own (`EventStream.max_pending`). Requests that a
client sends ahead of an answer wait as bytes: parsed at once, thousands of them would hold up everybody.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import large_head, malformed, overloaded

EXTENSION = "instar.link"
HEAD_BYTES, BODY_BYTES = 512, 64 * 1024  # parsed at once of a head, and of a body: few requests fit in


def _nothing() -> None:
    pass


class ClientSocket:
    """The socket of a request; its owner sets the callbacks and calls `release` at the end."""

    __slots__ = ("is_lost", "is_paused", "on_lost", "on_writable", "transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.is_paused = False
        self.is_lost = False
        self.release()

    def release(self) -> None:
        self.on_lost: Callable[[], None] = _nothing
        self.on_writable: Callable[[], None] = _nothing

    @property
    def is_streaming(self) -> bool:
        """True while an event stream writes here and watches its own reader."""
        return self.on_writable is not _nothing

    def unsent(self) -> int:
        """Return the bytes that the client has not taken, here and in the kernel (tcp(7), SIOCOUTQ)."""
        sock = self.transport.get_extra_info("socket")
        in_kernel = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def write_chunk(self, body: bytes) -> None:
        """Write one chunk of a chunked HTTP/1.1 body."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class Protocol(HttpToolsProtocol):
    """One connection. Class attributes are settings. `silent`: without a whole request head, oldest first."""

    header_timeout_s: ClassVar[float] = 10.0
    write_timeout_s: ClassVar[float] = 30.0
    max_connections: ClassVar[int] = 4096
    max_head_bytes: ClassVar[int] = 64 * 1024
    silent: ClassVar[dict[Protocol, None]] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.socket = ClientSocket(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes: int | None = None  # of the head that is under way
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False
        self._ahead = bytearray()  # not parsed yet: it follows requests that wait for their answers
        if len(self.connections) > self.max_connections and not self._make_room():
            error = overloaded(f"{self.max_connections} connections are open (gateway.max_connections)")
            self._refuse(b"503 Service Unavailable", error.body(), b"retry-after: 1\r\n")
            return
        self._head_bytes = 0
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._stop_write_timer()
        super().connection_lost(exc)
        self.socket.is_lost = True
        self.socket.on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse what came up to the first request that has to wait for the answer to another."""
        self._ahead += data
        self._parse_on()

    def _parse_on(self) -> None:
        while self._ahead and not self.pipeline and not self.transport.is_closing():
            size = BODY_BYTES if self._is_in_body else HEAD_BYTES
            piece = bytes(self._ahead[:size])
            del self._ahead[:size]
            self._parse(piece)

    def _parse(self, data: bytes) -> None:
        """Parse a piece, and refuse a head without an end. One piece may go over the limit."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)  # a head that begins within `data` counts from the next piece on
        if self._head_bytes is not None and self._head_bytes > self.max_head_bytes:
            error = large_head(f"the request's head is longer than {self.max_head_bytes} bytes")
            self._refuse(b"431 Request Header Fields Too Large", error.body())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        if self._head_timer is None:  # a further request on this connection
            self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field of the head, and none of what may follow a body: nobody here reads trailers."""
        if self._head_bytes is not None:
            super().on_header(name, value)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_body = False

    def on_headers_complete(self) -> None:
        self._head_arrived()
        self._is_in_body = True
        scope: Any = self.scope
        scope["extensions"] = {EXTENSION: self.socket}
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Drop the rest of a refused body for a limited time, so that its client reads the answer."""
        if not self.pipeline and self.cycle.more_body:
            self._start_timer()
        self._expect_reader()  # also if little is left: closing would wait for it without end
        super().on_response_complete()
        if self._ahead and not self.pipeline:
            self.loop.call_soon(self._parse_on)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.socket.is_paused = True
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._expect_reader()  # of what is left, too: asyncio resumes before all is gone
        self.socket.is_paused = False
        self.socket.on_writable()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(b"400 Bad Request", malformed(msg).body())

    def _expect_reader(self) -> None:
        """Give the client up if it takes nothing of what waits for it within `write_timeout_s`."""
        self._stop_write_timer()
        if self.transport.get_write_buffer_size():
            self._write_timer = self.loop.call_later(
                self.write_timeout_s, self._look_at_reader, self.socket.unsent()
            )

    def _look_at_reader(self, waited: int) -> None:
        if self.socket.unsent() >= waited and not self.socket.is_streaming:
            self.transport.abort()
        else:
            self._expect_reader()

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_timer(self) -> None:
        self.silent[self] = None
        self._head_timer = self.loop.call_later(self.header_timeout_s, self.transport.close)

    def _head_arrived(self) -> None:
        self._head_bytes = None
        self.silent.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _make_room(self) -> bool:
        """Close the connection that has been silent longest; return False if none is silent."""
        oldest = next(iter(self.silent), None)
        if oldest is None:
            return False
        oldest._head_arrived()
        oldest.transport.abort()
        return True

    def _refuse(self, status: bytes, body: bytes, headers: bytes = b"") -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        head = head % (status, len(body)) + headers + b"connection: close\r\n\r\n"
        self.transport.write(head + body)
        self.transport.close()

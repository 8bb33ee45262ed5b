"""One HTTP/1.1 request on a connection of its own, read as cheaply as possible.

The events of a stream are only counted while they come: a replay may share its machine with the server. Each
connection is used once: a kept one may be dead at the moment of sending, and would need a retry.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httptools

from instar.errors import ServerError
from instar.replay.outcomes import KEPT_BYTES, LOST

CONNECT_S: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 26
EVENT: Final = b'"choices"'  # occurs once in each event; quotes within its text are escaped


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server. `path` is the part before /v1."""

    host: str
    port: int
    path: str
    tls: ssl.SSLContext | None
    name: str
    key: str = ""

    @classmethod
    def at(cls, url: str, key: str | None) -> ServerAddress:
        """Return the address of a valid URL."""
        found = urlsplit(url)
        tls = ssl.create_default_context() if found.scheme == "https" else None
        path = found.path.rstrip("/").removesuffix("/v1")
        default = 443 if tls else 80
        return cls(found.hostname or "", found.port or default, path, tls, found.netloc, key or "")

    def head(self, method: str, path: str, length: int | None = None, request_id: str = "") -> bytes:
        """Return the head of a request, with the `length` of a JSON body if it has one."""
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"host: {self.name}", "connection: close"]
        lines += [f"authorization: Bearer {self.key}"] if self.key else []
        lines += [f"x-request-id: {request_id}"] if request_id else []
        if length is not None:
            lines += ["content-type: application/json", f"content-length: {length}"]
        return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


class Exchange(asyncio.Protocol):
    """A request and its answer. Times are those of time.perf_counter, 0.0 for what has not happened.

    `ended` is done when the answer is complete or the connection lost; then `problem` is "" or the reason.
    """

    def __init__(
        self, on_events: Callable[[int, float], None] = lambda num, at: None, kept_bytes: int = KEPT_BYTES
    ) -> None:
        """`on_events` is called with the number of events of each read, and its time."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.tail = bytearray()  # end of the body
        self.num_events = 0
        self.sent = self.opened = self.first = self.last = self.longest_pause = 0.0
        self.problem = ""
        self._on_events = on_events
        self._kept_bytes = kept_bytes
        self._carried = b""
        self._now = 0.0
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self.ended.done()

    def send(self, request: bytes) -> None:
        if self._transport is None:
            raise AssertionError("sent before it was connected")
        self.sent = time.perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """Abort the connection in any state."""
        if self._transport is not None:
            self._transport.abort()
        self._end("")

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problem = f"not HTTP: {error}"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End the answer. One without a length ends so, too; its stream says whether it was complete."""
        self._end(LOST if self.status == 0 or error is not None else "")
        self._parser = None  # break the cycle: the parser refers to this object

    def _end(self, problem: str) -> None:
        if not self.ended.done():
            self.problem = self.problem or problem
            self.ended.set_result(None)

    # Called by httptools.

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self.opened = self._now

    def on_body(self, body: bytes) -> None:
        self.tail += body
        if len(self.tail) > 2 * self._kept_bytes:
            del self.tail[: -self._kept_bytes]
        if self.status == 200:
            self._count(body)

    def on_message_complete(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._end("")

    def _count(self, body: bytes) -> None:
        seen = self._carried + body
        num = seen.count(EVENT)
        self._carried = seen[1 - len(EVENT) :]
        if not num:
            return
        now = self._now
        self.first = self.first or now
        self.longest_pause = max(self.longest_pause, now - (self.last or now))
        self.last = now
        self.num_events += num
        self._on_events(num, now)


async def connect(server: ServerAddress, exchange: Exchange) -> str:
    """Open the connection. Returns "" or why it could not be opened."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: exchange, server.host, server.port, ssl=server.tls)
    except TimeoutError:
        return "connect: timed out"
    except OSError as error:
        return f"connect: {_kind(error)}"
    return ""


def _kind(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return errno.errorcode.get(error.errno or 0, "") or str(error)


async def fetch(
    server: ServerAddress,
    method: str,
    path: str,
    body: bytes | None = None,
    within_s: float = 10.0,
    request_id: str = "",
) -> tuple[int, bytes]:
    """Return (status, body) of a small answer. Raises ServerError if none comes."""
    exchange = Exchange(kept_bytes=MAX_ANSWER_BYTES)
    problem = await connect(server, exchange)
    if not problem:
        head = server.head(method, path, None if body is None else len(body), request_id)
        exchange.send(head + (body or b""))
        try:
            async with asyncio.timeout(within_s):
                await exchange.ended
            problem = exchange.problem
        except TimeoutError:
            problem = f"no answer within {within_s:g} s"
        finally:
            exchange.close()
    if problem:
        raise ServerError(problem)
    return exchange.status, bytes(exchange.tail)

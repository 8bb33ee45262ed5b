"""The streams of /admin/events and /admin/requests, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import msgspec

from gateway.delivery.request import RequestState

KEEPALIVE: Final = b": keepalive\n\n"
EVENTS_KEEPALIVE_S: Final = 10.0
REQUESTS_KEEPALIVE_S: Final = 1.0  # a client that stops after some time looks at the clock with each line
KEPT_EVENTS: Final = 256
KEPT_REQUESTS: Final = 4096  # requests that a slow client has not read
KEPT_BYTES: Final = 32 << 20  # the same: with prompts, a request may have hundreds of kilobytes


def sse(kind: str, body: object) -> bytes:
    """Return one server-sent event with a JSON body."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))


class Listener:
    """The events that wait for one client of a stream: the latest `kept` ones."""

    def __init__(self, kept: int | None = None, *, has_prompts: bool = False) -> None:
        self.pending: deque[bytes] = deque(maxlen=kept)
        self.has_news = asyncio.Event()
        self.has_prompts = has_prompts
        self.is_dropped = False
        self.num_bytes = self.num_lost = 0

    def put(self, data: bytes) -> None:
        self.pending.append(data)
        self.num_bytes += len(data)
        self.has_news.set()

    def drop(self) -> None:
        """End the stream without what waits."""
        self.is_dropped = True
        self.pending.clear()
        self.has_news.set()

    def take(self) -> bytes:
        """Return all that waits; then how many events were lost, if any."""
        data = b"".join(self.pending)
        self.pending.clear()
        if self.num_lost:
            data += b"event: lost\ndata: %d\n\n" % self.num_lost
        self.num_bytes = self.num_lost = 0
        return data


L = TypeVar("L", bound=Listener)


class Feed(Generic[L]):
    """A stream for any number of clients."""

    def __init__(self) -> None:
        self._listeners: dict[L, None] = {}
        self._is_closed = False

    def close(self) -> None:
        """End every client's stream: the process exits."""
        self._is_closed = True
        for listener in self._listeners:
            listener.has_news.set()

    @contextmanager
    def _joined(self, listener: L) -> Iterator[L]:
        self._listeners[listener] = None
        try:
            yield listener
        finally:
            self._leave(listener)

    def _leave(self, listener: L) -> None:
        self._listeners.pop(listener, None)

    async def _follow(self, listener: L, keepalive_s: float) -> AsyncIterator[bytes]:
        """Yield what waits for a client, and comments while nothing does, until `close` or it is dropped."""
        while not (self._is_closed or listener.is_dropped):
            try:
                async with asyncio.timeout(keepalive_s):
                    await listener.has_news.wait()
            except TimeoutError:
                yield KEEPALIVE
                continue
            listener.has_news.clear()
            yield listener.take()
        if listener.pending:  # put while the streams of other clients ended
            yield listener.take()


class EventFeed(Feed[Listener]):
    """Events of the bus. A new client gets the last KEPT_EVENTS; one as many behind loses the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: deque[bytes] = deque(maxlen=KEPT_EVENTS)

    def publish(self, kind: str, body: object) -> None:
        data = sse(kind, body)
        self._recent.append(data)
        for listener in self._listeners:
            listener.put(data)

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield events until `close`; a comment at once and while nothing happens."""
        with self._joined(Listener(KEPT_EVENTS)) as listener:
            yield b": events\n\n" + b"".join(self._recent)
            async for data in self._follow(listener, EVENTS_KEEPALIVE_S):
                yield data


class EndedRequests(Feed[Listener]):
    """Requests as they end; `instar bench record` writes them to a file.

    Refused calls are not among them: most were never read. Prompts go out as token ids, and only to clients
    that ask for them. A client that is `kept` requests or KEPT_BYTES behind loses the newest and gets their
    number. Without a client an end costs one look at an empty table.
    """

    def __init__(self, kept: int = KEPT_REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._kept = kept
        self._clock = clock

    def publish(self, state: RequestState, status: str) -> None:
        """Publish one sequence that ended. `status`: stop, length, abort, or the code of its error."""
        if not self._listeners:
            return
        record = self._record(state, status)
        for listener in self._listeners:
            if len(listener.pending) >= self._kept or listener.num_bytes >= KEPT_BYTES:
                listener.num_lost += 1
            else:
                prompt = {"prompt_token_ids": state.request.prompt_token_ids} if listener.has_prompts else {}
                listener.put(sse("request", record | prompt))

    async def listen(self, has_prompts: bool) -> AsyncIterator[bytes]:
        """Yield requests until `close`; a comment at once and while none ends."""
        with self._joined(Listener(has_prompts=has_prompts)) as listener:
            yield b": requests\n\n"
            async for data in self._follow(listener, REQUESTS_KEEPALIVE_S):
                yield data

    def _record(self, state: RequestState, status: str) -> dict[str, Any]:
        """Return what is published. `at`: seconds since 1970, when it arrived."""
        seconds = self._clock() - state.request.arrived
        return {
            "at": round(time.time() - seconds, 6),
            "id": state.request.trace_id,
            "model": state.request.model,
            "prompt_tokens": len(state.request.prompt_token_ids),
            "output_tokens": len(state.received),
            "max_tokens": state.request.sampling.max_tokens,
            "status": status,
            "attempts": state.attempt,
            "seconds": round(seconds, 6),
        }

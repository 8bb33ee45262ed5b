"""The streams of /admin/events and /admin/requests, as server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from bus.messages import Event
from gateway.delivery.request import RequestState
from gateway.morphs import MorphRecord

KEEPALIVE: Final = b": keepalive\n\n"
EVENTS_KEEPALIVE_S: Final = 10.0
REQUESTS_KEEPALIVE_S: Final = 1.0  # a client that stops after some time looks at the clock with each line
KEPT_EVENTS: Final = 256
KEPT_REQUESTS: Final = 4096  # that a slow client has not read
KEPT_BYTES: Final = 32 << 20  # the same: with prompts, a request may have hundreds of kilobytes


def sse(kind: str, body: object) -> bytes:
    """Return one server-sent event with a JSON body."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))


async def follow(
    has_news: asyncio.Event, take: Callable[[], bytes], is_over: Callable[[], bool], keepalive_s: float
) -> AsyncIterator[bytes]:
    """Yield what `take` returns when `has_news` is set, and comments while it is not, until `is_over`."""
    while not is_over():
        try:
            async with asyncio.timeout(keepalive_s):
                await has_news.wait()
        except TimeoutError:
            yield KEEPALIVE
            continue
        has_news.clear()
        yield take()


class Listener:
    """What waits for one client of a stream: `kept` events at most, of which the oldest are dropped."""

    def __init__(self, kept: int | None = None, *, has_prompts: bool = False) -> None:
        self.pending: deque[bytes] = deque(maxlen=kept)
        self.has_news = asyncio.Event()
        self.has_prompts = has_prompts
        self.num_bytes = self.num_lost = 0

    def put(self, data: bytes) -> None:
        self.pending.append(data)
        self.num_bytes += len(data)
        self.has_news.set()

    def take(self) -> bytes:
        """Return all that waits; then how many events were lost, if any."""
        data = b"".join(self.pending)
        self.pending.clear()
        if self.num_lost:
            data += b"event: lost\ndata: %d\n\n" % self.num_lost
        self.num_bytes = self.num_lost = 0
        return data


class EventFeed:
    """Events of the bus. A new client gets the last `kept` first; one `kept` behind loses the oldest."""

    def __init__(self, kept: int = KEPT_EVENTS) -> None:
        self._recent: deque[bytes] = deque(maxlen=kept)
        self._listeners: set[Listener] = set()
        self._is_closed = False
        self._kept = kept

    def publish(self, event: Event) -> None:
        self._put(sse(event.kind, event))

    def publish_morph(self, record: MorphRecord) -> None:
        """Publish a report as the event `morph`, with what GET /admin/morphs/{morph} returns."""
        self._put(sse("morph", record.as_json()))

    def _put(self, data: bytes) -> None:
        self._recent.append(data)
        for listener in self._listeners:
            listener.put(data)

    def close(self) -> None:
        """End every client's stream: the process exits."""
        self._is_closed = True
        for listener in self._listeners:
            listener.has_news.set()

    async def listen(self) -> AsyncIterator[bytes]:
        """Yield events until `close`; a comment at once and while nothing happens."""
        listener = Listener(self._kept)
        self._listeners.add(listener)
        try:
            yield b": events\n\n" + b"".join(self._recent)
            async for data in follow(
                listener.has_news, listener.take, lambda: self._is_closed, EVENTS_KEEPALIVE_S
            ):
                yield data
        finally:
            self._listeners.discard(listener)


class EndedRequests:
    """Requests as they end; `instar bench record` writes them to a file.

    Refused calls are not among them: most were never read. Prompts go out as token ids, and only to clients
    that ask for them. A client that is `kept` requests or KEPT_BYTES behind loses the newest and gets their
    number. Without a client an end costs one look at an empty list.
    """

    def __init__(self, kept: int = KEPT_REQUESTS, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners: list[Listener] = []
        self._kept = kept
        self._clock = clock
        self._is_closed = False

    def publish(self, state: RequestState, status: str) -> None:
        """Publish one sequence that ended. `status`: stop, length, abort, or the code of its error."""
        if not self._listeners:
            return
        record = self._record(state, status)
        for listener in self._listeners:
            if len(listener.pending) >= self._kept or listener.num_bytes >= KEPT_BYTES:
                listener.num_lost += 1
            elif listener.has_prompts:
                prompt = {"prompt_token_ids": state.request.prompt_token_ids}
                listener.put(sse("request", record | prompt))
            else:
                listener.put(sse("request", record))

    def close(self) -> None:
        """End every client's stream: the process exits."""
        self._is_closed = True
        for listener in self._listeners:
            listener.has_news.set()

    async def listen(self, has_prompts: bool) -> AsyncIterator[bytes]:
        """Yield requests until `close`; a comment at once and while none ends."""
        listener = Listener(has_prompts=has_prompts)
        self._listeners.append(listener)
        try:
            yield b": requests\n\n"
            async for data in follow(
                listener.has_news, listener.take, lambda: self._is_closed, REQUESTS_KEEPALIVE_S
            ):
                yield data
            if listener.pending:  # requests that ended as other clients' streams did
                yield listener.take()
        finally:
            self._listeners.remove(listener)

    def _record(self, state: RequestState, status: str) -> dict[str, Any]:
        """Return what is published.

        `at`: seconds since 1970, when it arrived. A call with n choices is n of these, with one id.
        """
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

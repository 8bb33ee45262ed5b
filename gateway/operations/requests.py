"""Requests as they end, to whoever listens at /admin/requests: `instar bench record` writes them to a file.

Where nobody listens an end costs one look at an empty list. Refused calls are not among them: most were never
read. Prompts go out as token ids, and only to those who ask for them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import msgspec

from gateway.delivery.request import RequestState

KEEPALIVE_S: Final = 1.0  # a listener that stops after some time looks at the clock with each line
KEPT: Final = 4096  # that a slow listener has not taken yet
KEPT_BYTES: Final = 32 << 20  # the same: with prompts, each may be hundreds of kilobytes


class RequestListener:
    def __init__(self, has_prompts: bool) -> None:
        self.has_prompts = has_prompts
        self.pending: deque[bytes] = deque()
        self.num_bytes = 0
        self.num_lost = 0
        self.has_news = asyncio.Event()


class EndedRequests:
    """A listener that is `kept` or KEPT_BYTES behind loses the newest, and is told how many."""

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._listeners: list[RequestListener] = []
        self._kept = kept
        self._clock = clock
        self._is_closed = False

    def tell(self, state: RequestState, status: str) -> None:
        """One sequence ended: stop, length, abort, or the code of its error."""
        if not self._listeners:
            return
        record = self._record(state, status)
        for listener in self._listeners:
            self._put(listener, record, state)

    def close(self) -> None:
        """Ends every listener's stream: the process is leaving."""
        self._is_closed = True
        for listener in self._listeners:
            listener.has_news.set()

    async def listen(self, has_prompts: bool) -> AsyncIterator[bytes]:
        """Server-sent events until `close`; a comment at once and while nothing ends."""
        listener = RequestListener(has_prompts)
        self._listeners.append(listener)
        try:
            yield b": requests\n\n"
            while not self._is_closed:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        await listener.has_news.wait()
                except TimeoutError:
                    yield b": keepalive\n\n"
                    continue
                yield self._taken(listener)
            if listener.pending:  # it was written to as the others' streams ended
                yield self._taken(listener)
        finally:
            self._listeners.remove(listener)

    def _record(self, state: RequestState, status: str) -> dict[str, Any]:
        """`at`: seconds since 1970, when it arrived. A call with n choices is n of these, with one id."""
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

    def _put(self, listener: RequestListener, record: dict[str, Any], state: RequestState) -> None:
        if len(listener.pending) >= self._kept or listener.num_bytes >= KEPT_BYTES:
            listener.num_lost += 1
            return
        if listener.has_prompts:
            record = record | {"prompt_token_ids": state.request.prompt_token_ids}
        data = b"event: request\ndata: %b\n\n" % msgspec.json.encode(record)
        listener.pending.append(data)
        listener.num_bytes += len(data)
        listener.has_news.set()

    def _taken(self, listener: RequestListener) -> bytes:
        listener.has_news.clear()
        data = b"".join(listener.pending)
        listener.pending.clear()
        listener.num_bytes = 0
        if listener.num_lost:
            data += b"event: lost\ndata: %d\n\n" % listener.num_lost
            listener.num_lost = 0
        return data

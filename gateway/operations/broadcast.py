"""Events of the bus to everyone who listens at /admin/events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from bus.messages import Event
from gateway.morphs import MorphRecord

KEEPALIVE_S = 10.0


class Broadcast:
    """The last `keep` events are repeated to whoever comes; a listener that is `keep` behind loses the
    oldest."""

    def __init__(self, keep: int = 256) -> None:
        self._recent: deque[bytes] = deque(maxlen=keep)
        self._listeners: set[asyncio.Queue[bytes]] = set()
        self._is_closed = False
        self._keep = keep

    def publish(self, event: Event) -> None:
        self._publish(event.kind, event)

    def publish_morph(self, entry: MorphRecord) -> None:
        """A report of a worker, as the event `morph` with what GET /admin/morphs/{id} says."""
        self._publish("morph", entry.as_json())

    def _publish(self, kind: str, body: Any) -> None:
        data = b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode(body))
        self._recent.append(data)
        self._put(data)

    def close(self) -> None:
        """Ends every listener's stream: the process is leaving."""
        self._is_closed = True
        self._put(b"")

    def _put(self, data: bytes) -> None:
        for queue in self._listeners:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(data)

    async def listen(self) -> AsyncIterator[bytes]:
        """Server-sent events until `close`; a comment at once and while nothing happens."""
        queue: asyncio.Queue[bytes] = asyncio.Queue(self._keep)
        self._listeners.add(queue)
        try:
            yield b": events\n\n" + b"".join(self._recent)
            while not self._is_closed:
                try:
                    async with asyncio.timeout(KEEPALIVE_S):
                        data = await queue.get()
                except TimeoutError:
                    data = b": keepalive\n\n"
                yield data
        finally:
            self._listeners.discard(queue)

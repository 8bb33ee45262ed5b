"""Entries nobody could use: kept in a bounded stream with their reason, and acknowledged.

A bad entry costs one dead letter, never a traceback at every read; a flood of them costs one line of log
and one event every QUIET_S.
"""

from __future__ import annotations

import logging
import time

from redis.asyncio import Redis

from bus.codec import encode
from bus.errors import BusFull, BusUnavailable
from bus.link import RedisLink
from bus.messages import DeadLetter, Event

log = logging.getLogger("bus")

MAX_PAYLOAD_BYTES = 64 * 1024  # times the stream's limit: at most 16 MiB
QUIET_S = 10.0


class DeadLetters:
    """The dead letters of one reader."""

    def __init__(self, link: RedisLink, stream: str) -> None:
        self._link = link
        self._stream = stream
        self._untold = 0
        self._told_at_s = -QUIET_S

    def letter(self, entry_id: str, payload: bytes, reason: str) -> DeadLetter:
        """A long payload is cut, and the reason says so."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            reason = f"{reason} (first {MAX_PAYLOAD_BYTES} of {len(payload)} bytes kept)"
            payload = payload[:MAX_PAYLOAD_BYTES]
        return DeadLetter(
            stream=self._stream, entry_id=entry_id, reason=reason, payload=payload, at_ms=_now_ms()
        )

    async def bury(self, letters: list[DeadLetter]) -> None:
        """Writes the letters if that is possible now; else they are dropped, with a line that says so."""
        if not letters or self._stream == self._link.names.dead_letters:
            return  # a bad dead letter would become another one at every read
        notices = self._notices(letters)

        async def write(client: Redis) -> None:
            async with client.pipeline(transaction=False) as pipe:
                for message, stream in notices:
                    keep = self._link.names.limit(stream)
                    pipe.xadd(stream, {b"m": encode(message)}, maxlen=keep, approximate=False)
                await pipe.execute()

        try:
            await self._link.run(write)
        except (BusFull, BusUnavailable) as error:
            log.warning("%d dead letters of %s are dropped: %s", len(letters), self._stream, error)

    def _notices(self, letters: list[DeadLetter]) -> list[tuple[DeadLetter | Event, str]]:
        names = self._link.names
        notices: list[tuple[DeadLetter | Event, str]] = [(dead, names.dead_letters) for dead in letters]
        self._untold += len(letters)
        if time.monotonic() - self._told_at_s >= QUIET_S:
            reason = letters[0].reason
            log.warning("%d unusable entries in %s, such as: %s", self._untold, self._stream, reason)
            event = Event(
                kind="dead_letter",
                source=self._link.source,
                subject=self._stream,
                reason=reason,
                at_ms=_now_ms(),
                numbers={"entries": self._untold},
            )
            notices.append((event, names.events))
            self._untold, self._told_at_s = 0, time.monotonic()
        return notices


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""Dead letters: entries that could not be decoded, kept with the reason in a bounded stream.

A bad entry costs one dead letter, not a traceback at every read. A flood of them costs one line of log and
one event every QUIET_S.
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
        self._unreported = 0
        self._reported_at_s = -QUIET_S

    def letter(self, entry_id: str, payload: bytes, reason: str) -> DeadLetter:
        """Return a dead letter. A payload over MAX_PAYLOAD_BYTES is cut, and the reason says so."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            reason = f"{reason} (first {MAX_PAYLOAD_BYTES} of {len(payload)} bytes kept)"
            payload = payload[:MAX_PAYLOAD_BYTES]
        return DeadLetter(
            stream=self._stream, entry_id=entry_id, reason=reason, payload=payload, at_ms=_now_ms()
        )

    async def bury(self, letters: list[DeadLetter]) -> None:
        """Write the letters; if Redis refuses, drop them with a line of log."""
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
            log.warning("dropped %d dead letters of %s: %s", len(letters), self._stream, error)

    def _notices(self, letters: list[DeadLetter]) -> list[tuple[DeadLetter | Event, str]]:
        names = self._link.names
        notices: list[tuple[DeadLetter | Event, str]] = [(dead, names.dead_letters) for dead in letters]
        self._unreported += len(letters)
        if time.monotonic() - self._reported_at_s >= QUIET_S:
            reason = letters[0].reason
            log.warning("%d unusable entries in %s, such as: %s", self._unreported, self._stream, reason)
            event = Event(
                kind="dead_letter",
                source=self._link.source,
                subject=self._stream,
                reason=reason,
                at_ms=_now_ms(),
                numbers={"entries": self._unreported},
            )
            notices.append((event, names.events))
            self._unreported, self._reported_at_s = 0, time.monotonic()
        return notices


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

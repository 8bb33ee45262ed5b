"""Dead letters: entries that could not be decoded, kept with the reason in a bounded stream."""

from __future__ import annotations

import logging
import time

from bus.batch import WriteBatch
from bus.clock import now_ms
from bus.errors import BusFull, BusUnavailable
from bus.link import RedisLink
from bus.messages import DeadLetter

log = logging.getLogger("bus")

MAX_PAYLOAD_BYTES = 64 * 1024  # times the stream's limit: at most 16 MiB
QUIET_S = 10.0  # a flood of them costs one line of log and one event in this time


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
        stream, at_ms = self._stream, now_ms()
        return DeadLetter(stream=stream, entry_id=entry_id, reason=reason, payload=payload, at_ms=at_ms)

    async def bury(self, letters: list[DeadLetter]) -> None:
        """Write the letters; if Redis refuses, drop them with a line of log."""
        names = self._link.names
        if not letters or self._stream == names.dead_letters:
            return  # a bad dead letter would become another one at every read
        batch = WriteBatch(self._link)
        for letter in letters:
            batch.publish(names.dead_letters, letter)
        self._unreported += len(letters)
        if time.monotonic() - self._reported_at_s >= QUIET_S:
            reason, numbers = letters[0].reason, {"entries": self._unreported}
            log.warning("%d unusable entries in %s, such as: %s", self._unreported, self._stream, reason)
            batch.publish(names.events, self._link.make_event("dead_letter", self._stream, reason, numbers))
            self._unreported, self._reported_at_s = 0, time.monotonic()
        try:
            await batch.send()
        except (BusFull, BusUnavailable) as error:
            log.warning("dropped %d dead letters of %s: %s", len(letters), self._stream, error)

"""Entries nobody could use: kept in a bounded stream with their reason, and acknowledged.

A bad entry must cost one line and one dead letter, never a traceback at every read.
"""

from __future__ import annotations

import logging
import time

from redis.asyncio.client import Pipeline

from bus.codec import encode
from bus.errors import BusFull, BusUnavailable
from bus.link import Link
from bus.messages import DeadLetter

log = logging.getLogger("bus")

MAX_PAYLOAD_BYTES = 64 * 1024  # times the stream's limit: at most 16 MiB


def letter(stream: str, entry_id: str, payload: bytes, reason: str) -> DeadLetter:
    """The dead letter of one entry; a long payload is cut, and the reason says so."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        reason = f"{reason} (first {MAX_PAYLOAD_BYTES} of {len(payload)} bytes kept)"
        payload = payload[:MAX_PAYLOAD_BYTES]
    return DeadLetter(
        stream=stream, entry_id=entry_id, reason=reason, payload=payload, at_ms=time.time_ns() // 1_000_000
    )


async def bury(link: Link, letters: list[DeadLetter]) -> None:
    """Writes the letters where that is possible; the entries themselves are already out of the way."""
    log.warning(
        "%d unusable entries in %s; the first: %s", len(letters), letters[0].stream, letters[0].reason
    )

    stream = link.names.dead_letters
    keep = link.names.limit(stream)

    async def write(pipe: Pipeline) -> None:
        for dead in letters:
            pipe.xadd(stream, {b"m": encode(dead)}, maxlen=keep, approximate=False)
        await pipe.execute()

    try:
        await link.run(lambda client: write(client.pipeline(transaction=False)))
    except (BusFull, BusUnavailable) as error:
        log.warning("%d dead letters of %s are dropped: %s", len(letters), letters[0].stream, error)

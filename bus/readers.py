"""Blocking readers of streams, each with a connection of its own: a blocked connection serves nothing else.

A reader does not raise when Redis is away: `read` waits and continues where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from bus.codec import DecodeError, decode
from bus.connection import OwnConnection, close, is_group_missing, translated
from bus.dead_letters import DeadLetters
from bus.errors import BusUnavailable
from bus.link import FIRST_RETRY_S, LONGEST_RETRY_S, RedisLink
from bus.messages import DeadLetter
from bus.names import GROUP
from bus.pending import as_numbers, consumers_of, discard_pending, drop_stranded, settle

log = logging.getLogger("bus")

M = TypeVar("M")
Types = tuple[type[Any], ...]
Batch = list[tuple[str, M]]  # (entry id, message), in stream order
RawEntry = tuple[bytes, list[bytes] | None]  # id, and names and values of fields by turns; None: deleted
BATCH_ENTRIES = 128  # most entries of one read
NEW, OWN_PENDING = ">", "0"  # positions where XREADGROUP reads


class _Reader(Generic[M]):
    """The common part of both readers: the connection, the limits, decoding."""

    def __init__(self, link: RedisLink, stream: str, types: Types, count: int) -> None:
        self.stream = stream
        self._link = link
        self._types = types
        self._count = count
        self._block_ms = link.block_ms
        self._client = link.client(max_connections=1)
        self._connection = OwnConnection(self._client)
        self._dead_letters = DeadLetters(link, stream)
        self._retry_s = FIRST_RETRY_S
        self._term = 0  # the largest term of a leader that an entry had

    async def aclose(self) -> None:
        await close(self._client)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __aiter__(self) -> AsyncIterator[Batch[M]]:
        """Yield every batch that has entries, without end."""
        while True:
            yield await self.next_batch()

    async def next_batch(self) -> Batch[M]:
        """Return the next batch that has entries, however long that takes."""
        while not (batch := await self.read()):
            pass
        return batch

    async def read(self) -> Batch[M]:
        raise NotImplementedError

    async def _entries(self, *command: str, position: str) -> list[RawEntry] | None:
        """Return what a blocking command reads from `position` on, [] after `block_ms` without any.

        None: the connection failed, and the watcher has looked since.
        """
        limits = ("COUNT", self._count, "BLOCK", self._block_ms, "STREAMS", self.stream, position)
        try:
            with translated():
                async with asyncio.timeout(self._block_ms / 1000 + 2.0):
                    (answer,) = await self._connection.ask((*command, *limits))
                if isinstance(answer, Exception):
                    raise answer
        except BusUnavailable as error:
            log.debug("a reader of %s lost its connection: %s", self.stream, error)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self._link.doubt()
            return None
        self._retry_s = FIRST_RETRY_S
        return answer[0][1] if answer else []

    async def _decoded(self, entries: Iterable[RawEntry]) -> tuple[Batch[M], list[str]]:
        """Return the messages, and the ids of the entries that became dead letters."""
        batch: Batch[M] = []
        dead: list[DeadLetter] = []
        for entry_id, fields in entries:
            key, payload = entry_id.decode(), fields[1] if fields and fields[0] == b"m" else b""
            try:
                message = decode(payload, *self._types)
                self._check_term(fields or [])
                batch.append((key, message))
            except DecodeError as error:
                dead.append(self._dead_letters.letter(key, payload, error.reason))
        await self._dead_letters.bury(dead)
        return batch, [letter.entry_id for letter in dead]

    def _check_term(self, fields: list[bytes]) -> None:
        """Raise DecodeError for an entry of a controller that led before the one of an earlier entry."""
        term = int(fields[3]) if fields[2:3] == [b"t"] and fields[3].isdigit() else self._term
        if term < self._term:
            raise DecodeError(f"an order of term {term}, but the controller of term {self._term} leads")
        self._term = term


class StreamReader(_Reader[M]):
    """A reader by XREAD, for every entry. start: "$": after `open`, "0": from the first, or an entry id."""

    def __init__(self, link: RedisLink, stream: str, types: Types, count: int, start: str) -> None:
        super().__init__(link, stream, types, count)
        self.position = start
        self._restarts = link.restarts

    async def open(self) -> None:
        """Resolve "$" now, not at the first `read`: later entries are read. Raises BusUnavailable."""
        if self.position == "$":
            self.position = await self._last_id()

    async def read(self) -> Batch[M]:
        """Return the next entries; [] after `block_ms` without any, or after an outage."""
        try:
            await self.open()
            await self._after_restart()
        except BusUnavailable:
            await self._link.wait_up()
            return []
        entries = await self._entries("XREAD", position=self.position)
        if not entries:
            return []
        self.position = entries[-1][0].decode()
        batch, _ = await self._decoded(entries)
        return batch

    async def _last_id(self) -> str:
        try:
            facts: Any = await self._link.run(lambda client: client.xinfo_stream(self.stream))
        except exceptions.ResponseError as error:
            if is_group_missing(error):
                return "0-0"
            raise
        return str(facts["last-generated-id"], "ascii")

    async def _after_restart(self) -> None:
        """Begin again if the stream was created anew with smaller ids, by a clock that is behind."""
        if self._restarts != (restarts := self._link.restarts):
            if as_numbers(await self._last_id()) < as_numbers(self.position):
                self.position, self._term = "0-0", 0
            self._restarts = restarts


class GroupReader(_Reader[M]):
    """A reader by XREADGROUP: every entry goes to one consumer of the group and stays pending until `ack`.

    If the group is gone, the reader creates it again and calls `on_recreate`: the stream may be lost too. An
    entry that Redis delivers while a connection breaks may never arrive: after each loss the reader returns
    everything that is pending with this consumer once more, known entries included.
    """

    def __init__(self, link: RedisLink, stream: str, types: Types, count: int, consumer: str) -> None:
        super().__init__(link, stream, types, count)
        self.consumer = consumer
        self._position = NEW
        self.on_recreate: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Create the stream and the group if they are missing. Raises BusUnavailable and BusFull."""
        await self._link.run(self._create)

    async def _create(self, client: Redis) -> None:
        try:
            await client.xgroup_create(self.stream, GROUP, id="0", mkstream=True)  # "$" would skip entries
        except exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self) -> Batch[M]:
        """Return the next entries; [] after `block_ms` or an outage. Raises BusFull if it cannot open."""
        position = self._position
        try:
            entries = await self._entries("XREADGROUP", "GROUP", GROUP, self.consumer, position=position)
        except exceptions.ResponseError as error:
            if not is_group_missing(error):
                raise
            await self._recreate()
            return []
        if entries is None:
            self._position = OWN_PENDING
            return []
        if position != NEW:
            self._position = entries[-1][0].decode() if entries else NEW
        batch, dead = await self._decoded(entries)
        try:
            await self.ack(dead)
        except BusUnavailable as error:  # entries end with the consumer
            log.warning("%d dead entries of %s stay pending: %s", len(dead), self.stream, error)
        return batch

    async def _recreate(self) -> None:
        log.info("the consumer group of %s is gone; creating it again", self.stream)
        try:
            await self.open()
        except BusUnavailable:
            await self._link.wait_up()
            return
        self.on_recreate()

    async def ack(self, ids: Iterable[str]) -> None:
        """Acknowledge and delete entries, known or not, also at maxmemory. Raises BusUnavailable."""
        wanted = list(ids)
        if wanted:
            await self._link.run(lambda client: settle(client, self.stream, wanted))

    async def claim_all(self) -> int:
        """End what other consumers have pending, and remove them. Returns the number of entries."""
        consumers = await self._link.run(lambda client: consumers_of(client, self.stream))
        others = [name for name in consumers if name != self.consumer]
        ended = sum([await discard_pending(self._link, self.stream, name) for name in others])
        return ended + await self._link.run(lambda client: drop_stranded(client, self.stream))

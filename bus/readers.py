"""Blocking readers of streams, each with a connection of its own: a blocked connection serves nothing else.

A reader does not raise when Redis is away: `read` waits and continues where it was. `BLOCK` is shorter than
the socket timeout, and a third limit around both catches a connection that is lost silently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, Generic, Self, TypeVar

from redis import exceptions
from redis.asyncio import Redis

from bus.codec import DecodeError, decode
from bus.connection import close, is_group_missing, translated
from bus.dead_letters import DeadLetters
from bus.errors import BusUnavailable
from bus.link import FIRST_RETRY_S, LONGEST_RETRY_S, RedisLink
from bus.messages import DeadLetter
from bus.names import GROUP
from bus.pending import as_numbers, consumers_of, discard_pending, drop_stranded, settle

log = logging.getLogger("bus")

M = TypeVar("M")
T = TypeVar("T")
Batch = list[tuple[str, M]]  # (entry id, message), in stream order
RawEntry = tuple[bytes, dict[bytes, bytes] | None]
NEW, OWN_PENDING = ">", "0"  # where XREADGROUP reads


class _Reader(Generic[M]):
    """The common part of both readers: the connection, the limits, decoding."""

    def __init__(
        self, link: RedisLink, stream: str, types: tuple[type[Any], ...], block_ms: int, count: int
    ) -> None:
        self.stream = stream
        self._link = link
        self._types = types
        self._block_ms = block_ms
        self._count = count
        self._client = link.client(max_connections=1)
        self._dead_letters = DeadLetters(link, stream)
        self._retry_s = FIRST_RETRY_S

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

    async def _blocking(self, call: Callable[[Redis], Awaitable[T]]) -> T | None:
        """Return the call's answer; None if the connection failed and the watcher has looked since."""
        try:
            with translated():
                async with asyncio.timeout(self._block_ms / 1000 + 2.0):
                    answer = await call(self._client)
        except BusUnavailable as error:
            log.debug("a reader of %s lost its connection: %s", self.stream, error)
            await asyncio.sleep(self._retry_s)
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            await self._link.doubt()
            return None
        self._retry_s = FIRST_RETRY_S
        return answer

    def _decoded(self, entries: Iterable[RawEntry]) -> tuple[Batch[M], list[DeadLetter]]:
        batch: Batch[M] = []
        dead: list[DeadLetter] = []
        for entry_id, fields in entries:
            key, payload = entry_id.decode(), (fields or {}).get(b"m", b"")
            try:
                batch.append((key, decode(payload, *self._types)))
            except DecodeError as error:
                dead.append(self._dead_letters.letter(key, payload, error.reason))
        return batch, dead


class StreamReader(_Reader[M]):
    """A reader by XREAD: every reader sees every entry.

    start: "$" for what is added after `open`, "0" for the beginning, or an entry id. `position` is the id of
    the last entry that was returned.
    """

    def __init__(
        self,
        link: RedisLink,
        stream: str,
        types: tuple[type[Any], ...],
        *,
        start: str,
        block_ms: int,
        count: int,
    ) -> None:
        super().__init__(link, stream, types, block_ms, count)
        self.position = start
        self._restarts = link.restarts

    async def open(self) -> None:
        """Resolve "$" now: what is added after this returns is read. The first `read` does it otherwise.

        Raises BusUnavailable.
        """
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
        answer: Any = await self._blocking(
            lambda client: client.xread({self.stream: self.position}, count=self._count, block=self._block_ms)
        )
        if not answer:
            return []
        entries: list[RawEntry] = answer[0][1]
        self.position = entries[-1][0].decode()
        batch, dead = self._decoded(entries)
        await self._dead_letters.bury(dead)
        return batch

    async def _last_id(self) -> str:
        async def ask(client: Redis) -> str:
            try:
                facts = await client.xinfo_stream(self.stream)
            except exceptions.ResponseError as error:
                if is_group_missing(error):
                    return "0-0"
                raise
            last: bytes = facts["last-generated-id"]
            return last.decode()

        return await self._link.run(ask)

    async def _after_restart(self) -> None:
        """Begin again if the stream was lost and created anew with smaller ids, by a clock that is behind.

        Reading from the old position would then wait without end.
        """
        if self._restarts != (restarts := self._link.restarts):
            if as_numbers(await self._last_id()) < as_numbers(self.position):
                self.position = "0-0"
            self._restarts = restarts


class GroupReader(_Reader[M]):
    """A reader by XREADGROUP: every entry goes to one consumer of the group and stays pending until `ack`.

    The group begins at entry 0: at "$", an entry that came before the group would never be delivered. If the
    group is gone, the reader creates it again and calls `on_recreate`, since the stream may be lost too.

    An entry that Redis delivers while a connection breaks may never arrive, and is pending all the same. So
    after each loss the reader returns everything that is pending with this consumer once more, known entries
    included.
    """

    def __init__(
        self,
        link: RedisLink,
        stream: str,
        consumer: str,
        types: tuple[type[Any], ...],
        *,
        block_ms: int,
        count: int,
    ) -> None:
        super().__init__(link, stream, types, block_ms, count)
        self.consumer = consumer
        self._position = NEW
        self.on_recreate: Callable[[], None] = lambda: None

    async def open(self) -> None:
        """Create the stream and the group if they are missing. Raises BusUnavailable and BusFull."""
        await self._link.run(self._create)

    async def _create(self, client: Redis) -> None:
        try:
            await client.xgroup_create(self.stream, GROUP, id="0", mkstream=True)
        except exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self) -> Batch[M]:
        """Return the next entries for this consumer; [] after `block_ms` without any, or after an outage.

        Raises BusFull if the group is gone and Redis has no memory to create it again.
        """
        position = self._position
        try:
            answer: Any = await self._blocking(
                lambda client: client.xreadgroup(
                    GROUP, self.consumer, {self.stream: position}, count=self._count, block=self._block_ms
                )
            )
        except exceptions.ResponseError as error:
            if not is_group_missing(error):
                raise
            await self._recreate()
            return []
        if answer is None:
            self._position = OWN_PENDING
            return []
        entries: list[RawEntry] = answer[0][1] if answer else []
        if position != NEW:
            self._position = entries[-1][0].decode() if entries else NEW
        batch, dead = self._decoded(entries)
        if dead:
            await self._dead_letters.bury(dead)
            await self._settle([d.entry_id for d in dead])
        return batch

    async def _recreate(self) -> None:
        log.info("the consumer group of %s is gone; creating it again", self.stream)
        try:
            await self.open()
        except BusUnavailable:
            await self._link.wait_up()
            return
        self.on_recreate()

    async def _settle(self, ids: list[str]) -> None:
        """Call `ack`, but leave the entries pending if Redis is away: they end with the consumer."""
        try:
            await self.ack(ids)
        except BusUnavailable as error:
            log.warning("%d dead entries of %s stay pending: %s", len(ids), self.stream, error)

    async def ack(self, ids: Iterable[str]) -> None:
        """Acknowledge and delete entries, so that the stream's length is its backlog.

        Unknown ids are harmless. Works at maxmemory. Raises BusUnavailable.
        """
        wanted = list(ids)
        if wanted:
            await self._link.run(lambda client: settle(client, self.stream, wanted))

    async def claim_all(self) -> int:
        """End the pending entries of all other consumers of the group, and remove those consumers.

        A new incarnation of a worker calls it before its first `read`, to clear what its predecessors left.
        Returns the number of entries. Raises BusUnavailable.
        """
        consumers = await self._link.run(lambda client: consumers_of(client, self.stream))
        others = [name for name in consumers if name != self.consumer]
        ended = sum([await discard_pending(self._link, self.stream, name) for name in others])
        return ended + await self._link.run(lambda client: drop_stranded(client, self.stream))

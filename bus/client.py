"""`connect(settings.redis)`: the one object through which a service talks to the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar, overload

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from bus.catalogue import Catalogue, Record, key_of
from bus.codec import encode
from bus.errors import (
    BadRedisUrl,
    BusFull,
    BusUnavailable,
    NotRedis,
    RedisForbidden,
    RedisNotThere,
    RedisPassword,
    RedisProblem,
    RedisTooOld,
)
from bus.link import RedisLink, Restart
from bus.messages import Event, Number
from bus.names import GROUP, Names
from bus.readers import GroupReader, StreamReader
from bus.registry import LiveWorker, RegisteredWorker, Registry
from bus.settings import RedisSettings

__all__ = [
    "BadRedisUrl",
    "Bus",
    "BusFull",
    "BusUnavailable",
    "GroupReader",
    "LiveWorker",
    "NotRedis",
    "RedisForbidden",
    "RedisNotThere",
    "RedisPassword",
    "RedisProblem",
    "RedisTooOld",
    "RegisteredWorker",
    "Restart",
    "StreamReader",
    "WriteBatch",
    "connect",
]

M = TypeVar("M")

BATCH_ENTRIES = 128  # most entries of one read


def connect(settings: RedisSettings, *, source: str = "") -> Bus:
    """Return a Bus that is not started yet. `source` is the service's name in events. Raises BadRedisUrl."""
    names = Names(settings.prefix)
    link = RedisLink(
        settings.url,
        names,
        source=source,
        socket_timeout_s=settings.socket_timeout_s,
        watch_s=settings.block_ms / 1000,  # as often as idle readers ask
    )
    return Bus(link, block_ms=settings.block_ms)


class WriteBatch:
    """Writes that are sent in one round trip, and in one MULTI if they publish: all of them or none.

    Acknowledgements alone need no MULTI, which Redis refuses at maxmemory.
    """

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._steps: list[Callable[[Pipeline], object]] = []
        self._publishes = False

    def publish(self, stream: str, message: object, *, maxlen: int | None = None) -> None:
        """Add an entry to a stream (XADD), which is trimmed exactly to `maxlen` or to its own limit.

        Never pass `maxlen` for a stream whose entries may be pending or unread (see `Names.limit`).
        """
        payload = encode(message)
        keep = maxlen if maxlen is not None else self._link.names.limit(stream)
        self._publishes = True
        self._steps.append(lambda pipe: pipe.xadd(stream, {b"m": payload}, maxlen=keep, approximate=False))

    def write(self, record: Record) -> None:
        """Write a record of the catalogue."""
        names, payload = self._link.names, encode(record)
        key = key_of(names, record)
        self._publishes = True
        self._steps.append(lambda pipe: pipe.set(key, payload))
        self._steps.append(lambda pipe: pipe.sadd(names.catalogue, key))

    def erase(self, record: Record) -> None:
        """Delete a record of the catalogue."""
        names = self._link.names
        key = key_of(names, record)
        self._publishes = True
        self._steps.append(lambda pipe: pipe.delete(key))
        self._steps.append(lambda pipe: pipe.srem(names.catalogue, key))

    def ack(self, stream: str, *ids: str) -> None:
        """Acknowledge and delete entries (XACK, XDEL)."""
        if ids:
            self._steps.append(lambda pipe: pipe.xack(stream, GROUP, *ids))
            self._steps.append(lambda pipe: pipe.xdel(stream, *ids))

    async def send(self) -> None:
        """Send all writes. Raises BusUnavailable (some may have been carried out) and BusFull (none was)."""
        if self._steps:
            await self._link.run(self._execute)

    async def _execute(self, client: Redis) -> None:
        async with client.pipeline(transaction=self._publishes and len(self._steps) > 1) as pipe:
            for step in self._steps:
                step(pipe)
            await pipe.execute()


class Bus(Registry):
    """The streams, the registry and the catalogue over one connection to Redis."""

    def __init__(self, link: RedisLink, *, block_ms: int) -> None:
        super().__init__(link)
        self.catalogue = Catalogue(link)
        self._block_ms = block_ms

    async def start(self, wait_s: float = 10.0) -> None:
        """Wait up to `wait_s` for Redis. Raises RedisProblem, which says what to do."""
        await self.link.start(wait_s)

    async def aclose(self) -> None:
        await self.link.aclose()

    async def __aenter__(self) -> Bus:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def up(self) -> bool:
        """True if Redis answered last time. While it does not, writes fail at once."""
        return self.link.up

    async def wait_up(self) -> None:
        """Wait until Redis answers."""
        await self.link.wait_up()

    def on_restart(self, callback: Callable[[Restart], None]) -> None:
        """Register a callback for when Redis restarted or lost its data: see `RedisLink.on_restart`."""
        self.link.on_restart(callback)

    # ------------------------------------------------------------------------------------- writing

    def batch(self) -> WriteBatch:
        return WriteBatch(self.link)

    async def publish(self, stream: str, *messages: object, maxlen: int | None = None) -> None:
        """Add all messages to a stream, or none. Nothing is retried. Raises BusUnavailable and BusFull."""
        batch = self.batch()
        for message in messages:
            batch.publish(stream, message, maxlen=maxlen)
        await batch.send()

    async def event(self, kind: str, subject: str, reason: str, **numbers: Number) -> None:
        """Publish an event. Raises BusUnavailable and BusFull."""
        await self.publish(
            self.names.events,
            Event(
                kind=kind,
                source=self.link.source,
                subject=subject,
                reason=reason,
                at_ms=time.time_ns() // 1_000_000,
                numbers=numbers,
            ),
        )

    async def trim(self, stream: str, *, before: str) -> None:
        """Delete every entry older than the entry id `before`."""
        await self.link.run(lambda client: client.xtrim(stream, minid=before, approximate=False))

    async def length(self, stream: str) -> int:
        """Return the number of entries in a stream; of a requests stream that is its backlog."""
        return int(await self.link.run(lambda client: client.xlen(stream)))

    # ------------------------------------------------------------------------------------- reading

    @overload
    def reader(
        self, stream: str, expected: type[M], /, *, start: str = "$", count: int = ...
    ) -> StreamReader[M]: ...
    @overload
    def reader(
        self, stream: str, /, *expected: type[Any], start: str = "$", count: int = ...
    ) -> StreamReader[Any]: ...
    def reader(
        self, stream: str, /, *expected: type[Any], start: str = "$", count: int = BATCH_ENTRIES
    ) -> StreamReader[Any]:
        """Return a reader of a stream from `start`, with a connection of its own. Close it after use.

        Entries of no expected type become dead letters.
        """
        return StreamReader(self.link, stream, expected, start=start, block_ms=self._block_ms, count=count)

    @overload
    def group_reader(
        self, stream: str, consumer: str, expected: type[M], /, *, count: int = ...
    ) -> GroupReader[M]: ...
    @overload
    def group_reader(
        self, stream: str, consumer: str, /, *expected: type[Any], count: int = ...
    ) -> GroupReader[Any]: ...
    def group_reader(
        self, stream: str, consumer: str, /, *expected: type[Any], count: int = BATCH_ENTRIES
    ) -> GroupReader[Any]:
        """Return a reader that is a member of the stream's consumer group. Close it after use."""
        return GroupReader(self.link, stream, consumer, expected, block_ms=self._block_ms, count=count)

"""`connect(settings.redis)`: the one object through which a service talks to the others."""

from __future__ import annotations

from typing import Any, Self, TypeVar, overload

from bus.access import Role
from bus.batch import WriteBatch
from bus.catalogue import Catalogue
from bus.errors import BusFull, BusUnavailable, RedisProblem
from bus.link import Restart
from bus.messages import Number
from bus.readers import BATCH_ENTRIES, GroupReader, StreamReader
from bus.registry import LiveWorker, Registry
from bus.settings import RedisSettings

__all__ = ["Bus", "BusFull", "BusUnavailable", "LiveWorker", "RedisProblem", "Restart", "connect"]

M = TypeVar("M")


def connect(settings: RedisSettings, *, source: str = "", role: Role | None = None) -> Bus:
    """Return a Bus that is not started yet. Raises BadRedisUrl.

    source: the service's name in events. role: whose rights in Redis it needs, which it checks at start.
    """
    return Bus(settings, source, role)


class Bus(Registry):
    """The streams, the registry and the catalogue over one connection to Redis."""

    def __init__(self, settings: RedisSettings, source: str, role: Role | None = None) -> None:
        super().__init__(settings, source, role)
        self.catalogue = Catalogue(self)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def batch(self) -> WriteBatch:
        return WriteBatch(self)

    async def publish(self, stream: str, *messages: object) -> None:
        """Add all messages to a stream, or none. Nothing is retried. Raises BusUnavailable and BusFull."""
        batch = self.batch()
        for message in messages:
            batch.publish(stream, message)
        await batch.send()

    async def event(self, kind: str, subject: str, reason: str, **numbers: Number) -> None:
        """Publish an event. Raises BusUnavailable and BusFull."""
        await self.publish(self.names.events, self.make_event(kind, subject, reason, numbers))

    async def trim(self, stream: str, *, before: str) -> None:
        """Delete every entry older than the entry id `before`."""
        await self.run(lambda client: client.xtrim(stream, minid=before, approximate=False))

    async def length(self, stream: str) -> int:
        """Return the number of entries in a stream; of a requests stream that is its backlog."""
        return int(await self.run(lambda client: client.xlen(stream)))

    @overload
    def reader(
        self, stream: str, expected: type[M], /, *, start: str = ..., count: int = ...
    ) -> StreamReader[M]: ...
    @overload
    def reader(
        self, stream: str, /, *expected: type[Any], start: str = ..., count: int = ...
    ) -> StreamReader[Any]: ...
    def reader(
        self, stream: str, /, *expected: type[Any], start: str = "$", count: int = BATCH_ENTRIES
    ) -> StreamReader[Any]:
        """Return a reader with its own connection; close it. Entries of other types become dead letters."""
        return StreamReader(self, stream, expected, count, start)

    def group_reader(
        self, stream: str, consumer: str, expected: type[M], /, *, count: int = BATCH_ENTRIES
    ) -> GroupReader[M]:
        """Return a reader that is a member of the stream's consumer group. Close it after use."""
        return GroupReader(self, stream, (expected,), count, consumer)

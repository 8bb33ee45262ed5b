"""Writes that go to Redis together: entries of streams, records of the catalogue, acknowledgements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

from bus.codec import encode
from bus.deployments import Deployment, ModelCard, Profile
from bus.link import RedisLink
from bus.names import GROUP, Names

Record = ModelCard | Deployment | Profile


def key_of(names: Names, record: Record) -> str:
    if isinstance(record, ModelCard):
        return names.model(record.name)
    if isinstance(record, Deployment):
        return names.deployment(record.id)
    return names.profile(record.model, record.device)


class WriteBatch:
    """Writes of one round trip: all or none if they publish. Acks alone need no MULTI, so work when full."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._steps: list[Callable[[Redis], Any]] = []
        self._publishes = False

    def publish(self, stream: str, message: object) -> None:
        """Add an entry to a stream (XADD), which is trimmed exactly to `Names.limit`."""
        payload, keep = encode(message), self._link.names.limit(stream)
        self._publishes = True
        self._steps.append(lambda pipe: pipe.xadd(stream, {b"m": payload}, maxlen=keep, approximate=False))

    def write(self, record: Record) -> None:
        """Write a record of the catalogue."""
        names, payload = self._link.names, encode(record)
        key = key_of(names, record)
        self._publishes = True
        self._steps += [lambda pipe: pipe.set(key, payload), lambda pipe: pipe.sadd(names.catalogue, key)]

    def erase(self, record: Record) -> None:
        """Delete a record of the catalogue."""
        names, key = self._link.names, key_of(self._link.names, record)
        self._publishes = True
        self._steps += [lambda pipe: pipe.delete(key), lambda pipe: pipe.srem(names.catalogue, key)]

    def ack(self, stream: str, *ids: str) -> None:
        """Acknowledge and delete entries (XACK, XDEL)."""
        if ids:
            self._steps += [lambda pipe: pipe.xack(stream, GROUP, *ids), lambda pipe: pipe.xdel(stream, *ids)]

    async def send(self) -> None:
        """Send all writes. Raises BusUnavailable (some may have been carried out) and BusFull (none was)."""
        if self._steps:
            await self._link.run(self._execute)

    async def _execute(self, client: Redis) -> None:
        if len(self._steps) == 1:  # a pipeline takes twice as long
            await self._steps[0](client)
            return
        async with client.pipeline(transaction=self._publishes) as pipe:
            for step in self._steps:
                step(pipe)
            await pipe.execute()

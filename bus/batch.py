"""Writes that go to Redis together: entries of streams, records of the catalogue, acknowledgements."""

from __future__ import annotations

from bus.codec import encode
from bus.connection import Command
from bus.deployments import Deployment, ModelCard, Profile
from bus.link import RedisLink
from bus.names import GROUP, Names
from bus.schema import entries_of

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
        self._commands: list[Command] = []
        self._publishes = False

    def publish(self, stream: str, message: object) -> None:
        """Add a message to a stream (XADD), which is trimmed exactly to `Names.limit`.

        A link that leads adds its term, by which readers refuse what an earlier leader ordered.
        """
        keep = self._link.names.limit(stream)
        trim = () if keep is None else ("MAXLEN", "=", keep)
        self._publishes = True
        term = (b"t", self._link.fence.term) if self._link.fence else ()
        version = self._link.schema
        entries = [encode(entry, version) for entry in entries_of(message, version)]
        self._commands += [("XADD", stream, *trim, "*", b"m", entry, *term) for entry in entries]

    def write(self, record: Record) -> None:
        """Write a record of the catalogue."""
        names, payload = self._link.names, encode(record, self._link.schema)
        key = key_of(names, record)
        self._publishes = True
        self._commands += [("SET", key, payload), ("SADD", names.catalogue, key)]

    def erase(self, record: Record) -> None:
        """Delete a record of the catalogue."""
        names, key = self._link.names, key_of(self._link.names, record)
        self._publishes = True
        self._commands += [("DEL", key), ("SREM", names.catalogue, key)]

    def ack(self, stream: str, *ids: str) -> None:
        """Acknowledge and delete entries (XACK, XDEL)."""
        if ids:
            self._commands += [("XACK", stream, GROUP, *ids), ("XDEL", stream, *ids)]

    async def send(self) -> None:
        """Send all writes. Raises BusUnavailable (some may have been carried out) and BusFull (none was)."""
        if self._commands:
            await self._link.write(*self._commands, is_atomic=self._publishes and len(self._commands) > 1)

"""Pools of connections to Redis that leave none open: to one server, or to the primary of Sentinels."""

from __future__ import annotations

import weakref
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import Sentinel


class Pool(BlockingConnectionPool):
    """A pool that leaves no connection open: redis-py's forgets those that come up while it closes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._made: list[AbstractConnection] = []  # the most that were in use at once; kept for reuse
        self.is_closed = False

    def make_connection(self) -> AbstractConnection:
        connection: AbstractConnection = super().make_connection()  # type: ignore[no-untyped-call]
        self._made.append(connection)
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        if self.is_closed:
            drop(connection)
        await super().release(connection)

    def drop_all(self) -> None:
        """Abort all connections at once. Commands that wait for an answer get a ConnectionError."""
        for connection in self._made:
            drop(connection)

    def close(self) -> None:
        """Abort all connections, and those that come up later."""
        self.is_closed = True
        self.drop_all()


class SentinelPool(Pool):
    """A pool of connections to the primary that Sentinels name; each asks for it when it opens.

    A primary that failed over is left at once: what waits for its answer gets a ConnectionError, and need not
    wait for a timeout.
    """

    # What redis-py's SentinelManagedConnection asks of its pool.
    is_master: Final = True
    check_connection: Final = False

    def __init__(self, sentinel: Sentinel, primary: str, **options: Any) -> None:
        """`primary`: what the Sentinels call it."""
        super().__init__(**options)
        self.connection_kwargs["connection_pool"] = weakref.proxy(self)
        self._sentinel, self._primary = sentinel, primary
        self._address: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._primary}>"  # redis-py's has the proxy in it, endlessly

    async def get_master_address(self) -> tuple[str, int]:
        """Return host and port of the primary. Raises redis-py's MasterNotFoundError."""
        host, port = await self._sentinel.discover_master(self._primary)
        if (host, port) != self._address:
            self._address = host, port
            self.drop_all()
        return host, port


def drop(connection: AbstractConnection) -> None:
    """Abort a connection.

    Its own `disconnect` can be cancelled half-way. A transport that is closed instead of aborted first sends
    its buffer, which a Redis that hangs does not accept.
    """
    if connection._writer:
        connection._writer.transport.abort()
        connection._close()  # type: ignore[no-untyped-call]

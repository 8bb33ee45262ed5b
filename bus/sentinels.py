"""Redis Sentinel: several small servers that watch a primary and its replicas, and name the primary.

With `redis.sentinels` the host of `redis.url` is not a host, but what the Sentinels call the primary. Each
connection asks them for its address when it opens (`bus.pools.SentinelPool`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel

from bus.connection import close, make_client, secret_in
from bus.settings import RedisSettings

ANSWER_S: Final = 1.0  # a Sentinel that has not answered by then is passed over
CONNECTIONS: Final = 4  # to each Sentinel, at most; each serves one question at a time


class _SentinelClient(Redis):
    """A client whose every command ends within ANSWER_S, by `asyncio.timeout` (see `make_client`)."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise exceptions.TimeoutError(f"no answer within {ANSWER_S:g} s") from error


def make_sentinel(settings: RedisSettings, given: Mapping[str, Any]) -> Sentinel | None:
    """Return redis-py's client of the Sentinels, or None if there are none. Raises BadRedisUrl.

    given: the options of a connection to Redis (`bus.connection.credentials`).
    """
    if not settings.sentinels:
        return None
    scheme, options = settings.url.partition("://")[0], sentinel_options(settings, given)
    sentinel = Sentinel([])  # type: ignore[no-untyped-call]
    sentinel.sentinels = [
        make_client(
            f"{scheme}://{one}",
            max_connections=CONNECTIONS,
            pool_wait_s=ANSWER_S,
            given=options,
            kind=_SentinelClient,
        )
        for one in settings.sentinels
    ]
    return sentinel


def sentinel_options(settings: RedisSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a connection to a Sentinel. Raises BadRedisUrl for an unreadable password.

    The authorities of Redis's certificate are those of the Sentinels' certificates, too.
    """
    options = {name: value for name, value in given.items() if name == "ssl_ca_certs"}
    if settings.sentinel_password_file:
        options["password"] = secret_in(settings.sentinel_password_file, "sentinel_password_file")
    return options


async def close_sentinel(sentinel: Sentinel) -> None:
    """Close the connections to all Sentinels."""
    for client in sentinel.sentinels:
        await close(client)


def addresses(settings: RedisSettings) -> list[tuple[str, int]]:
    """Return host and port of each Sentinel."""
    parts = (urlsplit(f"//{one}") for one in settings.sentinels)
    return [(one.hostname or "", one.port or 0) for one in parts]


def url_at(url: str, host: str, port: int) -> str:
    """Return the URL with a server's address in place of the primary's name."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    where = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{user}{at}{where}:{port}"))

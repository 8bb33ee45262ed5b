"""Connections to Redis: opening and closing them, checking the server, translating its errors."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff

from bus import errors
from bus.access import Role, rights_needed
from bus.errors import BusFull, BusUnavailable, Fenced, RedisProblem
from bus.names import Names
from bus.pools import Pool, SentinelPool, drop
from bus.settings import RedisSettings
from bus.tls import TLSProblem, load_authorities

Command = tuple[str | bytes | int, ...]

OLDEST_VERSION = (6, 2)  # XAUTOCLAIM, XTRIM MINID, XADD NOMKSTREAM
CONNECT_TIMEOUT_S = 3.0

# Redis is away or not ready, and may be ready in a moment. OSError and TimeoutError are what sockets raise
# where redis-py does not wrap them.
AWAY = (
    exceptions.ConnectionError,  # includes BusyLoadingError
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,  # a replica that was a primary before
    exceptions.ClusterDownError,  # includes MasterDownError: a replica that lost its primary
    exceptions.TryAgainError,
    exceptions.InvalidResponse,  # the connection is out of step; redis-py closes it
    TimeoutError,
    OSError,
)
# Refusals that pass: snapshots cannot be written, a script runs long, replicas are missing, ... Redis 6.2
# reports those within a script as "Error running script ...: -MISCONF ...".
NOT_NOW = re.compile(
    r"(^|: -)(MISCONF|READONLY|BUSY|LOADING|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|EXECABORT) "
)

# How a script's refusal for want of a right begins or goes on, in Redis 6.2 and 7.
NO_RIGHT = re.compile(r"user executing the script can't|ACL failure in script|(^|: -)NOPERM ")


def public_url(url: str) -> str:
    """Return the URL without its password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(unreadable URL)"
    host = parts.netloc.rpartition("@")[2]
    user = parts.username or ""
    masked = f"{user}:***@{host}" if "@" in parts.netloc else host
    return f"{parts.scheme}://{masked}{parts.path}"


def credentials(settings: RedisSettings, role: Role) -> dict[str, Any]:
    """Return a role's options of a connection that the URL does not have: password and authorities.

    Raises BadRedisUrl for a file that cannot be read.
    """
    options: dict[str, Any] = {}
    if settings.password_file:
        options["password"] = secret_in(of_role(settings.password_file, role), "password_file")
    if settings.ssl_ca_certs:
        try:
            load_authorities(ssl.create_default_context(), settings.ssl_ca_certs, setting="redis")
        except TLSProblem as problem:
            raise errors.BadRedisUrl(str(problem)) from problem
        options["ssl_ca_certs"] = settings.ssl_ca_certs
    return options


def secret_in(path: str, key: str) -> str:
    """Return the password in a file that the setting redis.KEY names. Raises BadRedisUrl."""
    try:
        secret = Path(path).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not text"
        hint = "; `instar keys redis` writes one a role" if key == "password_file" else ""
        raise errors.BadRedisUrl(f"redis.{key} {path} cannot be read: {why}{hint}") from None
    if not secret:
        raise errors.BadRedisUrl(f"redis.{key} {path} is empty; write the password into it")
    return secret


def of_role(text: str, role: Role) -> str:
    """Return a URL or path with the role's name in place of {role}."""
    return text.replace("{role}", role)


def make_client(
    url: str,
    *,
    max_connections: int,
    pool_wait_s: float,
    given: Mapping[str, Any] | None = None,
    sentinel: Sentinel | None = None,
    kind: type[Redis] = Redis,
) -> Redis:
    """Return a client; a command waits up to `pool_wait_s` for a connection. Raises BadRedisUrl.

    given: further options of a connection, see `credentials`. sentinel: the Sentinels that name the server,
    which know it by the host of the URL. kind: the class of the client.
    """
    try:
        options: dict[str, Any] = dict(parse_url(url))
    except (ValueError, TypeError):
        # Neither the URL nor the error's text is shown: a URL that cannot be parsed may have a part of the
        # password anywhere.
        raise errors.BadRedisUrl(
            "redis.url is not a Redis address; write redis://[:password@]host:port/db, "
            "and the characters / # ? @ : % of a password as %2F %23 %3F %40 %3A %25"
        ) from None
    # redis-py retries by default: an XADD whose reply is lost would be written again. Its limit on writing
    # uses `asyncio.wait_for`, which on Python 3.11 loses a cancellation that arrives as the write ends.
    options |= {
        "socket_timeout": None,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": False,
        "driver_info": None,  # CLIENT SETINFO is unknown to 6.2
        **(given or {}),
    }
    if "path" not in options:  # a Unix socket knows no keep-alive
        options["socket_keepalive"] = True
    options |= {"max_connections": max_connections, "timeout": pool_wait_s}
    if sentinel is None:
        return kind.from_pool(Pool(**options))
    managed = SentinelManagedSSLConnection if url.startswith("rediss:") else SentinelManagedConnection
    options["connection_class"] = managed
    return kind.from_pool(SentinelPool(sentinel, primary_of(url), **options))


def primary_of(url: str) -> str:
    """Return what Sentinels call the primary: what stands for the host, with its capitals."""
    return urlsplit(url).netloc.rpartition("@")[2]


class OwnConnection:
    """A connection that one task at a time uses and keeps open: no pool, no retries.

    redis-py's own commands take a connection out of a pool, count it and put it back, each time, which takes
    more of a core than the command. The client's pool closes this connection too, and lends it to nobody.
    """

    def __init__(self, client: Redis) -> None:
        assert isinstance(client.connection_pool, Pool)
        self._pool = client.connection_pool
        self._connection = self._pool.make_connection()

    async def ask(self, *commands: Command) -> list[Any]:
        """Send commands together and return the answers as Redis writes them, its refusals among them.

        Raises what redis-py raises if the connection fails, which then opens anew.
        """
        connection = self._connection
        try:
            if connection.is_connected and await connection.can_read():
                await connection.disconnect(nowait=True)  # the server closed it, or it is out of step
            if not connection.is_connected:
                # Asks Sentinels where to, where there are some.
                await connection.connect()  # type: ignore[no-untyped-call]
            packed = connection.pack_commands(commands)
            await connection.send_packed_command(packed, check_health=False)
            return [await self._answer() for _ in commands]
        finally:
            if self._pool.is_closed:
                drop(connection)

    async def _answer(self) -> Any:
        try:
            return await self._connection.read_response()
        except exceptions.ResponseError as refusal:
            return refusal


def raise_refusal(answers: list[Any]) -> None:
    """Raise the first refusal among answers, those of a transaction included."""
    for answer in answers:
        if isinstance(answer, list):
            raise_refusal(answer)
        elif isinstance(answer, exceptions.ResponseError):
            raise answer


@contextmanager
def translated() -> Iterator[None]:
    """Turn errors into BusUnavailable, BusFull or RedisProblem, but for a missing stream or group."""
    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise BusFull(f"Redis is at maxmemory: {error}") from error
    except exceptions.AuthenticationError as error:
        raise errors.RedisPassword(_password_text(error)) from error
    except exceptions.NoPermissionError as error:
        raise errors.RedisForbidden(f"Redis refuses: {error}; widen the user's access list (ACL)") from error
    except AWAY as error:
        text = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
        raise BusUnavailable(text) from error
    except exceptions.ResponseError as error:
        if is_group_missing(error):
            raise
        if "FENCED" in str(error):
            raise Fenced(str(error)) from error
        if "OOM command not allowed" in str(error):  # a script's error has the code within its text
            raise BusFull(f"Redis is at maxmemory: {error}") from error
        if NO_RIGHT.search(str(error)):
            raise errors.RedisForbidden(
                f"Redis refuses: {error}; load the access list that `instar keys redis` writes"
            ) from error
        if NOT_NOW.search(str(error)):
            raise BusUnavailable(f"Redis refuses for now: {error}") from error
        raise RedisProblem(f"Redis refuses: {error}") from error


def is_group_missing(error: exceptions.ResponseError) -> bool:
    """Return True if the stream or its group is gone. Redis words it differently for each command."""
    text = str(error)
    return text.startswith(("NOGROUP", "UNBLOCKED")) or "no such key" in text or "requires the key" in text


def _password_text(error: Exception) -> str:
    text = str(error)
    if "without any password" in text or "no password is set" in text:
        return "Redis has no password, but redis.url carries one; remove it"
    if "NOAUTH" in text or "Authentication required" in text:
        return "Redis asks for a password; write it into redis.url as redis://:password@host:port/db"
    return (
        "Redis refused the user name or password in redis.url; for users of its own it must have loaded the "
        "access list that `instar keys redis` writes"
    )


async def check_rights(connection: OwnConnection, role: Role, names: Names, where: str) -> None:
    """Ask Redis for every command of a role, in a transaction that is discarded. Raises RedisForbidden."""
    commands = rights_needed(role, names)
    with translated():
        _, *answers, _ = await connection.ask(("MULTI",), *commands, ("DISCARD",))
    for command, answer in zip(commands, answers, strict=True):
        if isinstance(answer, exceptions.NoPermissionError):
            raise errors.RedisForbidden(
                f"Redis forbids the {role} {' '.join(command)[:80]!r}: {answer}; load the access list that"
                f" `instar keys redis` writes for the prefix {names.prefix!r} (at {where})"
            )


async def probe(client: Redis, url: str, limit_s: float) -> dict[str, Any]:
    """Return `INFO server` of a usable Redis. Raises a RedisProblem that says why it is not usable."""
    where = public_url(url)
    try:
        with translated():
            async with asyncio.timeout(limit_s):
                # The server refuses here a password that it does not want or did not get.
                facts: dict[str, Any] = await client.info("server")
    except RedisProblem as problem:
        raise type(problem)(f"{problem} (at {where})") from problem
    except BusUnavailable as away:
        if isinstance(away.__cause__, exceptions.InvalidResponse):
            raise errors.NotRedis(f"{where} does not answer as Redis does: {away.__cause__}") from away
        if "CERTIFICATE_VERIFY_FAILED" in str(away):
            raise errors.RedisCertificate(
                f"the certificate of {where} is not trusted ({away}); name its authority's file in "
                "redis.ssl_ca_certs"
            ) from away
        how = "start one, or set redis.url (INSTAR_REDIS_URL) to where it runs"
        if isinstance(away.__cause__, MasterNotFoundError):
            how = "see that a Sentinel of redis.sentinels answers and watches a primary of this name"
        raise errors.RedisNotThere(f"no Redis at {where} ({away}); {how}") from away
    except (exceptions.RedisError, ValueError, TypeError, AttributeError) as error:
        raise errors.NotRedis(
            f"{where} does not answer as Redis does: {type(error).__name__}: {error}"
        ) from error
    version = str(facts.get("redis_version", ""))
    if not version:
        raise errors.NotRedis(f"{where} does not answer as Redis does: INFO names no redis_version")
    numbers = tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:2])
    if numbers < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise errors.RedisTooOld(f"Redis at {where} is version {version}; {oldest} or newer is needed")
    return facts


async def close(client: Redis) -> None:
    """Close the connections of a client of `make_client`, in any state, even if this call is cancelled."""
    pool = client.connection_pool
    assert isinstance(pool, Pool)
    pool.close()
    await asyncio.sleep(0)  # the event loop closes the sockets in its next turn

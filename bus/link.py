"""One process's link to Redis: short commands, and a watcher that knows whether Redis answers."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from redis import exceptions
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from bus import schema
from bus.access import Role
from bus.clock import now_ms
from bus.connection import (
    Command,
    OwnConnection,
    check_rights,
    close,
    credentials,
    make_client,
    of_role,
    probe,
    public_url,
    raise_refusal,
    translated,
)
from bus.errors import BusFull, BusUnavailable, Fenced, OtherSchema, RedisNotThere, RedisProblem
from bus.levers import LeverPlan
from bus.messages import READS, SCHEMA_VERSION, Event, Number
from bus.names import Names
from bus.pools import Pool
from bus.sentinels import close_sentinel, make_sentinel
from bus.settings import RedisSettings

log = logging.getLogger("bus")

T = TypeVar("T")

SHORT_CONNECTIONS = 16
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
PICTURES = 3  # tries to read from a server that the watcher knows
QUIET_S = 5.0  # outages that follow each other faster are logged once
READS_S = 10.0  # lifetime of what a monitor or controller shows that it reads; several times `block_ms`

# Roles without a card or lease of their own: each of their processes shows in a key what it reads.
SHOWN: Final = ("monitor", "controller")

# Before the source of a script of a fenced link. Last of the keys is the lease, last of the arguments what it
# must hold.
_GUARD = """
local lease, token = table.remove(KEYS), table.remove(ARGV)
if redis.call('GET', lease) ~= token then
    return redis.error_reply('FENCED the lease is not ' .. token)
end
"""
# ARGV: of each command the number of its parts, and these.
_COMMANDS = """
local at = 1
while ARGV[at] do
    local last = at + tonumber(ARGV[at])
    redis.call(unpack(ARGV, at + 1, last))
    at = last + 1
end
return 1
"""


@dataclass(frozen=True, slots=True)
class Restart:
    """Redis restarted. `data_lost`: streams, groups and leases are gone (no persistence, FLUSHALL, ...)."""

    data_lost: bool
    run_id: str


@dataclass(frozen=True, slots=True)
class _Identity:
    run_id: str
    boot: str  # a marker in the data set; "" where it could not be set (no memory)


class WriteFence(Protocol):
    """The lease that a link must hold to write (`bus.leader.Leader`)."""

    @property
    def key(self) -> str: ...

    @property
    def term(self) -> int: ...

    @property
    def token(self) -> str: ...

    def fenced(self, why: str) -> Fenced: ...

    async def wait_held(self) -> None: ...


class RedisLink:
    """Short commands that fail at once while Redis is away. `source`: the service's name in events.

    Only the watcher probes a Redis that went away: one connection attempt a second and one line of log,
    however many readers wait. It also tells a restart or a loss of data from a pause: `on_restart`.

    fence: a lease without which scripts and writes are refused, by Redis itself (Fenced). None: no lease.
    """

    def __init__(self, settings: RedisSettings, source: str, role: Role | None = None) -> None:
        self.url, self.source = of_role(settings.url, role or "cli"), source
        self._role, self._credentials = role, credentials(settings, role or "cli")
        self._sentinel = make_sentinel(settings, self._credentials)
        self.names: Final = Names(settings.prefix)
        self.fence: WriteFence | None = None
        self.schema = SCHEMA_VERSION  # version that this process writes: the one that the data set names
        self.restarts = 0  # how often the watcher saw that Redis restarted or lost its data
        self.block_ms = settings.block_ms
        self.timeout_s = settings.socket_timeout_s
        self._client = self.client(SHORT_CONNECTIONS)
        self._writer, self._writing = OwnConnection(self._client), asyncio.Lock()
        self._scripts: dict[str, AsyncScript] = {}
        self._identity: _Identity | None = None
        self._reads_key = self.names.reads(f"{role}:{uuid.uuid4().hex}") if role in SHOWN else ""
        self._callbacks: list[Callable[[Restart], None]] = []
        self._up = asyncio.Event()
        self._trouble = asyncio.Event()
        self._look = asyncio.Event()  # set when the watcher has looked once more
        self._down_since = 0.0
        self._logged_at = -QUIET_S
        self._loud = False
        self._watcher: asyncio.Task[None] | None = None

    def client(self, max_connections: int) -> Redis:
        """Return a client with a pool of its own, for a blocking reader."""
        return make_client(
            self.url,
            max_connections=max_connections,
            pool_wait_s=self.timeout_s,
            given=self._credentials,
            sentinel=self._sentinel,
        )

    async def start(self, wait_s: float = 10.0) -> None:
        """Wait up to `wait_s` for a Redis that is starting. Raises RedisProblem."""
        deadline = time.monotonic() + wait_s
        waits = False
        while True:
            try:
                await probe(self._client, self.url, self.timeout_s)
                if self._role:
                    await check_rights(self._writer, self._role, self.names, public_url(self.url))
                self._identity = await self._identify()
                break
            except (RedisNotThere, BusUnavailable, BusFull) as error:
                if time.monotonic() >= deadline:
                    if isinstance(error, RedisNotThere):
                        raise
                    raise RedisProblem(f"Redis at {public_url(self.url)} cannot be used: {error}") from error
                if not waits:
                    log.info("waiting up to %.0f s for Redis at %s", wait_s, public_url(self.url))
                waits = True
                await asyncio.sleep(0.2)
        self._up.set()
        self._watcher = asyncio.create_task(self._watch(), name="bus-watch")

    async def aclose(self) -> None:
        if self._watcher:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        await close(self._client)
        if self._sentinel:
            await close_sentinel(self._sentinel)

    @property
    def up(self) -> bool:
        """False from a failed command until the watcher has reached Redis: writes fail at once."""
        return self._up.is_set()

    async def wait_up(self) -> None:
        """Wait until Redis answers, and takes what this process writes."""
        await self._up.wait()
        if self.fence:
            await self.fence.wait_held()

    def on_restart(self, callback: Callable[[Restart], None]) -> None:
        """Register a callback that runs before any reader gets its next batch. It must not block."""
        self._callbacks.append(callback)

    @contextmanager
    def own_callbacks(self) -> Iterator[None]:
        """Forget at the end which callbacks were registered within: of work that may begin anew."""
        before = list(self._callbacks)
        try:
            yield
        finally:
            self._callbacks = before

    def make_event(
        self,
        kind: str,
        subject: str,
        reason: str,
        numbers: Mapping[str, Number],
        morph_id: str = "",
        cause: str = "",
        weighed: LeverPlan | None = None,
    ) -> Event:
        """Return an event of this service, now."""
        return Event(
            kind=kind,
            source=self.source,
            subject=subject,
            reason=reason,
            at_ms=now_ms(),
            numbers=dict(numbers),
            morph_id=morph_id,
            cause=cause,
            weighed=weighed,
        )

    async def run(self, call: Callable[[Redis], Awaitable[T]]) -> T:
        """Run a short command. Raises BusUnavailable (at once while Redis is away), BusFull, RedisProblem."""
        if not self.up:
            raise BusUnavailable(f"Redis has not answered for {time.monotonic() - self._down_since:.1f} s")
        try:
            with translated():
                async with asyncio.timeout(self.timeout_s):
                    return await call(self._client)
        except Fenced as error:
            raise self.fence.fenced(str(error)) if self.fence else error from error
        except BusUnavailable as error:
            self.failed(error)
            raise

    async def write(self, *commands: Command, is_atomic: bool = False) -> None:
        """Send commands in one round trip, all or none if atomic.

        Raises as `run` does, for the first that Redis refuses.
        """
        if self.fence:
            await self.script(_COMMANDS, [], [part for one in commands for part in (len(one), *one)])
            return
        if is_atomic:
            commands = ("MULTI",), *commands, ("EXEC",)

        async def send(_: Redis) -> None:
            async with self._writing:
                answers = await self._writer.ask(*commands)
            raise_refusal(answers)

        await self.run(send)

    async def script(self, source: str, keys: list[str], args: list[Any]) -> Any:
        """Run a Lua script, which is atomic in Redis. Raises as `run` does, and Fenced."""
        if self.fence:
            source, keys, args = _GUARD + source, [*keys, self.fence.key], [*args, self.fence.token]
        return await self.unfenced_script(source, keys, args)

    async def unfenced_script(self, source: str, keys: list[str], args: list[Any]) -> Any:
        """Run a Lua script without the fence. Raises as `run` does."""
        if source not in self._scripts:
            self._scripts[source] = self._client.register_script(source)
        return await self.run(lambda _: self._scripts[source](keys=keys, args=args))

    def failed(self, error: Exception) -> None:
        """Make all commands fail at once, after one failed, until the watcher has reached Redis again."""
        if self.up:
            self._up.clear()
            self._down_since = time.monotonic()
            self._loud = self._down_since - self._logged_at > QUIET_S
            if self._loud:
                self._logged_at = self._down_since
                log.warning("lost Redis at %s: %s", public_url(self.url), error)
        self._trouble.set()

    async def picture(self, source: str, keys: list[str], args: list[Any]) -> list[Any]:
        """Return the rows of a script that returns a run id, the boot marker and rows.

        Rows of a restarted server are returned only after `on_restart` ran: an empty registry would otherwise
        look as if all workers had left. Raises as `run` does.
        """
        for _ in range(PICTURES):
            answer: list[Any] = await self.script(source, keys, args)
            run_id, boot, *rows = answer
            if self._identity == _Identity(run_id.decode(), (boot or b"").decode()):
                return rows
            await self.doubt()
        raise BusUnavailable(f"Redis was another server in each of {PICTURES} answers")

    async def doubt(self) -> None:
        """Have the watcher look at Redis, and wait until Redis answers. Other commands are not disturbed."""
        look = self._look
        self._trouble.set()
        await look.wait()
        await self._up.wait()

    async def _watch(self) -> None:
        pause_s = FIRST_RETRY_S
        while True:
            began_s = time.monotonic()
            if self.up:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.block_ms / 1000):
                        await self._trouble.wait()
            if time.monotonic() - began_s > LONGEST_RETRY_S:  # a new outage: Redis was up for a while
                pause_s = FIRST_RETRY_S
            if not self.up:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_RETRY_S)
            self._trouble.clear()
            await self._check()
            self._look.set()
            self._look = asyncio.Event()

    async def _check(self) -> None:
        try:
            identity = await self._identify()
        except (BusUnavailable, BusFull, RedisProblem) as error:
            self.failed(error)
            return
        self._compare(identity)
        if not self.up:
            if self._loud:
                log.warning("Redis is back after %.1f s", time.monotonic() - self._down_since)
            self._up.set()

    def _compare(self, now: _Identity) -> None:
        before, self._identity = self._identity, now
        if before is None:
            return
        data_lost = bool(before.boot) and before.boot != now.boot
        if not data_lost and before.run_id == now.run_id:
            return
        log.warning("Redis %s", "lost its data" if data_lost else "restarted and kept its data")
        self.restarts += 1
        restart = Restart(data_lost=data_lost, run_id=now.run_id)
        for callback in self._callbacks:  # these run before those who wait for `up`
            asyncio.get_running_loop().call_soon(callback, restart)

    async def _identify(self) -> _Identity:
        with translated():
            async with asyncio.timeout(self.timeout_s):
                async with self._client.pipeline(transaction=False) as pipe:
                    pipe.info("server")
                    pipe.get(self.names.boot)
                    pipe.get(self.names.schema)
                    pipe.info("replication")
                    facts, boot, version, replication = await pipe.execute()
                if replication["role"] != "master":
                    self._leave_replica()
                if boot is None:
                    boot, version = await self._name_data_set()
                self._write_in(boot, version)
                await self._show_reads()
        return _Identity(run_id=str(facts["run_id"]), boot=boot.decode())

    def _leave_replica(self) -> None:
        """Drop the connections to a server that only reads, so that the next ones ask who the primary is."""
        pool = self._client.connection_pool
        assert isinstance(pool, Pool)
        pool.drop_all()
        raise BusUnavailable(f"Redis at {public_url(self.url)} is a replica, which takes no writes")

    async def _name_data_set(self) -> tuple[bytes, bytes | None]:
        """Name a new data set, unless another process was first; at maxmemory the name stays empty.

        The version of its messages is there before its name.
        """
        with suppress(exceptions.OutOfMemoryError):
            await self._client.set(self.names.schema, self.schema, nx=True)
            await self._client.set(self.names.boot, uuid.uuid4().hex, nx=True)
        name: Any = await self._client.get(self.names.boot)
        version: Any = await self._client.get(self.names.schema)
        return bytes(name or b""), version

    def _write_in(self, boot: bytes, version: bytes | None) -> None:
        """Write in the version that the data set names. Raises OtherSchema."""
        if not boot:
            return
        # A process of release 0.1 named the set if there is no version.
        named = int(version) if version and version.isdigit() else schema.FIRST
        if named not in READS:
            raise OtherSchema(
                f"this cluster's messages are in schema {named} (Redis key {self.names.schema}), and this "
                f"program reads {schema.in_words(READS)}: "
                + (
                    f"start a release that reads {named}"
                    if named > SCHEMA_VERSION
                    else f"first replace every process by a release that reads {named} and {READS[0]}"
                )
                + " (docs/upgrade.md)"
            )
        if named != self.schema:
            log.info("writing messages in schema %d", named)
        self.schema = named

    async def _show_reads(self) -> None:
        """Show for a while what a process reads that has no card or lease; not at maxmemory."""
        if self._reads_key:
            with suppress(exceptions.OutOfMemoryError):
                text = schema.in_words(READS)
                await self._client.set(self._reads_key, text, px=round(READS_S * 1000))

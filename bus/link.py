"""The link of one process to Redis: short commands, and one watcher that knows whether Redis is there.

The watcher is the only one that probes a Redis that went away, so an outage costs one line of log and one
connection attempt a second, however many readers wait. It also tells a Redis that came back with another
run id or without its data from one that was only slow: `on_restart`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import exceptions
from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from bus.connection import close, make_client, probe, public_url, translated
from bus.errors import BusFull, BusUnavailable, RedisNotThere, RedisProblem
from bus.names import Names

log = logging.getLogger("bus")

T = TypeVar("T")

SHORT_CONNECTIONS = 16
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
QUIET_S = 5.0  # outages that follow each other faster are logged once


@dataclass(frozen=True, slots=True)
class Restart:
    """Redis is not what it was. `data_lost`: streams, groups and leases are gone (restart without
    persistence, FLUSHALL, an empty replica took over); else it restarted and kept what it had saved."""

    data_lost: bool
    run_id: str


@dataclass(frozen=True, slots=True)
class _Identity:
    run_id: str
    boot: str  # a marker in the data set; "" where it could not be set (no memory)


class RedisLink:
    """Short commands with fail-fast while Redis is away. `source`: who speaks, in events.
    `watch_s`: how often a healthy Redis is asked whether it still has its data."""

    def __init__(
        self, url: str, names: Names, *, source: str, socket_timeout_s: float, watch_s: float
    ) -> None:
        self.url = url
        self.names = names
        self.source = source
        self.restarts = 0  # how often Redis restarted or lost its data, as far as we know
        self.socket_timeout_s = socket_timeout_s
        self._watch_s = watch_s
        self._client = self.client(SHORT_CONNECTIONS)
        self._scripts: dict[str, AsyncScript] = {}
        self._identity: _Identity | None = None
        self._callbacks: list[Callable[[Restart], None]] = []
        self._up = asyncio.Event()
        self._trouble = asyncio.Event()
        self._look = asyncio.Event()  # the watcher's next one
        self._down_since = 0.0
        self._logged_at = -QUIET_S
        self._loud = False
        self._watcher: asyncio.Task[None] | None = None

    def client(self, max_connections: int) -> Redis:
        """A client with a pool of its own, for a blocking reader."""
        return make_client(self.url, max_connections=max_connections, pool_wait_s=self.socket_timeout_s)

    async def start(self, wait_s: float = 10.0) -> None:
        """Waits up to `wait_s` for a Redis that is only just starting. Raises RedisProblem."""
        deadline = time.monotonic() + wait_s
        waits = False
        while True:
            try:
                await probe(self._client, self.url, self.socket_timeout_s)
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

    @property
    def up(self) -> bool:
        """False from the first failed command until the watcher has reached Redis again."""
        return self._up.is_set()

    async def wait_up(self) -> None:
        await self._up.wait()

    def on_restart(self, callback: Callable[[Restart], None]) -> None:
        """`callback` runs in the event loop before any reader gets its next batch. It must not block:
        set an event or start a task."""
        self._callbacks.append(callback)

    async def run(self, call: Callable[[Redis], Awaitable[T]]) -> T:
        """One short command (or pipeline). Raises BusUnavailable (at once while Redis is known to be away),
        BusFull, RedisProblem."""
        if not self.up:
            raise BusUnavailable(f"Redis is away since {time.monotonic() - self._down_since:.1f} s")
        try:
            with translated():
                async with asyncio.timeout(self.socket_timeout_s):
                    return await call(self._client)
        except BusUnavailable as error:
            self.failed(error)
            raise

    async def script(self, source: str, keys: list[str], args: list[Any]) -> Any:
        """A Lua script, atomic in Redis: EVALSHA, and EVAL where the server does not know it (any more).
        Raises as `run` does."""

        async def call(client: Redis) -> Any:
            known = self._scripts.get(source)
            if known is None:
                known = self._scripts[source] = client.register_script(source)
            return await known(keys=keys, args=args)

        return await self.run(call)

    def failed(self, error: Exception) -> None:
        """A command failed: all others fail at once until the watcher has reached Redis again."""
        if self.up:
            self._up.clear()
            self._down_since = time.monotonic()
            self._loud = self._down_since - self._logged_at > QUIET_S
            if self._loud:
                self._logged_at = self._down_since
                log.warning("lost Redis at %s: %s", public_url(self.url), error)
        self._trouble.set()

    def is_known(self, run_id: str, boot: str) -> bool:
        """Whether this is the server and the data set that the watcher saw last."""
        return self._identity == _Identity(run_id, boot)

    async def doubt(self) -> None:
        """A reader's own connection failed, or the server seems another: returns when the watcher has looked
        and Redis is there. It may have been one connection alone (CLIENT KILL, no more clients): then nobody
        else is disturbed."""
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
                    async with asyncio.timeout(self._watch_s):
                        await self._trouble.wait()
            if time.monotonic() - began_s > LONGEST_RETRY_S:  # it was up for a while: not the same trouble
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
        for callback in self._callbacks:  # these run before whoever waits for `up`
            asyncio.get_running_loop().call_soon(callback, restart)

    async def _identify(self) -> _Identity:
        with translated():
            async with asyncio.timeout(self.socket_timeout_s):
                async with self._client.pipeline(transaction=False) as pipe:
                    pipe.info("server")
                    pipe.get(self.names.boot)
                    facts, boot = await pipe.execute()
                if boot is None:
                    boot = await self._name_data_set()
        return _Identity(run_id=str(facts["run_id"]), boot=boot.decode())

    async def _name_data_set(self) -> bytes:
        """Whoever is first names a new data set; at maxmemory it stays without a name for now."""
        with suppress(exceptions.OutOfMemoryError):
            await self._client.set(self.names.boot, uuid.uuid4().hex, nx=True)
        name: Any = await self._client.get(self.names.boot)
        return bytes(name or b"")

"""A service's `main`, as its process runs it, in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.client import Bus, connect
from bus.service import Main
from bus.settings import RedisSettings, Settings


@asynccontextmanager
async def running(main: Main, settings: Settings, bus: Bus) -> AsyncIterator[None]:
    """Run a service on the Redis of `bus` for as long as the block; then stop it, raise what it raised.

    It has a link of its own, as a process has: who leads fences what its link writes.
    """
    redis = RedisSettings(
        url=bus.url, prefix=bus.names.prefix, socket_timeout_s=bus.timeout_s, block_ms=bus.block_ms
    )
    stop = asyncio.Event()
    async with connect(redis, source=bus.source) as own:
        task = asyncio.ensure_future(main(settings, own, stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(task, 5)

"""A service's `main`, as its process runs it, in the event loop of a test."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from bus.client import Bus, connect
from bus.service import Main
from bus.settings import RedisSettings, Settings


@asynccontextmanager
async def running(main: Main, settings: Settings, bus: Bus, *, survives: bool = False) -> AsyncIterator[None]:
    """Run a service on the Redis of `bus` for as long as the block; then stop it, raise what it raised.

    It has a link of its own, as a process has: who leads fences what its link writes. survives: what a
    controller logs as failed, and survives (`controller.failures`), is not raised either.
    """
    redis = RedisSettings(
        url=bus.url, prefix=bus.names.prefix, socket_timeout_s=bus.timeout_s, block_ms=bus.block_ms
    )
    stop = asyncio.Event()
    with survived() as errors:
        async with connect(redis, source=bus.source) as own:
            task = asyncio.ensure_future(main(settings, own, stop))
            try:
                yield
            finally:
                stop.set()
                await asyncio.wait_for(task, 5)
    if errors and not survives:
        raise errors[0]


@contextmanager
def survived() -> Iterator[list[BaseException]]:
    """Collect the exceptions that controllers log within the block."""
    collector, log = _Collector(), logging.getLogger("controller")
    log.addHandler(collector)
    try:
        yield collector.errors
    finally:
        log.removeHandler(collector)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1]:
            self.errors.append(record.exc_info[1])

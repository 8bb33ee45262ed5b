"""Tasks: how they are ended, and how they wait for Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from bus.client import Bus, BusFull, BusUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_S = 0.1
RETRY_S, FULL_RETRY_S = 0.2, 1.0


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks until they are done: a library may swallow a cancellation."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)


async def until_taken(bus: Bus, call: Callable[[], Awaitable[T]]) -> T:
    """Repeat `call` until Redis takes it, however long Redis is away or full."""
    while True:
        try:
            return await call()
        except (BusUnavailable, BusFull) as error:
            is_full = isinstance(error, BusFull)
            log.log(logging.WARNING if is_full else logging.DEBUG, "Redis takes nothing yet: %s", error)
            await asyncio.sleep(FULL_RETRY_S if is_full else RETRY_S)
            await bus.wait_up()

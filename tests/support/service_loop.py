"""A service's `main`, as its process runs it, in the event loop of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.client import Bus
from bus.service import Main
from bus.settings import Settings


@asynccontextmanager
async def running(main: Main, settings: Settings, bus: Bus) -> AsyncIterator[None]:
    """Run a service for as long as the block; at its end, stop it and raise what it raised."""
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(settings, bus, stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 5)

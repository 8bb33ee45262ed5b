"""The frame of a process: settings, logging, event loop, signals, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from bus import logs
from bus.access import Role
from bus.client import Bus, RedisProblem, connect
from bus.errors import RedisNotThere
from bus.settings import Settings, SettingsError, load_settings

Main = Callable[[Settings, Bus, asyncio.Event], Awaitable[None]]

# Redis may be starting beside the service, by the same supervisor.
REDIS_WAIT_S = 15.0
CONFIGURATION_ERROR = 2  # exit status: the same settings will fail again
GPU_LOST = 3  # exit status of a worker: another GPU or a reset helps


def run(service: Role, main: Main, source: str = "") -> int:
    """Run `main` with a started bus until it returns. Returns the exit status.

    0: stopped by SIGTERM or SIGINT. 1: no Redis answers, which may come, or an unexpected error. 2: a setting
    is wrong or Redis is not usable as it is; a supervisor need not try again.
    """
    try:
        settings = load_settings()
    except SettingsError as error:
        sys.stderr.write(f"{service}: {error}\n")
        return CONFIGURATION_ERROR
    logs.set_up(settings.log, source or service)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(settings, main, source or service, service))
    except RedisProblem as problem:
        logging.getLogger(service).error("%s", problem)
        return 1 if isinstance(problem, RedisNotThere) else CONFIGURATION_ERROR
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop if it is installed (by the extra `services`); None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _run(settings: Settings, main: Main, source: str, role: Role) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):  # Windows
            loop.add_signal_handler(number, stop.set)
    bus = connect(settings.redis, source=source, role=role)
    try:
        await run_until(stop, bus.start(REDIS_WAIT_S))
        if not stop.is_set():
            await main(settings, bus, stop)
    finally:
        await bus.aclose()


async def run_until(stop: asyncio.Event, *works: Coroutine[Any, Any, object]) -> None:
    """Run `works` until `stop` is set or one ends, then cancel the others. Raises the first failure."""
    tasks = [asyncio.create_task(work) for work in (stop.wait(), *works)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

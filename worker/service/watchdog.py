"""A step that does not end: a kernel in a loop, a driver that hangs. Nothing inside can undo it."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os

from worker.service.engine_thread import EngineThread

log = logging.getLogger(__name__)

EXIT_STATUS = 1  # a restart helps


async def watch_steps(thread: EngineThread, limit_s: float) -> None:
    """End the process when a step lasts longer than `limit_s`; the requests go on elsewhere."""
    while True:
        await asyncio.sleep(min(limit_s / 4, 2.0))
        if (seconds := thread.step_seconds()) > limit_s:
            log.critical(
                "a step has been running for %.0f s, the limit is %.0f s (worker.watchdog_s); "
                "the process ends here, see below where each thread was",
                seconds,
                limit_s,
            )
            faulthandler.dump_traceback()
            os._exit(EXIT_STATUS)

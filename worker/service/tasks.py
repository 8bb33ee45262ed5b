"""Ending tasks for sure."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.1


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks until they are done.

    Once may not be enough: a library that swallows a cancellation would keep a worker half alive, with its
    lease renewed and its engine gone.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)

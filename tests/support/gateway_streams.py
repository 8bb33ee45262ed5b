"""One stream after another, put together as a client does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.support.gateway_harness import ANSWER, BODY, Gate


async def answer(gate: Gate, **body: Any) -> tuple[str, str | None, Any]:
    """Return text, finish reason and usage of a stream."""
    text, reason, usage = "", None, None
    async with gate.client() as client:
        options = {"include_usage": True}
        stream = await client.completions.create(**BODY | body, stream=True, stream_options=options)
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.text
                reason = choice.finish_reason or reason
            usage = chunk.usage or usage
    return text, reason, usage


def whole(gate: Gate) -> tuple[str, str, int]:
    return ANSWER, "stop", len(gate.ids(ANSWER)) + 1


async def assert_whole(gate: Gate, task: asyncio.Task[tuple[str, str | None, Any]]) -> None:
    text, reason, usage = await asyncio.wait_for(task, 15)
    assert (text, reason, usage.completion_tokens) == whole(gate)
    await gate.settled()


def hang_at(gate: Gate, index: int) -> asyncio.Task[tuple[str, str | None, Any]]:
    """A stream whose workers fall silent at a token."""
    for worker in gate.workers:
        worker.stop_at = index
    return asyncio.create_task(answer(gate))


def busy(gate: Gate) -> Callable[[], Any]:
    return lambda: any(worker.num_running for worker in gate.workers)

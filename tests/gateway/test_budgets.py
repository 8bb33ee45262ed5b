"""What one call may take of Redis and of the gateway's memory, measured at the real thing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bus.codec import decode
from bus.messages import Submit
from bus.settings import RedisSettings
from tests.support.gateway_harness import BODY, Gate, running
from tests.support.redis_process import RedisProcess

pytest_plugins = ["tests.support.gateway_fixtures"]


def stop_reading(gate: Gate) -> None:
    """Let what is sent to the worker stay in Redis."""
    gate.worker._tasks[1].cancel()


async def test_a_prompt_is_in_redis_once_for_all_choices(
    redis_settings: RedisSettings, redis_server: RedisProcess, folder: Path
) -> None:
    async with running(redis_settings, folder) as gate, gate.http() as http:
        stop_reading(gate)
        prompt = [900 + i % 90 for i in range(400)]  # 3 bytes each
        stream = gate.bus.names.requests(gate.worker.instance)

        async def num_bytes(n: int) -> int:
            asked = asyncio.create_task(
                http.post("/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 4, "n": n})
            )
            with redis_server.client() as client:
                await gate.until("the entry", lambda: client.xlen(stream))
                ((_, fields),) = client.xrange(stream)
                client.delete(stream)
            assert [one.prompt_token_ids for one in decode(fields[b"m"], Submit).each()] == [prompt] * n
            asked.cancel()
            await asyncio.wait([asked])
            return len(fields[b"m"])

        one, many = await num_bytes(1), await num_bytes(128)
        assert one < 2000 and many < one + 127 * 120, "128 prompts would be 154 kB"

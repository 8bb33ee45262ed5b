"""A Redis that pauses, forgets or is full costs a worker time, and no token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.conftest import settings_of
from tests.support.engine_toys import continuation
from tests.support.redis_process import RedisProcess
from tests.support.worker_bench import running

pytest_plugins = ["tests.support.worker_fixtures"]


async def test_redis_that_comes_back_within_the_lease_costs_nothing(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis(append_only=True)
    async with running(settings_of(server.url)) as bench:
        bench.model.step_s = 0.02
        await bench.submit("a", [1], 60)
        await bench.until(lambda: len(bench.tokens("a")) > 5)
        server.freeze()
        await asyncio.sleep(0.5)
        server.thaw()
        await bench.until(lambda: bench.end("a"))
        assert bench.tokens("a") == continuation([1], 60)
        await bench.until(bench.is_settled)


async def test_redis_that_lost_its_data_gets_a_worker_of_a_new_epoch(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    async with running(settings_of(server.url)) as bench:
        bench.model.step_s = 0.02
        before = await bench.epoch()
        await bench.submit("a", [1], 190)
        await bench.until(lambda: bench.tokens("a"))
        server.kill()
        server.start()
        await bench.until(lambda: bench.bus.up)
        await bench.until(bench.is_serving)
        assert await bench.epoch() > before
        await bench.bus.renew_gateway("g0", 60.0)
        await bench.submit("b", [3], 5)
        await bench.until(lambda: bench.end("b"))
        assert bench.tokens("b") == continuation([3], 5)


async def test_a_redis_without_memory_holds_the_tokens_back_and_loses_none(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis("--maxmemory-policy", "noeviction")
    async with running(settings_of(server.url)) as bench:
        bench.model.step_s = 0.01
        await bench.submit("a", [1], 80)
        await bench.until(lambda: len(bench.tokens("a")) > 5)
        with server.client() as client:
            client.config_set("maxmemory", "1")
            await asyncio.sleep(0.5)
            client.config_set("maxmemory", "0")
        await bench.until(lambda: bench.end("a"))
        assert bench.tokens("a") == continuation([1], 80)
        await bench.until(bench.is_settled)

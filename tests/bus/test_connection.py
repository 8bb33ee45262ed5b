"""Connections to Redis end with their client, whenever it is closed and whoever cancels whom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import Iterator

import pytest
import redis
from redis.asyncio import Redis

from bus.connection import close, make_client
from tests.support.redis_process import RedisProcess

TURNS = range(12)  # of the event loop: connecting, its handshake and a PING take eight


@contextlib.contextmanager
def nothing_left_open() -> Iterator[None]:
    """Fail on connections that are left open: they only warn, from a finalizer, when they are collected."""
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield
        gc.collect()
    assert [str(warning.message) for warning in said] == []


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def client_of(server: RedisProcess) -> Redis:
    return make_client(server.url, max_connections=2, pool_wait_s=1.0)


@pytest.mark.parametrize("count", TURNS)
def test_a_command_that_is_cancelled_leaves_no_connection(redis_server: RedisProcess, count: int) -> None:
    async def scene() -> None:
        client = client_of(redis_server)
        command = asyncio.ensure_future(client.ping())
        await turns(count)
        command.cancel()
        await asyncio.wait([command])
        await close(client)

    with nothing_left_open():
        asyncio.run(scene())


@pytest.mark.parametrize("count", TURNS)
def test_a_connection_that_comes_up_while_its_client_closes_is_closed(
    redis_server: RedisProcess, count: int
) -> None:
    async def scene() -> None:
        client = client_of(redis_server)
        command = asyncio.ensure_future(client.ping())
        await turns(count)
        await close(client)
        async with asyncio.timeout(5):
            await asyncio.wait([command])
        if not command.cancelled():
            command.exception()

    with nothing_left_open():
        asyncio.run(scene())


@pytest.mark.parametrize("count", range(1, 4))
def test_closing_that_is_cancelled_closes_all_the_same(redis_server: RedisProcess, count: int) -> None:
    async def scene() -> None:
        client = client_of(redis_server)
        await asyncio.gather(client.ping(), client.ping())
        closing = asyncio.create_task(close(client))
        await turns(count)
        closing.cancel()
        await asyncio.wait([closing])

    with nothing_left_open():
        asyncio.run(scene())


async def test_who_waits_for_an_answer_hears_that_the_connection_is_gone(redis_server: RedisProcess) -> None:
    client = client_of(redis_server)
    waiting = asyncio.ensure_future(client.xread({"nothing": "$"}, block=5000))
    await client.ping()
    await asyncio.sleep(0.05)
    await close(client)
    with pytest.raises(redis.ConnectionError):
        async with asyncio.timeout(1):
            await waiting


def test_a_redis_that_takes_nothing_does_not_keep_its_connections(redis_server: RedisProcess) -> None:
    async def scene() -> None:
        client = client_of(redis_server)
        await client.ping()
        redis_server.freeze()
        try:
            writing = asyncio.ensure_future(client.set("large", bytes(64 << 20)))
            await asyncio.sleep(0.1)
            async with asyncio.timeout(1):
                await close(client)
                await asyncio.wait([writing])
            writing.exception()
        finally:
            redis_server.thaw()

    with nothing_left_open():
        asyncio.run(scene())

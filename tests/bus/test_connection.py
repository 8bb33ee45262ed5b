"""Connections to Redis end with their client, whenever it is closed and whoever cancels whom."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis
from redis.asyncio import Redis

from bus.connection import OwnConnection, close, make_client, raise_refusal
from tests.support.redis_process import RedisProcess

TURNS = range(12)  # of the event loop: connecting, its handshake and a PING take eight


@pytest.fixture(scope="module", autouse=True)
def _what_was_there_before_is_not_collected() -> None:
    """A collection that looks at all that earlier files imported takes a quarter of a second."""
    gc.collect()
    gc.freeze()


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


async def ping_pooled(client: Redis) -> None:
    await client.ping()


async def ping_own(client: Redis) -> None:
    await OwnConnection(client).ask(("PING",), ("PING",))


Ping = Callable[[Redis], Coroutine[Any, Any, None]]
pings = pytest.mark.parametrize("ping", [ping_pooled, ping_own])


@pings
@pytest.mark.parametrize("count", TURNS)
def test_a_command_that_is_cancelled_leaves_no_connection(
    redis_server: RedisProcess, count: int, ping: Ping
) -> None:
    async def scene() -> None:
        client = client_of(redis_server)
        command = asyncio.ensure_future(ping(client))
        await turns(count)
        command.cancel()
        await asyncio.wait([command])
        await close(client)

    with nothing_left_open():
        asyncio.run(scene())


@pings
@pytest.mark.parametrize("count", TURNS)
def test_a_connection_that_comes_up_while_its_client_closes_is_closed(
    redis_server: RedisProcess, count: int, ping: Ping
) -> None:
    async def scene() -> None:
        client = client_of(redis_server)
        command = asyncio.ensure_future(ping(client))
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


@pytest.mark.parametrize("is_own", [False, True])
async def test_who_waits_for_an_answer_hears_that_the_connection_is_gone(
    redis_server: RedisProcess, is_own: bool
) -> None:
    client = client_of(redis_server)
    waiting: asyncio.Future[Any] = asyncio.ensure_future(
        OwnConnection(client).ask(("XREAD", "BLOCK", 5000, "STREAMS", "nothing", "$"))
        if is_own
        else client.xread({"nothing": "$"}, block=5000)
    )
    await client.ping()
    await asyncio.sleep(0.05)
    await close(client)
    with pytest.raises(redis.ConnectionError):
        async with asyncio.timeout(1):
            await waiting


async def test_a_connection_of_its_own_opens_again_when_the_server_closed_it(
    redis_server: RedisProcess,
) -> None:
    client = client_of(redis_server)
    own = OwnConnection(client)
    (first,) = await own.ask(("CLIENT", "ID"))
    await client.client_kill_filter(_id=first)
    await asyncio.sleep(0.05)
    (second,) = await own.ask(("CLIENT", "ID"))
    assert second > first, "no error: it was closed while nothing was asked"
    await close(client)


async def test_a_cancelled_answer_is_not_taken_for_that_of_the_next_command(
    redis_server: RedisProcess,
) -> None:
    client = client_of(redis_server)
    own = OwnConnection(client)
    waiting = asyncio.ensure_future(own.ask(("XREAD", "BLOCK", 5000, "STREAMS", "late", "$")))
    await asyncio.sleep(0.05)
    waiting.cancel()
    await asyncio.wait([waiting])
    await client.xadd("late", {"m": "1"})
    assert await own.ask(("ECHO", "mine"), ("ECHO", "too")) == [b"mine", b"too"]
    await close(client)


async def test_refusals_are_answers_and_the_first_one_is_raised(redis_server: RedisProcess) -> None:
    client = client_of(redis_server)
    own = OwnConnection(client)
    await own.ask(("SET", "text", "a"))
    answers = await own.ask(("MULTI",), ("SET", "kept", "b"), ("XLEN", "text"), ("EXEC",), ("GET", "kept"))
    assert answers[:3] == [b"OK", b"QUEUED", b"QUEUED"] and answers[4] == b"b"
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        raise_refusal(answers)
    raise_refusal([b"OK", [1, [b"x"]], None])
    answers = await own.ask(("MULTI",), ("XLEN",), ("EXEC",))
    with pytest.raises(redis.ResponseError, match="wrong number of arguments"):
        raise_refusal(answers)
    await close(client)


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

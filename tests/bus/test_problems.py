"""A Redis that cannot be used is told by name, with what to do and without its password."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from redis._parsers import BaseParser

from bench.common.service import free_port
from bus.client import connect
from bus.connection import public_url, translated
from bus.errors import (
    BadRedisUrl,
    BusUnavailable,
    NotRedis,
    RedisForbidden,
    RedisNotThere,
    RedisPassword,
    RedisProblem,
    RedisTooOld,
)
from bus.settings import RedisSettings
from tests.conftest import settings_of
from tests.support.redis_process import RedisProcess

Answer = Callable[[bytes], bytes | None]


async def problem_with(settings: RedisSettings, wait_s: float = 0.0) -> RedisProblem:
    bus = connect(settings)
    with pytest.raises(RedisProblem) as caught:
        await bus.start(wait_s)
    await bus.aclose()
    return caught.value


@asynccontextmanager
async def fake_server(answer: Answer) -> AsyncIterator[str]:
    """Answers every chunk it receives with `answer(chunk)`; None: says nothing. Yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if reply := answer(data):
                writer.write(reply)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"


def info_of(version: str) -> Answer:
    text = f"# Server\r\nredis_version:{version}\r\nrun_id:1\r\n".encode()
    return lambda data: b"$%d\r\n%s\r\n" % (len(text), text) if b"INFO" in data.upper() else b"+OK\r\n"


async def test_nobody_at_the_address() -> None:
    problem = await problem_with(settings_of(f"redis://:hush@127.0.0.1:{free_port()}/0"))
    assert isinstance(problem, RedisNotThere)
    assert "INSTAR_REDIS_URL" in str(problem)
    assert "hush" not in str(problem)


async def test_a_redis_that_comes_up_within_the_wait_is_used(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    server.kill()
    bus = connect(settings_of(server.url))
    starting = asyncio.create_task(bus.start(wait_s=10))
    await asyncio.sleep(0.3)
    server.start()
    await starting
    assert bus.up
    await bus.aclose()


async def test_a_server_that_is_too_old() -> None:
    async with fake_server(info_of("5.0.14")) as url:
        problem = await problem_with(settings_of(url), wait_s=5)
    assert isinstance(problem, RedisTooOld)
    assert "is version 5.0.14; 6.2 or newer is needed" in str(problem)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n",
        lambda _: b"\x00\xff\x00\xff\r\n",
        lambda _: b"+OK\r\n",
        lambda _: b"$5\r\nhello\r\n",
        lambda _: b":1\r\n",
    ],
    ids=["http", "noise", "ok to all", "other text", "numbers"],
)
async def test_a_server_that_is_no_redis(answer: Answer) -> None:
    async with fake_server(answer) as url:
        problem = await problem_with(settings_of(url))
    assert isinstance(problem, NotRedis)
    assert "does not answer as Redis does" in str(problem)


async def test_a_server_that_says_nothing() -> None:
    settings = settings_of("").model_copy(update={"socket_timeout_s": 0.3})
    async with fake_server(lambda _: None) as url:
        problem = await problem_with(settings.model_copy(update={"url": url}))
    assert isinstance(problem, RedisNotThere)


@pytest.mark.parametrize(
    ("credentials", "text"),
    [("", "asks for a password"), (":wrong-guess@", "refused"), ("nobody:wrong-guess@", "refused")],
)
async def test_a_missing_or_wrong_password(
    own_redis: Callable[..., RedisProcess], credentials: str, text: str
) -> None:
    server = own_redis("--requirepass", "right-one")
    problem = await problem_with(settings_of(f"redis://{credentials}127.0.0.1:{server.port}/0"), wait_s=5)
    assert isinstance(problem, RedisPassword)
    assert text in str(problem)
    assert "wrong-guess" not in str(problem)
    assert "right-one" not in str(problem)


async def test_the_right_password_is_taken_and_never_logged(
    own_redis: Callable[..., RedisProcess], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = own_redis("--requirepass", "right-one")
    bus = connect(settings_of(f"redis://:right-one@127.0.0.1:{server.port}/0"))
    await bus.start()
    server.kill()
    await asyncio.sleep(0.3)
    await bus._check()
    assert "lost Redis" in caplog.text
    assert "right-one" not in caplog.text
    await bus.aclose()


async def test_a_password_for_a_server_without_one(own_redis: Callable[..., RedisProcess]) -> None:
    server = own_redis()
    problem = await problem_with(settings_of(f"redis://:needless@127.0.0.1:{server.port}/0"))
    assert isinstance(problem, RedisPassword)
    assert "remove it" in str(problem)
    assert "needless" not in str(problem)


async def test_a_user_who_may_not_do_what_the_bus_needs(own_redis: Callable[..., RedisProcess]) -> None:
    server = own_redis("--user", *["narrow", "on", ">pw", "~*", "+@all", "-xadd", "-info"])
    url = f"redis://narrow:pw@127.0.0.1:{server.port}/0"
    problem = await problem_with(settings_of(url))
    assert isinstance(problem, RedisForbidden)
    assert "access list" in str(problem)


@pytest.mark.parametrize(
    "text",
    [
        "READONLY You can't write against a read only replica.",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "MISCONF Redis is configured to save RDB snapshots, but it is not able to persist on disk.",
        "BUSY Redis is busy running a script.",
        "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: "
        "-READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:3: @user_script: 3: -MISCONF Redis",
    ],
)
def test_a_refusal_that_passes_is_no_problem_of_settings_in_scripts_neither(text: str) -> None:
    with pytest.raises(BusUnavailable), translated():
        raise BaseParser.parse_error(text)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("text", ["BUSYGROUP Consumer Group name already exists", "ERR unknown command 'X'"])
def test_a_refusal_that_stays_is_a_problem(text: str) -> None:
    with pytest.raises(RedisProblem), translated():
        raise BaseParser.parse_error(text)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "url",
    ["", "localhost:6379", "http://127.0.0.1:6379", "redis://:se#cret@127.0.0.1:6379", "redis://h:port/0"],
)
def test_what_is_no_redis_url_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(BadRedisUrl) as caught:
        connect(RedisSettings.model_construct(url=url, prefix="p:", socket_timeout_s=1, block_ms=100))
    assert "redis://[:password@]host:port/db" in str(caught.value)
    assert "cret" not in str(caught.value)


def test_the_public_url_shows_no_password() -> None:
    assert public_url("redis://:secret@h:1/0") == "redis://:***@h:1/0"
    assert public_url("redis://user:secret@h:1/0?x=secret") == "redis://user:***@h:1/0"
    assert public_url("redis://h:1/0") == "redis://h:1/0"
    assert public_url("unix:///run/redis.sock") == "unix:///run/redis.sock"

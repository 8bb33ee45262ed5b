"""A link finds its Redis by Sentinels, and follows the primary to another server."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.common.service import free_port, wait_for
from bus.access import SELECTORS, Role
from bus.client import RedisProblem, Restart, connect
from bus.errors import BadRedisUrl, RedisNotThere
from bus.messages import Event
from bus.sentinels import addresses, url_at
from bus.settings import RedisSettings, Settings
from instar.redis_users import write_users
from instar.serve.redis_server import find_redis_server, server_version
from tests.support.health import healthy
from tests.support.redis_process import RedisProcess
from tests.support.sentinels import PRIMARY, sentinel_command

HAS_SELECTORS = (server_version(find_redis_server()) or (0, 0)) >= SELECTORS


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`watch(server, password="")` starts a Sentinel that watches it, and returns its port."""
    with ExitStack() as stack:

        def start(server: RedisProcess, password: str = "") -> int:
            port = free_port()
            command = sentinel_command(tmp_path, port, server.port, quorum=1, password=password)
            quiet = subprocess.DEVNULL
            process = stack.enter_context(subprocess.Popen(command, stdout=quiet, stderr=quiet))
            stack.callback(process.kill)
            wait_for("a Sentinel to answer", lambda: _answers(port))
            return port

        yield start


def asking(port: int) -> redis.Redis:
    return redis.Redis(port=port, socket_timeout=5, protocol=2, retry=Retry(NoBackoff(), 0))


def _answers(port: int) -> bool:
    try:
        with asking(port) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


def settings_at(*ports: int, primary: str = PRIMARY, password_file: str = "") -> RedisSettings:
    return RedisSettings(
        url=f"redis://{primary}/0",
        sentinels=[f"127.0.0.1:{port}" for port in ports],
        sentinel_password_file=password_file,
        prefix="test:",
        socket_timeout_s=2.0,
        block_ms=300,
    )


async def test_the_primary_is_found_by_any_sentinel_that_answers(
    own_redis: Callable[..., RedisProcess], watch: Callable[..., int]
) -> None:
    server = own_redis()
    there = watch(server)
    settings = settings_at(free_port(), there)
    async with connect(settings, source="test") as bus:
        async with bus.reader(bus.names.events, Event, start="0") as reader:
            await bus.event("policy_changed", "policy", "a test")
            ((_, event),) = await reader.read()
        assert event.reason == "a test"
    with server.client() as client:
        assert client.xlen("test:events") == 1
    with healthy._redis(Settings(redis=settings), "worker") as client:
        assert client.xlen("test:events") == 1
    bus = connect(settings_at(there, primary="another"))
    with pytest.raises(RedisNotThere, match=r"redis\.sentinels answers and watches a primary of this name"):
        await bus.start(0.3)
    await bus.aclose()


async def test_a_replica_is_refused_as_it_takes_no_writes(own_redis: Callable[..., RedisProcess]) -> None:
    first, second = own_redis(), own_redis()
    with second.client() as client:
        client.replicaof("127.0.0.1", first.port)
    bus = connect(RedisSettings(url=second.url, prefix="test:", socket_timeout_s=2.0, block_ms=300))
    with pytest.raises(RedisProblem, match="is a replica, which takes no writes"):
        await bus.start(0.3)
    await bus.aclose()


def test_the_file_of_the_sentinels_password_is_named_where_it_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadRedisUrl, match=r"redis\.sentinel_password_file .*nothing cannot be read"):
        connect(settings_at(26379, password_file=str(tmp_path / "nothing")))


def test_addresses_are_read_from_settings_and_put_into_urls() -> None:
    settings = RedisSettings(url="redis://instar", sentinels=["a.b:26379", "[::1]:5000"])
    assert addresses(settings) == [("a.b", 26379), ("::1", 5000)]
    assert url_at("rediss://u:p@Instar/2", "10.0.0.1", 7000) == "rediss://u:p@10.0.0.1:7000/2"
    assert url_at("redis://instar", "::1", 7000) == "redis://[::1]:7000"


@pytest.mark.slow
@pytest.mark.parametrize("has_users", [False, True], ids=["no users", "a user for each"])
async def test_a_link_follows_the_primary_and_tells_of_a_restart(
    own_redis: Callable[..., RedisProcess],
    watch: Callable[..., int],
    tmp_path: Path,
    has_users: bool,
) -> None:
    options, passwords = [], dict.fromkeys(("gateway", "replica", "sentinel"), "")
    if has_users:
        *_, listed = write_users(tmp_path, "test:", selectors=HAS_SELECTORS, servers=True)
        passwords = {name: (tmp_path / name / "password").read_text().strip() for name in passwords}
        options = ["--aclfile", str(listed), "--masteruser", "replica", "--masterauth", passwords["replica"]]
    first = own_redis(*options)
    second = own_redis(*options, "--replicaof", "127.0.0.1", str(first.port))
    port = watch(first, passwords["sentinel"])
    user: dict[str, Any] = {"username": "gateway", "password": passwords["gateway"]} if has_users else {}
    settings = settings_at(port)
    if has_users:
        url = "redis://{role}@instar/0"
        settings = settings.model_copy(
            update={"url": url, "password_file": f"{tmp_path}/{{role}}/password", "prefix": "test:"}
        )
    told: list[Restart] = []
    role: Role | None = "gateway" if has_users else None
    async with connect(settings, source="test", role=role) as bus:
        bus.on_restart(told.append)
        async with bus.reader(bus.names.events, Event, start="0") as reader:
            await bus.event("policy_changed", "policy", "before")
            assert [event.reason for _, event in await reader.read()] == ["before"]
            await _fail_over(port, second.port)
            async with asyncio.timeout(30):
                while not told:
                    await asyncio.sleep(0.05)
            await bus.wait_up()
            await bus.event("policy_changed", "policy", "after")
            seen: list[str] = []
            async with asyncio.timeout(30):
                while "after" not in seen:
                    seen += [event.reason for _, event in await reader.read()]
        assert not any(restart.data_lost for restart in told)
    with redis.Redis(port=second.port, protocol=2, **user) as client:
        assert client.info("replication")["role"] == "master" and client.xlen("test:events") == 2


async def _fail_over(port: int, second: int) -> None:
    """Order a failover as soon as the Sentinel knows the replica, and wait until it names it."""
    with asking(port) as sentinel:
        async with asyncio.timeout(60):
            while not any(one["master-link-status"] == "ok" for one in sentinel.sentinel_slaves(PRIMARY)):
                await asyncio.sleep(0.2)
            sentinel.sentinel_failover(PRIMARY)
            while sentinel.sentinel_get_master_addr_by_name(PRIMARY)[1] != second:
                await asyncio.sleep(0.1)

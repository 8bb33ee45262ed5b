"""The users of Redis, against a real server: what each may do, and what a missing right is told as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bus.access import ROLES, SELECTORS, Role, acl_lines, rights_needed
from bus.client import Bus, connect
from bus.errors import BadRedisUrl, RedisForbidden, RedisPassword, RedisProblem
from bus.messages import Demand
from bus.names import Names
from bus.settings import RedisSettings, Settings
from instar.redis_users import write_users
from instar.serve.redis_server import find_redis_server, server_version
from tests.support.health import healthy
from tests.support.redis_process import RedisProcess

Start = Callable[..., RedisProcess]
PREFIX = "cluster*1:"
HAS_SELECTORS = (server_version(find_redis_server()) or (0, 0)) >= SELECTORS


def secured(own_redis: Start, folder: Path) -> RedisProcess:
    write_users(folder, PREFIX, selectors=HAS_SELECTORS)
    return own_redis("--aclfile", str(folder / "redis" / "users.acl"))


def settings_of(server: RedisProcess, folder: Path) -> RedisSettings:
    url = f"redis://{{role}}@127.0.0.1:{server.port}/0"
    return RedisSettings(url=url, password_file=f"{folder}/{{role}}/password", prefix=PREFIX)


async def problem_with(settings: RedisSettings, role: Role) -> RedisProblem:
    with pytest.raises(RedisProblem) as caught:
        async with connect(settings, role=role):
            pass
    return caught.value


@pytest.mark.parametrize("role", ROLES)
async def test_each_role_gets_what_it_needs_and_no_more(role: Role, own_redis: Start, tmp_path: Path) -> None:
    server = secured(own_redis, tmp_path)
    async with connect(settings_of(server, tmp_path), role=role):
        pass
    password = (tmp_path / role / "password").read_text().strip()
    client = redis.Redis(
        port=server.port, username=role, password=password, protocol=2, retry=Retry(NoBackoff(), 0)
    )
    forbidden: list[tuple[str, ...]] = [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("KEYS", "*"),
        ("DEBUG", "SLEEP", "0"),
        ("ACL", "LIST"),
        ("SHUTDOWN",),
        ("REPLICAOF", "NO", "ONE"),
        ("GET", "another:boot"),
        ("GET", "clusterX1:boot"),  # the prefix's own star is no pattern
    ]
    with client:
        for command in forbidden:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*command)  # type: ignore[no-untyped-call]


def test_every_right_is_asked_for_in_a_form_that_redis_takes(own_redis: Start) -> None:
    """A refusal of another kind would hide a missing right."""
    with own_redis().client() as client:
        for role in ROLES:
            with client.pipeline(transaction=True) as pipe:
                for command in rights_needed(role, Names(PREFIX)):
                    pipe.execute_command(*command)
                pipe.execute(raise_on_error=False)  # raises if a command is not taken at all


async def test_a_role_may_not_do_anothers_work(own_redis: Start, tmp_path: Path) -> None:
    server = secured(own_redis, tmp_path)
    settings = settings_of(server, tmp_path)
    async with connect(settings, role="monitor") as monitor:
        assert await _is_forbidden(monitor, monitor.names.requests("demo@w0"))
        assert await _is_forbidden(monitor, monitor.names.control("w0"))
        assert not await _is_forbidden(monitor, monitor.names.metrics)
    async with connect(settings, role="worker") as worker:
        assert await _is_forbidden(worker, worker.names.orders)
        assert await _is_forbidden(worker, worker.names.requests("demo@w0")) == HAS_SELECTORS


async def _is_forbidden(bus: Bus, stream: str) -> bool:
    try:
        await bus.publish(stream, Demand(gateway="g", model="demo", tokens=0, count=1, at_ms=1))
    except RedisForbidden:
        return True
    return False


async def test_a_missing_right_is_one_sentence_at_start(own_redis: Start, tmp_path: Path) -> None:
    server = secured(own_redis, tmp_path)
    listed = tmp_path / "redis" / "users.acl"
    listed.write_text(listed.read_text().replace("+xtrim", "-xtrim"))
    server.kill()
    server.start()
    problem = await problem_with(settings_of(server, tmp_path), "gateway")
    assert isinstance(problem, RedisForbidden)
    text = str(problem)
    assert "forbids the gateway 'xtrim cluster*1:tokens:(any)" in text and "`instar keys redis`" in text
    assert "\n" not in text


async def test_a_redis_without_the_access_list_is_one_sentence(own_redis: Start, tmp_path: Path) -> None:
    server = own_redis("--requirepass", "another-one")
    write_users(tmp_path, PREFIX, selectors=False)
    problem = await problem_with(settings_of(server, tmp_path), "worker")
    assert isinstance(problem, RedisPassword)
    assert "access list that `instar keys redis` writes" in str(problem)
    assert (tmp_path / "worker" / "password").read_text().strip() not in str(problem)


async def test_a_file_without_a_password_is_named(own_redis: Start, tmp_path: Path) -> None:
    server = own_redis()
    settings = settings_of(server, tmp_path)
    with pytest.raises(BadRedisUrl, match=f"{tmp_path}/worker/password cannot be read: No such file"):
        connect(settings, role="worker")
    (tmp_path / "worker").mkdir()
    (tmp_path / "worker" / "password").write_text("\n")
    with pytest.raises(BadRedisUrl, match="is empty"):
        connect(settings, role="worker")


def test_passwords_stay_and_are_for_their_owner_alone(tmp_path: Path) -> None:
    write_users(tmp_path, PREFIX, selectors=True)
    before = {role: (tmp_path / role / "password").read_text() for role in ROLES}
    written = write_users(tmp_path, PREFIX, selectors=False)
    assert {role: (tmp_path / role / "password").read_text() for role in ROLES} == before
    assert len(set(before.values())) == len(ROLES)
    *secret, listed = written
    assert {path.stat().st_mode & 0o777 for path in secret} == {0o600}
    assert listed.stat().st_mode & 0o777 == 0o644
    assert not any(password.strip() in listed.read_text() for password in before.values())


def test_a_worker_of_redis_7_may_not_write_requests() -> None:
    (line,) = (
        one for one in acl_lines({"worker": "p"}, "instar:", selectors=True) if one.startswith("user worker")
    )
    parts = [part for part in line.split("(")[1:] if "+xadd" in part]
    assert parts and not any("requests:" in part for part in parts)
    assert "+xadd" not in line.split("(")[0]


def test_users_of_servers_are_listed_where_they_are_wanted(own_redis: Start, tmp_path: Path) -> None:
    def users(servers: bool) -> set[str]:
        *_, listed = write_users(tmp_path, PREFIX, selectors=HAS_SELECTORS, servers=servers)
        return {line.split()[1] for line in listed.read_text().splitlines()}

    assert users(servers=False) == {"default", *ROLES}
    assert users(servers=True) == {"default", *ROLES, "replica", "sentinel"}
    own_redis("--aclfile", str(tmp_path / "redis" / "users.acl"))  # takes the list, or does not start


@pytest.mark.parametrize(
    ("check", "told"),
    [
        ("worker", "is gone: the worker is stuck"),
        ("serving", "holds no lease"),
        ("monitor", "is empty"),
        ("controller", "no controller leads"),
    ],
)
def test_checks_of_health_need_no_other_right(
    own_redis: Start, tmp_path: Path, check: str, told: str
) -> None:
    server = secured(own_redis, tmp_path)
    settings = Settings(redis=settings_of(server, tmp_path))
    assert told in getattr(healthy, check)(settings)

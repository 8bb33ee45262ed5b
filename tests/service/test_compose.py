"""`docker compose up` for real: built, started, asked for a text, looked at, taken down."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from instar.serve.redis_server import free_port
from tests.support.paths import ROOT

BUILD_S = 1200
UP_S = 300

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_S + UP_S + 120)]


class Composed:
    """The service as a compose project of its own, on a free port."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR_")}
        self._env |= {"COMPOSE_PROJECT_NAME": f"instar-test-{os.getpid()}", "INSTAR_PORT": str(port)}

    def compose(self, *words: str, timeout_s: float = 60) -> str:
        done = subprocess.run(
            ("docker", "compose", *words),
            cwd=ROOT,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if done.returncode:
            raise AssertionError(f"docker compose {' '.join(words)}: {done.stdout[-4000:]}")
        return done.stdout

    def containers(self) -> dict[str, str]:
        """service -> container id, the stopped ones too."""
        rows = [json.loads(line) for line in self.compose("ps", "-a", "--format", "json").splitlines()]
        return {row["Service"]: row["ID"] for row in rows}

    def inspect(self, service: str, template: str) -> str:
        words = ("docker", "inspect", "--format", template, self.containers()[service])
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.strip()


@pytest.fixture(scope="module")
def service() -> Iterator[Composed]:
    if subprocess.run(("docker", "info"), capture_output=True, timeout=30, check=False).returncode:
        pytest.fail("no Docker engine answers: start one, and look at `docker info`")
    composed = Composed(free_port())
    try:
        composed.compose("build", timeout_s=BUILD_S)
        composed.compose("up", "-d", "--wait", "--wait-timeout", str(UP_S), timeout_s=UP_S + 30)
        yield composed
    except AssertionError as problem:
        raise AssertionError(f"{problem}\n{composed.compose('logs', '--tail', '40')}") from None
    finally:
        composed.compose("down", "--volumes", "--timeout", "10", timeout_s=120)


def test_a_text_is_completed_through_the_containers(service: Composed) -> None:
    model = httpx.get(f"{service.url}/v1/models", timeout=10).json()["data"][0]["id"]
    body = {"model": model, "prompt": "def add(a, b):\n", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_nothing_but_the_gateway_is_published_and_that_on_loopback(service: Composed) -> None:
    published = {
        name: service.inspect(name, "{{json .NetworkSettings.Ports}}") for name in service.containers()
    }
    assert [name for name, ports in published.items() if '"HostPort"' in ports] == ["gateway"]
    assert '"HostIp":"127.0.0.1"' in published["gateway"]


def test_no_container_runs_as_root_or_can_change_its_files(service: Composed) -> None:
    for name in service.containers():
        user, read_only = service.inspect(name, "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}}").split()
        assert user not in ("", "0", "root"), name
        assert read_only == "true", name


def test_keys_are_the_gateways_alone(service: Composed) -> None:
    for name in ("worker", "monitor", "controller"):
        given = set(json.loads(service.inspect(name, "{{json .Config.Env}}")))
        assert {"INSTAR_GATEWAY__API_KEYS=", "INSTAR_GATEWAY__ADMIN_KEYS="} <= given, name


def test_redis_answers_no_stranger(service: Composed) -> None:
    assert "NOAUTH" in service.compose("exec", "-T", "redis", "redis-cli", "ping")


def test_each_process_has_a_user_of_redis_and_its_own_password_alone(service: Composed) -> None:
    for role in ("gateway", "monitor", "controller", "worker"):
        mounts = json.loads(service.inspect(role, "{{json .Mounts}}"))
        secrets = {one["Name"]: one["RW"] for one in mounts if "-secret" in one.get("Name", "")}
        ((name, is_writable),) = secrets.items()
        assert name.endswith(f"_{role}-secret") and not is_writable
        assert service.compose("exec", "-T", role, "ls", "/secret").split() == ["password"]
    password = service.compose("exec", "-T", "worker", "cat", "/secret/password").strip()
    as_worker = ("redis-cli", "--no-auth-warning", "--user", "worker", "--pass", password)
    for command in (("flushall",), ("xadd", "instar:requests:x", "*", "m", "x"), ("get", "other:key")):
        assert "NOPERM" in service.compose("exec", "-T", "redis", *as_worker, *command)
    assert service.inspect("users", "{{.State.ExitCode}}") == "0"


def test_the_gateway_answers_status_within_its_container(service: Composed) -> None:
    state = json.loads(service.compose("exec", "-T", "gateway", "instar", "status", "--json"))
    assert [worker["state"] for worker in state["workers"]] == ["serving"]


def test_a_worker_that_ended_is_started_again(service: Composed) -> None:
    before = epochs(service)
    service.compose("exec", "-T", "worker", "sh", "-c", "kill 1")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not epochs(service) > before:
        time.sleep(1)
    assert epochs(service) > before
    test_a_text_is_completed_through_the_containers(service)


def epochs(service: Composed) -> list[int]:
    """Return the epochs of the workers that serve; a later start has a larger one."""
    state = json.loads(service.compose("exec", "-T", "gateway", "instar", "status", "--json"))
    return [worker["epoch"] for worker in state["workers"] if worker["state"] == "serving"]


def test_it_stops_within_its_grace_and_with_status_0(service: Composed) -> None:
    began = time.monotonic()
    service.compose("stop", timeout_s=120)
    assert time.monotonic() - began < 60
    for name in ("gateway", "monitor", "controller", "worker"):
        assert service.inspect(name, "{{.State.ExitCode}}") == "0", name

"""The whole service on a Redis whose users may do no more than the table of `bus.access` says."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import redis

from bench.common.service import Process, Service, wait_for
from bus.access import ROLES, SELECTORS
from instar.redis_users import write_users
from instar.serve.redis_server import find_redis_server, server_version

pytestmark = pytest.mark.timeout(600)

# No kernels are timed, and nobody loses a lease on a busy machine.
SETTINGS = {"WORKER__MAX_TP": "2", "WORKER__PRODUCT_KERNEL": "torch", "WORKER__LEASE_S": "8"}
LOOKER = "looker"  # the test's own password


class SecuredService(Service):
    """Each process has its own user; the test has another, who may do everything."""

    first_password: ClassVar[str] = LOOKER
    start_s: ClassVar[float] = 360.0

    def start_redis(self, port: int = 0) -> Process:
        selectors = (server_version(find_redis_server()) or (0, 0)) >= SELECTORS
        *_, listed = write_users(self.folder / "secrets", "instar:", selectors=selectors)
        with listed.open("a") as file:
            file.write(f"user {LOOKER} on >{self.first_password} ~* &* +@all\n")
        self.redis_args = ("--aclfile", str(listed))
        self.settings = {
            **self.settings,
            "REDIS__PASSWORD_FILE": f"{self.folder}/secrets/{{role}}/password",
        }
        return super().start_redis(port)

    @property
    def own_redis_url(self) -> str:
        return f"redis://{{role}}@127.0.0.1:{self.redis_port}/0"

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis(
            port=self.redis_port, username=LOOKER, password=self.first_password, socket_timeout=10
        )

    def redis_answers(self, port: int = 0) -> bool:
        with contextlib.suppress(redis.RedisError, OSError), self.redis as client:
            return bool(client.ping())
        return False

    def refused(self) -> list[dict[str, Any]]:
        """Return what Redis refused so far, and to whom."""
        with self.redis as client:
            return [
                {name: entry[name] for name in ("username", "object", "context", "reason")}
                for entry in client.acl_log()
            ]


def complete(service: Service, max_tokens: int = 8) -> str:
    body = {"model": "demo", "prompt": "def add(a, b):\n", "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{service.url()}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_requests_morphs_orders_and_a_death_need_no_other_right() -> None:
    with SecuredService(num_workers=2, settings=SETTINGS) as service:
        service.set_policy(mode="manual")
        text = complete(service)
        service.apply("demo@w0/swap", {"count": 1, "precision": "int8"})
        service.apply("transform", {"workers": ["w0", "w1"], "tp": 2})
        assert complete(service)
        service.apply("transform", {"workers": ["w0", "w1"], "tp": 1})
        service.processes["w1"].kill()
        wait_for("the death to be noticed", lambda: service.serving_workers() == {"w0"}, 60)
        assert len(complete(service)) >= 1 and text
        assert service.processes["w0"].terminate() == 0
        assert service.processes["gateway0"].terminate() == 0
        assert service.refused() == []
        _are_distinct(service.folder / "secrets")


def _are_distinct(folder: Path) -> None:
    assert len({(folder / role / "password").read_text() for role in ROLES}) == len(ROLES)

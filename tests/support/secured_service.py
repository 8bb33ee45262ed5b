"""The whole service with a user of Redis for each process, and encrypted links between the workers."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import httpx
import redis

from bench.common.service import Process, Service
from bus.access import SELECTORS
from instar.redis_users import write_users
from instar.serve.redis_server import find_redis_server, server_version
from tests.support.certificates import Authority

# No kernels are timed, and nobody loses a lease on a busy machine.
SETTINGS = {"WORKER__MAX_TP": "2", "WORKER__PRODUCT_KERNEL": "torch", "WORKER__LEASE_S": "4"}
LOOKER = "looker"  # the test's own password


class SecuredService(Service):
    """Each process has its own user; the test has another, who may do everything.

    Each worker has a certificate; `authorities` has those that sign for w0, w1, ...
    """

    first_password: ClassVar[str] = LOOKER
    start_s: ClassVar[float] = 360.0
    authorities: tuple[Authority, ...] = ()

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

    def add_worker(self, worker: str) -> Process:
        authority = self.authorities[int(worker[1:])]
        pair = authority.sign(worker)
        files = {"CERTFILE": pair.cert, "KEYFILE": pair.key, "CA_CERTS": authority.ca}
        self.settings = self.settings | {f"WORKER__SSL_{name}": file for name, file in files.items()}
        return super().add_worker(worker)

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

"""The real service on a primary and a replica of Redis, which three Sentinels watch."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import redis

from bench.common.service import Process, Service, free_port, wait_for
from tests.support.sentinels import PRIMARY, sentinel_command

NUM_SENTINELS, QUORUM = 3, 2


class SentinelService(Service):
    """A service with two servers of Redis and their Sentinels, all in `processes`; servers by `server_at`."""

    def start_redis(self, port: int = 0) -> Process:
        primary = super().start_redis(port)
        self.replica_port = free_port()
        super().start_redis(self.replica_port)
        with redis.Redis(port=self.replica_port, socket_timeout=10) as client:
            client.replicaof("127.0.0.1", self.redis_port)
        self.sentinel_ports = [free_port() for _ in range(NUM_SENTINELS)]
        for index, number in enumerate(self.sentinel_ports):
            command = sentinel_command(self.folder, number, self.redis_port, quorum=QUORUM)
            log = self.folder / f"sentinel{index}.log"
            name = f"sentinel{index}"
            self.processes[name] = Process(name, command, dict(os.environ), log).start()
        self.redis_url = f"redis://{PRIMARY}/0"
        self.settings["REDIS__SENTINELS"] = json.dumps([f"127.0.0.1:{one}" for one in self.sentinel_ports])
        self.wait_replicated()
        return primary

    @property
    def primary_port(self) -> int:
        """The port of the server that most Sentinels name; 0: they differ."""
        named = [self._named(port) for port in self.sentinel_ports]
        return next((port for port in named if named.count(port) > NUM_SENTINELS / 2), 0)

    def _named(self, sentinel_port: int) -> int:
        with contextlib.suppress(redis.RedisError), _asking(sentinel_port) as client:
            return int(client.sentinel_get_master_addr_by_name(PRIMARY)[1])
        return 0

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis(port=self.primary_port, socket_timeout=10)

    def server_at(self, port: int) -> Process:
        return self.processes["redis" if port == self.redis_port else f"redis-{port}"]

    def order_failover(self) -> None:
        """Have a Sentinel make the replica the primary, as before maintenance."""
        with _asking(self.sentinel_ports[0]) as client:
            client.sentinel_failover(PRIMARY)

    def wait_failed_over(self, before: int) -> None:
        wait_for("another primary", lambda: self.primary_port not in (0, before), 90)

    def wait_replicated(self) -> None:
        """Wait until the other server follows the primary, and all Sentinels know it and each other."""
        wait_for("the replica to follow", self._follows, 90)
        wait_for("the Sentinels", lambda: all(map(self._knows_all, self.sentinel_ports)), 60)

    def _follows(self) -> bool:
        primary = self.primary_port
        (other,) = {self.redis_port, self.replica_port} - {primary} if primary else {0}
        with contextlib.suppress(redis.RedisError), _asking(other) as client:
            found: dict[str, Any] = client.info("replication")
            at = found["role"], found.get("master_port"), found.get("master_link_status")
            return at == ("slave", primary, "up")
        return False

    def _knows_all(self, sentinel_port: int) -> bool:
        with contextlib.suppress(redis.RedisError), _asking(sentinel_port) as client:
            known: dict[str, Any] = client.sentinel_master(PRIMARY)
            replicas: list[dict[str, Any]] = client.sentinel_slaves(PRIMARY)
            is_up = any(not one["is_sdown"] and not one["is_disconnected"] for one in replicas)
            return known["num-other-sentinels"] == NUM_SENTINELS - 1 and is_up
        return False


def _asking(port: int) -> redis.Redis:
    return redis.Redis(port=port, socket_timeout=5, socket_connect_timeout=5, protocol=2)

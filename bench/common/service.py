"""The real service as processes that a benchmark or a test controls.

Nothing is mocked: `Service` starts Redis, gateways, monitor, controller and workers, is used over HTTP and
the bus, and ends them.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, TypeVar

import httpx
import psutil
import redis

from bench.common.results import DEMO, ROOT
from bus.codec import decode
from instar.serve.redis_server import find_redis_server

LEASE_S = 1.5  # short, so that a death is noticed within a test's patience
# Of benchmarks: workers do not lose their lease on a busy machine, and no request is refused.
STEADY = {
    "WORKER__DTYPE": "float32",
    "WORKER__LEASE_S": "10",
    "GATEWAY__MAX_QUEUE": "2048",
    "GATEWAY__QUEUE_TIMEOUT_S": "300",
    "LOG__LEVEL": "warning",
}

T = TypeVar("T")


def free_port() -> int:
    """Return a free port below those that the system gives to clients, so that no client takes it first.

    It is chosen at random, since tests run at the same time.
    """
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports is free")


def wait_for(what: str, true: Callable[[], Any], within_s: float = 30.0, every_s: float = 0.05) -> Any:
    """Poll until `true()` is truthy and return its value.

    Raises AssertionError that names `what` after `within_s`.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if value := true():
            return value
        time.sleep(every_s)
    raise AssertionError(f"waited {within_s} s for {what}")


@dataclass
class Process:
    """One child process and its log."""

    name: str
    args: list[str]
    env: dict[str, str]
    log: Path
    folder: Path = ROOT  # of the program that it runs
    popen: subprocess.Popen[bytes] | None = None

    def start(self) -> Process:
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(self.args, env=self.env, cwd=self.folder, stdout=log, stderr=log)
        return self

    @property
    def pid(self) -> int:
        assert self.popen is not None, f"{self.name} was never started"
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self.is_alive:
            assert self.popen is not None
            self.popen.kill()
            self.popen.wait(10)

    def terminate(self, within_s: float = 40.0) -> int:
        """Send SIGTERM and return the exit status; a stopped process is continued first."""
        assert self.popen is not None
        if self.is_alive:
            self.popen.send_signal(signal.SIGCONT)
            self.popen.terminate()
        return self.wait(within_s)

    def wait(self, within_s: float = 40.0) -> int:
        assert self.popen is not None
        return self.popen.wait(within_s)

    def tail(self, lines: int = 30) -> str:
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""
        )


@dataclass
class Service:
    """The whole service; a context in which its processes run.

    `settings` are INSTAR_* variables without the prefix, e.g. {"GATEWAY__MAX_QUEUE": "4"}. An exception in
    the context gets the last log lines of all processes as a note.
    """

    num_workers: int = 1
    num_gateways: int = 1
    settings: dict[str, str] = field(default_factory=dict)
    model: Path = DEMO
    redis_port: int = 0
    redis_url: str = ""  # address of Redis for the services; tests name a proxy's
    worker_redis_urls: dict[str, str] = field(default_factory=dict)
    append_only: bool = False
    redis_args: tuple[str, ...] = ()
    processes: dict[str, Process] = field(default_factory=dict)
    program: Path = ROOT  # folder of the release of which processes are started
    start_s: ClassVar[float] = 180.0  # within which workers must serve

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="instar-test-"))
        self.redis_port = self.redis_port or free_port()
        self.gateway_ports = [free_port() for _ in range(self.num_gateways)]
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, _: object, problem: BaseException | None, *__: object) -> None:
        if problem is not None:
            problem.add_note(self.logs())
        self.stop()

    # ---------------------------------------------------------------- start and stop

    def start(self) -> None:
        self.start_redis()
        self.redis_url = self.redis_url or self.own_redis_url
        for name in ("monitor", "controller"):
            self.add(name, name)
        for index in range(self.num_gateways):
            self.add_gateway(index)
        for index in range(self.num_workers):
            self.add_worker(f"w{index}")
        self.wait_ready(all_live=True)

    def stop(self) -> None:
        for process in reversed(list(self.processes.values())):
            if process.is_alive:
                process.signal(signal.SIGCONT)
            process.kill()

    def command(self, name: str, module: str) -> list[str]:
        """Return the words that start a process; others run it on another host."""
        return [sys.executable, "-m", module]

    def add(self, name: str, module: str, **env: str) -> Process:
        base = {k: v for k, v in os.environ.items() if not k.startswith("INSTAR_")}
        config = self.folder / "instar.toml"
        config.touch()
        ours = {
            "INSTAR_CONFIG": str(config),
            "INSTAR_REDIS__URL": self.redis_url,
            "INSTAR_WORKER__LEASE_S": str(LEASE_S),
            "INSTAR_WORKER__MEMORY_MB": "256",
            "INSTAR_WORKER__THREADS": "1",
            "INSTAR_LOG__LEVEL": "info",
        } | {f"INSTAR_{key}": value for key, value in self.settings.items()}
        log = self.folder / f"{name}.log"
        process = Process(name, self.command(name, module), base | ours | env, log, self.program)
        self.processes[name] = process
        return process.start()

    def add_gateway(self, index: int) -> Process:
        return self.add(
            f"gateway{index}",
            "gateway",
            INSTAR_GATEWAY__PORT=str(self.gateway_ports[index]),
            INSTAR_GATEWAY__ID=f"g{index}",
        )

    def add_worker(self, worker: str) -> Process:
        return self.add(
            worker,
            "worker",
            INSTAR_WORKER__ID=worker,
            INSTAR_WORKER__MODELS=f'["demo={self.model}"]',
            INSTAR_REDIS__URL=self.worker_redis_urls.get(worker, self.redis_url),
        )

    def start_redis(self, port: int = 0) -> Process:
        """Start the service's Redis, or a second, empty one on `port`."""
        name = f"redis-{port}" if port else "redis"
        args = [
            str(find_redis_server()),
            *("--port", str(port or self.redis_port), "--bind", "127.0.0.1", "--dir", str(self.folder)),
            *("--save", "", "--appendonly", "yes" if self.append_only else "no"),
            *("--maxmemory-policy", "noeviction", *self.redis_args),
        ]
        process = Process(name, args, dict(os.environ), self.folder / f"{name}.log").start()
        self.processes[name] = process
        wait_for("Redis to answer", lambda: self.redis_answers(port))
        return process

    # ---------------------------------------------------------------- looking at it

    @property
    def own_redis_url(self) -> str:
        return f"redis://127.0.0.1:{self.redis_port}/0"

    @property
    def redis(self) -> redis.Redis:
        return redis.Redis(port=self.redis_port, socket_timeout=10)

    def redis_answers(self, port: int = 0) -> bool:
        client = redis.Redis(port=port or self.redis_port, socket_timeout=5)
        with contextlib.suppress(redis.RedisError, OSError), client:
            return bool(client.ping())
        return False

    @property
    def pids(self) -> list[int]:
        """The ids of all processes that were started."""
        return [process.pid for process in self.processes.values()]

    def url(self, gateway: int = 0) -> str:
        return f"http://127.0.0.1:{self.gateway_ports[gateway]}"

    def get(self, path: str, gateway: int = 0) -> httpx.Response:
        return httpx.get(self.url(gateway) + path, timeout=10)

    def state(self, gateway: int = 0) -> dict[str, Any]:
        return dict(self.get("/admin/state", gateway).json())

    def serving_workers(self, gateway: int = 0) -> set[str]:
        with contextlib.suppress(httpx.HTTPError):
            return {w["id"] for w in self.state(gateway)["workers"] if w["state"] == "serving"}
        return set()

    def wait_ready(self, within_s: float = 0.0, *, all_live: bool = False) -> None:
        """Wait until every gateway knows all workers as serving. all_live: fail as soon as a process ends."""
        wanted = {name for name in self.processes if name.startswith("w")}
        for index in range(self.num_gateways):
            try:
                self._wait_serving(wanted, index, within_s or self.start_s, all_live)
            except AssertionError as problem:
                raise AssertionError(f"{problem}\n{self.logs()}") from None

    def _wait_serving(self, wanted: set[str], gateway: int, within_s: float, all_live: bool) -> None:
        def is_serving() -> bool:
            dead = sorted(process.name for process in self.processes.values() if not process.is_alive)
            if all_live and dead:
                raise AssertionError(f"{', '.join(dead)} ended before {sorted(wanted)} served")
            return wanted <= self.serving_workers(gateway)

        wait_for(f"{wanted} to serve", is_serving, within_s)

    def blocks_used(self, gateway: int = 0) -> float:
        """Return the KV blocks in use over all instances by their last report.

        Infinite if one has not reported.
        """
        used = [i["kv"]["used"] for i in self.state(gateway)["instances"]]
        return float("inf") if None in used else sum(used)

    def metric(self, name: str, gateway: int = 0) -> float:
        """Return the sum over the label sets of one Prometheus series; 0.0 if it has not appeared."""
        lines = self.get("/metrics", gateway).text.splitlines()
        return sum(float(x.rsplit(" ", 1)[1]) for x in lines if x.split("{")[0].split(" ")[0] == name)

    def messages(self, stream: str, kind: type[T], since_s: float = 0.0) -> list[T]:
        """Return the messages of a kind that a stream of the bus got since `since_s` (time.time())."""
        with self.redis as client:
            entries: Any = client.xrange(stream, min=int(since_s * 1000))
        found = [decode(fields[b"m"]) for _, fields in entries]
        return [message for message in found if isinstance(message, kind)]

    # ---------------------------------------------------------------- changing it

    def set_policy(self, **values: Any) -> None:
        """Change the policy; `values` are fields of PUT /admin/policy."""
        httpx.put(f"{self.url()}/admin/policy", json=values, timeout=20).raise_for_status()

    def apply(self, what: str, body: dict[str, Any], tries: int = 10) -> dict[str, Any]:
        """Order a morph at /admin/instances/`what` and return it once it is applied.

        A morph that the controller began before is in the way for a moment, so a refused order is repeated
        every half second. Raises RuntimeError after `tries`.
        """
        for _ in range(tries):
            answer = httpx.post(f"{self.url()}/admin/instances/{what}?wait=true", json=body, timeout=60)
            morph: dict[str, Any] = answer.json()
            if morph.get("state") == "applied":
                return morph
            time.sleep(0.5)
        raise RuntimeError(f"{what} {body} was not applied: {answer.status_code} {answer.text}")

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.tail()}" for p in self.processes.values())

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add the last log lines of all processes to an assertion that fails."""
        try:
            yield
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n{self.logs()}") from problem


class EmptyService(Service):
    """A service whose workers start without a model and wait for what is deployed."""

    def add_worker(self, worker: str) -> Process:
        env = {"INSTAR_WORKER__ID": worker, "INSTAR_WORKER__MODELS": "[]"}
        return self.add(worker, "worker", INSTAR_WORKER__MAY_BE_EMPTY="true", **env)


class HasProcesses(Protocol):
    """The subject of a measurement: one or more processes."""

    @property
    def pids(self) -> list[int]: ...


class OtherPrograms:
    """Measures the cores that programs other than the service and this process, its client, keep busy."""

    def __init__(self, service: HasProcesses) -> None:
        self._service = service
        self._began_s = time.perf_counter()
        self._before_s = self._cpu_seconds()

    def cores(self) -> float:
        """Return the mean number of cores since this object was made."""
        return (self._cpu_seconds() - self._before_s) / (time.perf_counter() - self._began_s)

    def _cpu_seconds(self) -> float:
        times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *self._service.pids)]
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - machine.iowait - machine.guest - machine.guest_nice
        return float(busy - sum(spent.user + spent.system for spent in times))

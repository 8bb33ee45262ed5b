"""A real redis-server under a test's control: killed, stopped, restarted, filled."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from bench.common.service import free_port
from instar.serve.redis_server import find_redis_server

START_LIMIT_S = 10.0


class RedisProcess:
    """Listens on a free port of 127.0.0.1. The port stays the same over restarts."""

    def __init__(self, folder: Path, *options: str, append_only: bool = False) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = (*options, "--appendonly", "yes" if append_only else "no")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the server was not started"
        return self._process

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    def start(self) -> None:
        """Returns when the server answers."""
        program = str(find_redis_server())
        where = ("--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self._folder))
        command = [program, *where, "--save", "", *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_LIMIT_S
        while not self._answers():
            assert self._process.poll() is None, f"redis-server ended with {self._process.returncode}"
            assert time.monotonic() < deadline, f"redis-server did not answer within {START_LIMIT_S} s"
            time.sleep(0.01)

    def _answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False

    def client(self) -> redis.Redis:
        """A plain blocking client of the same server, for arranging and looking."""
        once = Retry(NoBackoff(), 0)
        return redis.Redis(host="127.0.0.1", port=self.port, socket_timeout=10, protocol=2, retry=once)

    def kill(self) -> None:
        """SIGKILL, as a crash or the out-of-memory killer does it."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

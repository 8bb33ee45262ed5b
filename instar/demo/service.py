"""The service of the demo: `instar serve` as a process that ends with this one, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final

import httpx
import psutil

from instar.errors import InputError, ServerError
from instar.output.progress import progress_line
from instar.output.tables import MIB
from instar.serve.child import Child
from instar.serve.programs import DEMO_MODEL

NUM_WORKERS: Final = 2
MEMORY_MB: Final = 34  # of a worker: the weights take 27.6 MB
NEEDED_MIB: Final = 1500  # all took 1,101 (PSS) in the last scene; the rest is for compiling kernels
START_S: Final = 300.0  # the first start compiles kernels
STOP_S: Final = 20.0
REST_S: Final = 60.0
POLL_S: Final = 0.25
ANSWER_S: Final = 45.0
CGROUP: Final = Path("/sys/fs/cgroup")

SETTINGS: Final = """\
# Written by `instar demo`. `instar serve --config` with this file starts the same service.
[serve]
workers = {workers}

[gateway]
port = {port}
queue_timeout_s = 300
drain_timeout_s = 2

[worker]
models = ["demo={model}"]
device = "cpu"
dtype = "float32"
memory_mb = {memory_mb}     # 27.6 MB are weights: a burst fills what is left for the KV cache
page_kib = 16
max_tp = 2         # both workers may become one instance
threads = 1
prefix_cache = false   # both runs send the same prompts; the second would find those of the first
lease_s = 10
drain_timeout_s = 2

[log]
level = "warning"
"""


class DemoService:
    """The service. `running` is the context in which it runs; `folder` gets its settings and its log."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.settings_path, self.log_path = folder / "instar.toml", folder / "service.log"
        self._last_lines: deque[str] = deque(maxlen=5)
        self._child: Child | None = None
        self._log: IO[str] | None = None
        settings = SETTINGS.format(workers=NUM_WORKERS, port=port, model=DEMO_MODEL, memory_mb=MEMORY_MB)
        try:
            self.settings_path.write_text(settings)
            self._log = self.log_path.open("w")
        except OSError as error:
            raise InputError(f"--out {folder}: cannot be written: {error.strerror}") from error

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[httpx.AsyncClient]:
        """Run the processes, and yield a client of the gateway. All have ended when the block is left."""
        argv = (sys.executable, "-P", "-m", "instar", "serve", "--config", str(self.settings_path))
        try:
            self._child = await Child.start(argv, own_environment(os.environ), b"", self._on_line)
            # Proxies of the environment are for other hosts.
            async with httpx.AsyncClient(base_url=self.url, trust_env=False) as client:
                yield client
        finally:
            await self._stop()
            if self._log is not None:
                self._log.close()

    async def ended(self) -> str:
        """Wait until the service ends by itself. Returns what it said last."""
        if self._child is None:
            raise AssertionError("the service was never started")
        status = await self._child.wait()
        said = next((line for line in reversed(self._last_lines) if line.strip()), "it said nothing")
        return f"the service ended by itself with status {status}: {said}; its log is {self.log_path}"

    def hurry(self) -> None:
        """End the service at once if it is being stopped."""
        if self._child is not None:
            self._child.signal(signal.SIGTERM)

    async def _stop(self) -> None:
        if self._child is None or not self._child.is_running:
            return
        self._child.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._child.wait()
        except TimeoutError:
            self._child.signal(signal.SIGKILL)  # the kernel kills its processes with it
            await self._child.wait()

    def _on_line(self, line: str) -> None:
        self._last_lines.append(line)
        if self._log is not None and not self._log.closed:
            with contextlib.suppress(OSError):  # a full disk does not end the demo
                self._log.write(line + "\n")
                self._log.flush()


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without settings, which are for another service."""
    return {name: value for name, value in environ.items() if not name.startswith("INSTAR_")}


# ------------------------------------------------------------------------------------- requests


async def ask(
    client: httpx.AsyncClient, method: str, path: str, body: Any = None, within_s: float = ANSWER_S
) -> dict[str, Any]:
    """Return the JSON of an answer. Raises ServerError."""
    try:
        answer = await client.request(method, path, json=body, timeout=within_s)
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ServerError(f"{method} {path} of the demo's service failed: {error}") from error
    if not answer.is_success or not isinstance(found, dict):
        raise ServerError(f"{method} {path} of the demo's service: {answer.status_code}: {answer.text[:300]}")
    return found


async def until(
    client: httpx.AsyncClient,
    what: str,
    is_so: Callable[[dict[str, Any]], bool],
    within_s: float,
    shown: Callable[[dict[str, Any]], str] = lambda state: "",
) -> dict[str, Any]:
    """Poll the state until `is_so`, and return it. The text `shown` is progress. Raises ServerError."""
    began = time.monotonic()
    state: dict[str, Any] = {}
    with progress_line("") as line:
        while time.monotonic() < began + within_s:
            with contextlib.suppress(ServerError):  # it is starting, or busy
                state = await ask(client, "GET", "/admin/state")
                if is_so(state):
                    return state
            line.show(f"{time.monotonic() - began:.0f} s: {shown(state) or what}")
            await asyncio.sleep(POLL_S)
    raise ServerError(f"waited {within_s:g} s for {what}, in vain; is the machine busy with something else?")


def is_complete(state: dict[str, Any]) -> bool:
    """Return True if every worker serves with its shape reported."""
    instances = state.get("instances") or []
    ready = [one for one in instances if one["state"] == "serving" and one["kv"]["blocks"]]
    return len(ready) == NUM_WORKERS


def loading_text(state: dict[str, Any]) -> str:
    """Return what the workers do while they start, "" before they have joined."""
    workers = state.get("workers") or []
    return ", ".join(f"{one['id']}: {one.get('progress') or one.get('state')}" for one in workers)


def is_at_rest(state: dict[str, Any]) -> bool:
    """Return True if nothing runs or waits, and all layers are at full precision on workers of their own."""
    return is_complete(state) and all(
        one["running"] == one["waiting"] == one["kv"]["used"] == one["layers_below_full"] == 0
        and one["tp"] == 1
        for one in state["instances"]
    )


# ------------------------------------------------------------------------------------- memory


def available_mib(cgroup: Path = CGROUP) -> float:
    """Return the memory that is left on this machine, or in this container (cgroup v2) if that is less."""
    left: int = psutil.virtual_memory().available
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((cgroup / "memory.max").read_text())  # "max" is no limit
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        left = min(left, limit - used + int(stat["inactive_file"]))
    return left / MIB


def memory_problem(mib: float) -> str:
    """Return why the demo cannot run with so much memory available, "" if it can."""
    if mib >= NEEDED_MIB:
        return ""
    return (
        f"{mib:.0f} MiB of memory are available and the demo needs {NEEDED_MIB}, for {NUM_WORKERS} workers, "
        "Redis and three others; end other programs, or start one worker: `instar serve --memory-mb 40`"
    )

"""The contenders of `bench.peers`: each is started for one measurement and ended after it.

The gateway, the workers, llama.cpp's server and transformers all may use every core. Instar runs as
`instar serve` runs it, with memory for all requests at once and no policy, so that all weights stay in
float32.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx

from bench.common.load import MODEL
from bench.common.machine import num_cores
from bench.common.processes import Children
from bench.common.service import STEADY, Process, Service, free_port, wait_for
from bench.peers.gguf_file import GGUF
from bench.peers.transformers_process import NAME, answer_calls
from bench.peers.workloads import (
    AT_ONCE,
    ONE_BY_ONE,
    PATIENCE_S,
    WORKLOADS,
    PeerLoad,
    WorkloadValues,
    measure_server,
    warm_up,
)

INSTAR: Final = "Instar"
LLAMA: Final = "llama.cpp"
TRANSFORMERS: Final = "transformers"
MEMORY_MB: Final = 4096  # memory of Instar: the largest weights and the KV of 64 long requests
SLACK_TOKENS: Final = 64  # spare context of llama.cpp for each request
START_S: Final = 600.0  # the first start of a worker compiles kernels


@dataclass(frozen=True, slots=True)
class Running:
    """A contender that has been warmed up. `measure` runs the workload of a name."""

    pids: list[int]
    measure: Callable[[str], WorkloadValues]


@dataclass(frozen=True, slots=True)
class Contender:
    """A contender; `start` runs it with the model of a folder for as long as the context lasts."""

    name: str
    start: Callable[[Path, PeerLoad], AbstractContextManager[Running]]
    workloads: Sequence[str] = WORKLOADS


def contenders(llama_server: Path | None) -> list[Contender]:
    """Return all contenders. llama_server: the program; None: without llama.cpp."""
    found = [Contender(INSTAR, run_instar)]
    if llama_server is not None:
        found.append(Contender(LLAMA, partial(run_llama_server, llama_server)))
    return [*found, Contender(TRANSFORMERS, run_transformers, (AT_ONCE, ONE_BY_ONE))]


class PeerService(Service):
    """Instar with one worker that uses all cores."""

    start_s = START_S


@contextmanager
def run_instar(folder: Path, load: PeerLoad) -> Iterator[Running]:
    settings = STEADY | {"WORKER__THREADS": "0", "WORKER__MEMORY_MB": str(MEMORY_MB)}
    with PeerService(model=folder, settings=settings) as service:
        service.set_policy(mode="manual")
        yield _running_server(service.url(), service.pids, load)


@contextmanager
def run_llama_server(program: Path, folder: Path, load: PeerLoad) -> Iterator[Running]:
    """Run llama.cpp's server on the folder's GGUF file, with its default KV cache.

    Raises RuntimeError with the end of its log if it ends before it serves.
    """
    port, threads = free_port(), str(num_cores())
    tokens = load.num_at_once * (load.longest + SLACK_TOKENS)
    args = [
        str(program),
        *("--model", str(folder / GGUF), "--alias", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads),
        *("--parallel", str(load.num_at_once), "--ctx-size", str(tokens)),
        *("--no-cache-prompt", "--cache-ram", "0"),  # no prompt comes twice
    ]
    with tempfile.TemporaryDirectory(prefix="instar-bench-") as logs:
        server = Process("llama-server", args, dict(os.environ), Path(logs) / "log").start()
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for("llama-server to serve", lambda: _serves(server, url), START_S)
            yield _running_server(url, [server.pid], load)
        except BaseException as problem:
            problem.add_note(server.tail())
            raise
        finally:
            server.kill()


def _serves(server: Process, url: str) -> bool:
    if not server.is_alive:
        raise RuntimeError(f"llama-server ended with status {server.wait()}:\n{server.tail()}")
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def _running_server(url: str, pids: list[int], load: PeerLoad) -> Running:
    warm_up(url, load)
    return Running(pids, lambda workload: measure_server(url, workload, load))


@contextmanager
def run_transformers(folder: Path, load: PeerLoad) -> Iterator[Running]:
    with Children(answer_calls, [(folder, load, num_cores())], timeout_s=PATIENCE_S) as children:
        children.ready(START_S)

        def measure(workload: str) -> WorkloadValues:
            measured: WorkloadValues = children.ask(0, NAME, workload)
            return measured

        yield Running([process.pid for process in children.processes], measure)


def version_of(llama_server: Path) -> str:
    """Return the version that llama-server prints.

    Raises ValueError that says what to do if it is no program or does not run.
    """
    build = "build it with `cmake --build build --target llama-server` in llama.cpp and name its path"
    if not llama_server.is_file() or not os.access(llama_server, os.X_OK):
        raise ValueError(f"{llama_server} is not a program that can be run; {build}")
    done: Any = None
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [llama_server, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    said = [] if done is None else f"{done.stdout}\n{done.stderr}".split("\n")
    versions = [line.removeprefix("version:").strip() for line in said if line.startswith("version:")]
    if not versions:
        last = next((line for line in reversed(said) if line.strip()), "nothing")
        raise ValueError(f"{llama_server} --version does not print a version, but {last!r}; {build}")
    return versions[0]

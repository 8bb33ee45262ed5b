"""Idle cost: CPU seconds per minute of the whole service while it does nothing. Bar: under 2.

    python -m bench.gateway idle [--seconds 60] [--model DIR]

Starts `instar serve` on a free port, waits until it is ready and has settled, then adds up the CPU time of
its processes, Redis and the supervisor included, while there is no request. The baseline is the same minute
of an embedded Redis alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from bench.common.redis import running_redis
from bench.common.results import conclude, parser, say
from instar.serve.redis_server import free_port

BAR_S = 2.0
READY_S = 180.0
SETTLE_S = 5.0


def main() -> int:
    args = _arguments()
    with serving(*args.model) as (pid, _):
        time.sleep(SETTLE_S)
        per_process = cpu_seconds_a_minute(tree(pid), args.seconds)
    with running_redis() as (_, redis_pid):
        baseline = sum(cpu_seconds_a_minute(tree(redis_pid), min(args.seconds, 20)).values())
    return report(per_process, baseline, args.seconds)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="how long to watch [60]")
    options.add_argument("--model", action="append", default=[], help="model folder [the demo model]")
    return options.parse_args()


@contextmanager
def serving(*words: str, **settings: str) -> Iterator[tuple[int, str]]:
    """Run `instar serve` as a user starts it; yield its process id and address once it is ready.

    `words` are models and flags; `settings` are INSTAR_* variables without the prefix, the only ones it sees.
    Raises RuntimeError if the service is not ready in time.
    """
    port = free_port()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR_")}
    environ |= {f"INSTAR_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "instar", "serve", *words, "--port", str(port)]
    with subprocess.Popen(command, env=environ, stdout=sys.stderr, start_new_session=True) as service:
        try:
            _wait_ready(port)
            yield service.pid, f"http://127.0.0.1:{port}"
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait(60)


def _wait_ready(port: int) -> None:
    """Wait until the service is ready. Raises RuntimeError if it is not ready in time."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the service was not ready after {READY_S:g} s")


def tree(pid: int) -> dict[str, psutil.Process]:
    """Return a process and all below it, by what each is."""
    root = psutil.Process(pid)
    return {name_of(process): process for process in [root, *root.children(recursive=True)]}


def name_of(process: psutil.Process) -> str:
    """Return `gateway` for `python -m gateway`, otherwise the name of the program."""
    words = process.cmdline()
    if "-m" in words:
        module = words[words.index("-m") + 1]
        return "supervisor" if module == "instar" else f"{module} ({process.pid})"
    return f"{process.name()} ({process.pid})"


def cpu_seconds_a_minute(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    before = {name: spent_s(process.pid) for name, process in processes.items()}
    time.sleep(seconds)
    return {name: (spent_s(process.pid) - before[name]) * 60 / seconds for name, process in processes.items()}


def spent_s(pid: int) -> float:
    """Return the CPU seconds of all threads, from the scheduler's nanoseconds.

    The usual counters may go by ticks of 10 ms, which miss a process that wakes for a moment now and then.
    """
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def report(per_process: dict[str, float], baseline: float, seconds: float) -> int:
    total = sum(per_process.values())
    ratio = total / baseline
    lines = [f"{name:<28}{cost:8.3f} CPU s a minute" for name, cost in per_process.items()]
    lines.append(f"{'all':<28}{total:8.3f} CPU s a minute (bar: under {BAR_S:g}), watched for {seconds:g} s")
    lines.append(
        f"{'Redis alone (baseline)':<28}{baseline:8.3f} CPU s a minute; ours is {ratio:.1f} times it"
    )
    result = {
        "bench": "idle",
        "cpu_seconds_per_minute": round(total, 3),
        "bar": BAR_S,
        "is_met": total < BAR_S,
        "redis_alone": round(baseline, 3),
        "ratio": round(ratio, 1),
        "processes": {name.split(" ")[0]: round(cost, 3) for name, cost in per_process.items()},
        "seconds": seconds,
    }
    say("\n".join(lines))
    return conclude(result, is_kept=True)

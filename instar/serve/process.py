"""One process of the service: started, shown, restarted when it dies, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TextIO

from bus.settings_sources import variable_of
from instar.serve.child import Child

CONFIGURATION_ERROR = 2  # the exit status of every service with bad settings
GPU_LOST = 3  # that of a worker whose GPU computes nothing more
CANNOT_EXECUTE = 126  # the status that shells use
NAME_WIDTH = 10

Role = Literal["redis", "gateway", "monitor", "controller", "worker"]
ExitReason = Literal["stopped", "left", "misconfigured"]


class Console:
    """Writes whole lines of `instar serve` and of its processes. Goes on without its terminal."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()

    def say(self, text: str) -> None:
        self._write(f"\033[1m{text}\033[0m" if self._is_terminal else text)

    def child_line(self, name: str, text: str) -> None:
        label = f"{name:<{NAME_WIDTH}}|"
        self._write(f"\033[2m{label}\033[0m {text}" if self._is_terminal else f"{label} {text}")

    def _write(self, line: str) -> None:
        try:
            self._out.write(line + "\n")
            self._out.flush()
        except UnicodeEncodeError:
            self._write(line.encode("ascii", "replace").decode())
        except (OSError, ValueError):  # EPIPE, EIO of a closed terminal, a closed file
            pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program to run. It is killed `stop_timeout_s` after it was asked to end."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    stop_timeout_s: float
    stdin: bytes = b""
    is_quiet: bool = False  # True: lines are shown only after it died


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses of first_s, 2 * first_s, ... longest_s. A run of longest_s or more resets the count."""

    first_s: float
    longest_s: float

    def pause_s(self, deaths_in_a_row: int) -> float:
        return float(min(self.longest_s, self.first_s * 2 ** min(deaths_in_a_row - 1, 32)))


class SupervisedProcess:
    """Runs a program again and again until it is stopped, leaves, or refuses its settings."""

    def __init__(
        self, program: Program, backoff: Backoff, console: Console, on_death: Callable[[], None]
    ) -> None:
        self.program = program
        self.last_lines: deque[str] = deque(maxlen=20)
        self.last_death = 0.0  # wall-clock seconds, as the epochs of workers
        self.exit_reason: ExitReason | None = None  # None: it runs, or is started again
        self._on_death = on_death
        self._backoff = backoff
        self._console = console
        self._child: Child | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> ExitReason:
        deaths, name, loop = 0, self.program.name, asyncio.get_running_loop()
        while not self._stopping.is_set():
            started = loop.time()
            status = await self._run_once()
            if self._stopping.is_set():
                break
            if status == 0 and self.program.role == "worker":  # the worker was drained
                self._console.say(f"{name} left (exit status 0)")
                return "left"
            if status == CONFIGURATION_ERROR:
                self._console.say(f"{name} cannot run with these settings; not started again")
                return "misconfigured"
            if status == GPU_LOST and self.program.role == "worker":
                self._require_gpu()
            self.last_death = time.time()
            self._on_death()
            deaths = 1 if loop.time() - started >= self._backoff.longest_s else deaths + 1
            await self._pause_after(status, self._backoff.pause_s(deaths))
        return "stopped"

    def _require_gpu(self) -> None:
        """Start the worker on a GPU from now on: one that finds none would serve on the CPU instead."""
        env = {variable_of("worker.device"): "cuda", **self.program.env}
        self.program = replace(self.program, env=env)

    async def stop(self, at_once: asyncio.Event) -> None:
        """Send SIGTERM, and SIGKILL after the timeout or when `at_once` is set. Returns when it has ended."""
        self._stopping.set()
        child, program = self._child, self.program
        if child is None or not child.is_running:
            return
        child.signal(signal.SIGTERM)
        ended = asyncio.create_task(child.wait())
        hurried = asyncio.create_task(at_once.wait())
        both = {ended, hurried}
        await asyncio.wait(both, timeout=program.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not ended.done():
            why = "second Ctrl-C" if at_once.is_set() else f"still running after {program.stop_timeout_s:g} s"
            self._console.say(f"killed {program.name} ({why})")
            child.signal(signal.SIGKILL)
        await ended

    async def _run_once(self) -> int:
        """Return the exit status, negative for a signal."""
        program = self.program
        try:
            self._child = child = await Child.start(program.argv, program.env, program.stdin, self._on_line)
        except OSError as error:  # no memory or no process left: try again as after a death
            self._console.say(f"{program.name} cannot be started: {error}")
            return CANNOT_EXECUTE
        if self._stopping.is_set():  # asked to end while it was being started
            child.signal(signal.SIGKILL)
        return await child.wait()

    def _on_line(self, line: str) -> None:
        self.last_lines.append(line)
        if not self.program.is_quiet:
            self._console.child_line(self.program.name, line)

    async def _pause_after(self, status: int, pause_s: float) -> None:
        name = self.program.name
        if self.program.is_quiet and status != -signal.SIGKILL:  # a killed process wrote no reason
            for line in self.last_lines:
                self._console.child_line(name, line)
        self._console.say(f"{name} died ({describe_exit(status)}); starting it again in {pause_s:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()


def describe_exit(status: int) -> str:
    """Return "killed by SIGKILL" for -9, "exit status 3" for 3."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"

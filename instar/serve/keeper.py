"""Keeps one process running: starts it, passes its lines on, starts it again when it died, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from instar.serve.child import Child
from instar.serve.console import Console

CONFIGURATION_ERROR = 2  # the exit status with which every service of ours answers bad settings
CANNOT_EXECUTE = 126  # as shells have it

Role = Literal["redis", "gateway", "monitor", "controller", "worker"]
Outcome = Literal["stopped", "left", "misconfigured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """`patience_s` is the time between being asked to end and being killed."""

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str]
    patience_s: float
    stdin: bytes = b""
    is_quiet: bool = False  # its lines are shown only when it died


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses first_s, 2 * first_s, ... longest_s. A run of longest_s or more starts the count anew."""

    first_s: float
    longest_s: float

    def pause_s(self, deaths_in_a_row: int) -> float:
        return float(min(self.longest_s, self.first_s * 2 ** min(deaths_in_a_row - 1, 32)))


class Keeper:
    """One program. `run` returns when it was stopped, left by itself, or cannot run with these settings."""

    def __init__(
        self, program: Program, backoff: Backoff, console: Console, on_death: Callable[[], None]
    ) -> None:
        self.program = program
        self.last_lines: deque[str] = deque(maxlen=20)
        self.last_death = 0.0  # wall-clock seconds, as the epochs of workers are
        self._on_death = on_death
        self._backoff = backoff
        self._console = console
        self._child: Child | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> Outcome:
        deaths = 0
        while not self._stopping.is_set():
            started = asyncio.get_running_loop().time()
            status = await self._run_once()
            if self._stopping.is_set():
                break
            if status == 0 and self.program.role == "worker":  # drained on an operator's word
                self._console.say(f"{self.program.name} left (exit status 0)")
                return "left"
            if status == CONFIGURATION_ERROR:
                self._console.say(f"{self.program.name} cannot run with these settings; not started again")
                return "misconfigured"
            lived_s = asyncio.get_running_loop().time() - started
            self.last_death = time.time()
            self._on_death()
            deaths = 1 if lived_s >= self._backoff.longest_s else deaths + 1
            await self._pause_after(status, self._backoff.pause_s(deaths))
        return "stopped"

    async def stop(self, hurry: asyncio.Event) -> None:
        """SIGTERM, then SIGKILL once the patience is over or `hurry` is set. Returns when it is gone."""
        self._stopping.set()
        child = self._child
        if child is None or not child.is_running:
            return
        child.signal(signal.SIGTERM)
        ended = asyncio.create_task(child.wait())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait(
            {ended, hurried}, timeout=self.program.patience_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        if not ended.done():
            why = "asked to hurry" if hurry.is_set() else f"still there after {self.program.patience_s:g} s"
            self._console.say(f"{self.program.name} is killed: {why}")
            child.signal(signal.SIGKILL)
        await ended

    async def _run_once(self) -> int:
        """Exit status, negative for a signal."""
        program = self.program
        try:
            self._child = child = await Child.start(program.argv, program.env, program.stdin, self._on_line)
        except OSError as error:  # no memory or no process left for now: as good as a death
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
        if self.program.is_quiet and status != -signal.SIGKILL:  # who is killed had no time for last words
            for line in self.last_lines:
                self._console.child_line(self.program.name, line)
        name = self.program.name
        self._console.say(f"{name} died ({describe_exit(status)}); starting it again in {pause_s:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._stopping.wait()


def describe_exit(status: int) -> str:
    """-9 -> "killed by SIGKILL", 3 -> "exit status 3"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"

"""The processes of one machine, ended in the order that loses nothing.

The gateway ends first, while its streams can still be served. The workers follow, then the monitor and the
controller. Redis ends last, since all others use it to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence

from instar.serve.process import CONFIGURATION_ERROR, Backoff, Console, Program, Role, SupervisedProcess

STOP_ORDER: tuple[tuple[Role, ...], ...] = (("gateway",), ("worker",), ("monitor", "controller"), ("redis",))
NO_WORKER = (
    "No worker is left: requests wait for one to join (python -m worker); Ctrl-C stops the service, and the "
    "next `instar serve` starts its workers again"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs programs: `start` them, wait `until_end`, then `end`."""

    def __init__(
        self, programs: Sequence[Program], backoff: Backoff, console: Console, drain_s: float = 0.0
    ) -> None:
        """`drain_s` is how long programs continue running requests when asked to end, for the message."""
        self.died = asyncio.Event()  # set at every death, cleared by its reader
        self.processes = [SupervisedProcess(program, backoff, console, self.died.set) for program in programs]
        self._console = console
        self._drain_s = drain_s
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = asyncio.Event()
        self._at_once = asyncio.Event()

    def start(self, *roles: Role) -> None:
        for process in self.processes:
            if process.program.role in roles:
                self._tasks.append(asyncio.create_task(self._run(process)))

    def handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.request_stop)

    def request_stop(self) -> None:
        """End in order; when called again, kill at once."""
        if self._ending.is_set():
            self._at_once.set()
        else:
            self._console.say(
                f"Stopping: running requests have {self._drain_s:g} s to finish; Ctrl-C again stops at once"
            )
            self._ending.set()

    def expected_workers(self) -> dict[str, float]:
        """Return worker id -> wall-clock second of its last death (0.0: none) of the workers still wanted."""
        workers = [process for process in self._of("worker") if process.exit_reason is None]
        return {process.program.name: process.last_death for process in workers}

    async def until_end(self) -> None:
        """Return when an end was requested or nothing can serve."""
        await self._ending.wait()

    async def end(self) -> int:
        """End every process in order. Returns 0, or 2 if these settings cannot serve."""
        for roles in STOP_ORDER:
            processes = [process for process in self.processes if process.program.role in roles]
            await asyncio.gather(*(process.stop(self._at_once) for process in processes))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)
        if problem := self._serving_problem():
            self._console.say(problem)
            return CONFIGURATION_ERROR
        self._console.say("Instar has stopped")
        return 0

    async def _run(self, process: SupervisedProcess) -> None:
        process.exit_reason = await process.run()
        if self._serving_problem():
            self._ending.set()
        elif process.exit_reason == "left" and not self.expected_workers():
            self._console.say(NO_WORKER)

    def _of(self, role: Role) -> list[SupervisedProcess]:
        return [process for process in self.processes if process.program.role == role]

    def _serving_problem(self) -> str:
        """Return the last line of the process that cannot serve with these settings, "" if all can."""
        for role in ("redis", "gateway", "worker"):
            processes = self._of(role)
            failed = [process for process in processes if process.exit_reason == "misconfigured"]
            if failed and len(failed) == len(processes):
                last = next((line for line in reversed(failed[0].last_lines) if line), "it gave no reason")
                reason = last.split(" ERROR ", 1)[-1]  # without a log line's time
                return f"Instar cannot serve: {failed[0].program.name}: {reason}"
        return ""

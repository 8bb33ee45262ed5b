"""Runs the processes of one machine together and ends them in the order that loses nothing.

The gateway goes first, while its streams can still be served; then the workers; then the ones that only
watch; and the bus last, since all others speak over it to the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence

from instar.serve.console import Console
from instar.serve.keeper import CONFIGURATION_ERROR, Backoff, Keeper, Outcome, Program, Role

STOP_ORDER: tuple[tuple[Role, ...], ...] = (("gateway",), ("worker",), ("monitor", "controller"), ("redis",))
NO_WORKER = (
    "No worker is left: requests wait for one to join (python -m worker); Ctrl-C stops the service, and the "
    "next `instar serve` starts its workers again"
)
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """`start` what there is, wait `until_end`, then `end`: 0 after a wished end, 2 when nothing can serve."""

    def __init__(
        self, programs: Sequence[Program], backoff: Backoff, console: Console, drain_s: float = 0.0
    ) -> None:
        """`drain_s`: how long the programs let running requests go on when asked to end; for the message."""
        self.died = asyncio.Event()  # set at every death; whoever watches clears it
        self.keepers = [Keeper(program, backoff, console, self.died.set) for program in programs]
        self._console = console
        self._drain_s = drain_s
        self._tasks: dict[Keeper, asyncio.Task[Outcome]] = {}
        self._outcomes: dict[Keeper, Outcome] = {}
        self._ending = asyncio.Event()
        self._hurry = asyncio.Event()

    def start(self, *roles: Role) -> None:
        for keeper in self.keepers:
            if keeper.program.role in roles:
                task = self._tasks[keeper] = asyncio.create_task(keeper.run())
                task.add_done_callback(lambda done, keeper=keeper: self._on_end(keeper, done))  # type: ignore[misc]

    def listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.request_stop)

    def request_stop(self) -> None:
        """Once: end in order. Twice: end now."""
        if self._ending.is_set():
            self._hurry.set()
        else:
            self._console.say(
                f"Stopping: running requests may take {self._drain_s:g} s more; Ctrl-C again stops at once"
            )
            self._ending.set()

    def expected_workers(self) -> dict[str, float]:
        """Worker id -> wall-clock second of its last death (0.0: none), of those that should be serving."""
        return {
            keeper.program.name: keeper.last_death
            for keeper in self._of("worker")
            if keeper not in self._outcomes
        }

    async def until_end(self) -> None:
        """Returns when the end is wished for, or nothing is left to run for."""
        await self._ending.wait()

    async def end(self) -> int:
        """Ends every process, in order. Returns the exit status of the service."""
        for roles in STOP_ORDER:
            keepers = [keeper for keeper in self._tasks if keeper.program.role in roles]
            await asyncio.gather(*(keeper.stop(self._hurry) for keeper in keepers))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks.values())
        if cannot_serve := self._cannot_serve():
            self._console.say(cannot_serve)
            return CONFIGURATION_ERROR
        self._console.say("Instar has stopped")
        return 0

    def _on_end(self, keeper: Keeper, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled():
            return
        self._outcomes[keeper] = task.result()
        if self._cannot_serve():
            self._ending.set()
        elif task.result() == "left" and not self.expected_workers():
            self._console.say(NO_WORKER)

    def _of(self, role: Role) -> list[Keeper]:
        return [keeper for keeper in self.keepers if keeper.program.role == role]

    def _cannot_serve(self) -> str:
        """Why these settings cannot serve, in the last words of the process concerned; "" when they can."""
        for role in ("redis", "gateway", "worker"):
            keepers = self._of(role)
            failed = [keeper for keeper in keepers if self._outcomes.get(keeper) == "misconfigured"]
            if failed and len(failed) == len(keepers):
                said = next((line for line in reversed(failed[0].last_lines) if line), "it did not say why")
                reason = said.split(" ERROR ", 1)[-1]  # without the clock of a log line
                return f"Instar cannot serve: {failed[0].program.name}: {reason}"
        return ""

"""The open loop: each request is sent once, when it is due, whatever becomes of those before it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from instar.replay.outcomes import INTERRUPTED, NOT_SENT, UNFINISHED, RequestOutcome, conclude
from instar.replay.requests import COMPLETIONS, message_of
from instar.replay.schemas import Arrival
from instar.replay.wire import Exchange, ServerAddress, connect

LEAD_S: Final = 1.0  # time from the opening of a connection to its request
NICENESS: Final = -10  # niceness of this thread, where the system allows it


@dataclass(slots=True)
class RunState:
    """A run in progress. `began` is of time.perf_counter, `began_at` in seconds since 1970."""

    outcomes: list[RequestOutcome]
    began: float = 0.0
    began_at: float = 0.0
    num_sent: int = 0
    num_open: int = 0
    num_served: int = 0
    events_in: Counter[int] = field(default_factory=Counter)  # second of the run -> events of all streams
    errors: Counter[str] = field(default_factory=Counter)
    said: dict[str, str] = field(default_factory=dict)  # the server's message of the first error of a kind

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began

    @property
    def events_per_s(self) -> list[int]:
        return [self.events_in[second] for second in range(max(self.events_in, default=-1) + 1)]

    def count_events(self, num: int, now: float) -> None:
        self.events_in[int(now - self.began)] += num


class Generator:
    """Sends arrivals to a server. After the last was due, the rest may take `drain_s`."""

    def __init__(
        self,
        server: ServerAddress,
        arrivals: Sequence[Arrival],
        bodies: list[bytes],
        *,
        drain_s: float,
        name: str,
    ) -> None:
        due = enumerate(arrivals)
        outcomes = [RequestOutcome(i, one.at_s, one.prompt_tokens, one.output_tokens) for i, one in due]
        self.run = RunState(outcomes)
        self._server = server
        self._bodies = bodies
        self._drain_s = drain_s
        self._name = name
        self._open: set[asyncio.Task[None]] = set()
        self._why_given_up = ""

    async def replay(self) -> None:
        """Send all requests. Returns when all have ended, or drain_s after the last was due.

        When cancelled it stops at once. In each case every request has its outcome.
        """
        with _undisturbed():
            self.run.began = time.perf_counter() + min(LEAD_S, 0.2)
            self.run.began_at = time.time() + min(LEAD_S, 0.2)
            try:
                await self._send_all()
            except asyncio.CancelledError:
                await self._give_up(INTERRUPTED)
                raise
            await self._give_up(UNFINISHED)

    async def _send_all(self) -> None:
        for outcome in self.run.outcomes:
            await self._sleep_until(outcome.due_s - LEAD_S)
            task = asyncio.create_task(self._serve(outcome))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
        if self._open:
            await asyncio.wait(self._open.copy(), timeout=LEAD_S + self._drain_s)

    def _exchange_for(self, _: RequestOutcome) -> Exchange:
        return Exchange(self.run.count_events)

    async def _give_up(self, why: str) -> None:
        self._why_given_up = why
        left = list(self._open)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for outcome in self.run.outcomes:
            if outcome.sent_s is None and not outcome.error:  # no connection was made
                outcome.error = NOT_SENT if why == INTERRUPTED else why

    async def _serve(self, outcome: RequestOutcome) -> None:
        """Send one request and wait for its end. A connection that fails ahead is opened when it is due."""
        exchange, body = self._exchange_for(outcome), self._bodies[outcome.number]
        head = self._server.head("POST", COMPLETIONS, len(body), f"{self._name}-{outcome.number}")
        self._bodies[outcome.number] = b""
        try:
            problem = await connect(self._server, exchange)
            await self._sleep_until(outcome.due_s)
            if problem or not exchange.is_open:
                exchange = self._exchange_for(outcome)
                problem = await connect(self._server, exchange)
            if problem:
                outcome.ended_s = self.run.now_s
                self._fail(outcome, problem)
                return
            exchange.send(head + body)
            outcome.sent_s = exchange.sent - self.run.began
            self.run.num_sent += 1
            self.run.num_open += 1
            try:
                await exchange.ended
                problem = exchange.problem
            except asyncio.CancelledError:
                problem = self._why_given_up
            self.run.num_open -= 1
            self._conclude(outcome, exchange, problem)
        finally:
            exchange.close()

    def _conclude(self, outcome: RequestOutcome, exchange: Exchange, problem: str) -> None:
        run, tail = self.run, bytes(exchange.tail)
        outcome.ended_s = run.now_s
        outcome.status, outcome.events = exchange.status, exchange.num_events
        outcome.longest_pause_s = exchange.longest_pause
        if exchange.opened:
            outcome.opened_s = exchange.opened - run.began
        if exchange.first:
            outcome.first_s, outcome.last_s = exchange.first - run.began, exchange.last - run.began
        if problem:
            self._fail(outcome, problem)
            return
        conclude(outcome, tail)
        if outcome.error:
            if outcome.error not in run.said:
                run.said[outcome.error] = message_of(tail)
            self._fail(outcome, outcome.error)
        else:
            run.num_served += 1

    def _fail(self, outcome: RequestOutcome, error: str) -> None:
        outcome.error = error
        self.run.errors[error] += 1

    async def _sleep_until(self, at_s: float) -> None:
        """Sleep until `at_s`. The event loop rounds to milliseconds and may wake early."""
        while (left := self.run.began + at_s - time.perf_counter()) > 0:  # noqa: ASYNC110 there is no event
            await asyncio.sleep(left)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the prompts out of garbage collection, and raise this thread's priority where that is allowed.

    Both delay requests otherwise. The priority takes a few per cent of a core from the server, and does not
    help on a machine that is full (bench/LOG.md).
    """
    with contextlib.ExitStack() as stack:
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):  # only root may
            os.setpriority(os.PRIO_PROCESS, 0, min(before, NICENESS))
            stack.callback(os.setpriority, os.PRIO_PROCESS, 0, before)
        yield

"""The gateway's writes to workers: Submits and Cancels, in order, several in one round trip.

A write whose answer is lost may have been carried out. It is sent again as it was: a worker ignores a
(request, attempt) it has, and a Cancel twice is one Cancel.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bus.client import Bus, BusFull, BusUnavailable, WriteBatch
from bus.messages import Cancel, Drain, Submit
from gateway.delivery.inflight import Flight

log = logging.getLogger("gateway")

MAX_BATCH = 64
CANCEL_TRIES_S = 10.0  # then the worker finds out by itself: nobody renews this gateway's interest
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Submission:
    """The attempt is part of it: a flight that moved on leaves a void submission behind."""

    flight: Flight
    attempt: int
    instance: str
    epoch: int

    @property
    def is_void(self) -> bool:
        target = self.flight.target
        return self.flight.attempt != self.attempt or target is None or target.epoch != self.epoch


@dataclass(frozen=True, slots=True)
class _Command:
    worker: str
    command: Cancel | Drain
    until: float

    @property
    def is_void(self) -> bool:
        return time.monotonic() > self.until


def _nobody(_: Flight) -> None:
    pass


def _nobody_cares(_: Flight, __: Exception) -> None:
    pass


class Outbox:
    """`on_sent` is told of every submission that Redis took, `on_full` of those it has no memory for,
    `on_unsendable` of those that are no message. Submissions that became void are nobody's business."""

    def __init__(self, bus: Bus, gateway: str) -> None:
        self.on_sent: Callable[[Flight], None] = _nobody
        self.on_full: Callable[[Flight], None] = _nobody
        self.on_unsendable: Callable[[Flight, Exception], None] = _nobody_cares
        self._bus = bus
        self._gateway = gateway
        self._queue: deque[_Submission | _Command] = deque()
        self._wake = asyncio.Event()

    def submit(self, flight: Flight) -> None:
        """The flight's current attempt, to its target."""
        if flight.target is None:
            raise AssertionError(f"{flight.request_id} has no target")
        self._put(_Submission(flight, flight.attempt, flight.target.instance, flight.target.epoch))

    def cancel(
        self, worker: str, epoch: int, request_ids: Iterable[str], up_to_attempt: int | None = None
    ) -> None:
        """`up_to_attempt`: later attempts live on; None: all end."""
        command = Cancel(
            id=uuid.uuid4().hex, epoch=epoch, request_ids=list(request_ids), up_to_attempt=up_to_attempt
        )
        self._put(_Command(worker, command, time.monotonic() + CANCEL_TRIES_S))

    def __len__(self) -> int:
        return len(self._queue)

    async def run(self) -> None:
        """Writes for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._write_some()

    def _put(self, item: _Submission | _Command) -> None:
        self._queue.append(item)
        self._wake.set()

    async def _write_some(self) -> None:
        """One round trip. What could not be written stays in front, for the next."""
        items = self._take()
        batch = self._bus.batch()
        items = [item for item in items if self._write(item, batch)]
        try:
            await batch.send()
        except BusUnavailable:
            self._queue.extendleft(reversed(items))
            await asyncio.sleep(RETRY_S)
        except BusFull:
            for item in items:
                if isinstance(item, _Submission) and not item.is_void:  # on_full may end its siblings
                    self.on_full(item.flight)
            self._queue.extendleft(item for item in reversed(items) if isinstance(item, _Command))
            await asyncio.sleep(RETRY_S)
        else:
            for item in items:
                if isinstance(item, _Submission) and not item.is_void:
                    self.on_sent(item.flight)

    def _take(self) -> list[_Submission | _Command]:
        items: list[_Submission | _Command] = []
        while self._queue and len(items) < MAX_BATCH:
            item = self._queue.popleft()
            if not item.is_void:
                items.append(item)
        return items

    def _write(self, item: _Submission | _Command, batch: WriteBatch) -> bool:
        """False: it cannot be a message; only its own flight fails."""
        stream, message = self._written(item)
        try:
            batch.publish(stream, message)
        except (OverflowError, TypeError, ValueError) as error:
            log.error("a %s cannot be written to %s: %s", type(message).__name__, stream, error)
            if isinstance(item, _Submission):
                self.on_unsendable(item.flight, error)
            return False
        return True

    def _written(self, item: _Submission | _Command) -> tuple[str, Submit | Cancel | Drain]:
        if isinstance(item, _Command):
            return self._bus.names.control(item.worker), item.command
        flight = item.flight
        submit = Submit(
            request_id=flight.request_id,
            attempt=item.attempt,
            gateway=self._gateway,
            epoch=item.epoch,
            prompt_token_ids=flight.prompt_token_ids,
            sampling=flight.sampling,
            sent_token_ids=flight.received,
            trace_id=flight.trace_id,
            min_precision=flight.min_precision,
        )
        return self._bus.names.requests(item.instance), submit

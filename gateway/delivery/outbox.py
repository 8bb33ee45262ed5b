"""The gateway's writes to workers: Submits and Cancels, in order, several in one round trip.

Requests with the same prompt for the same instance share an entry: it has the prompt once, however many
choices the call has. A write whose reply is lost is sent again unchanged: workers ignore what they have.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from bus.batch import WriteBatch
from bus.client import Bus, BusFull, BusUnavailable
from bus.messages import Cancel, SiblingChoice, Submit
from gateway.delivery.request import RequestState

log = logging.getLogger("gateway")

MAX_BATCH = 64  # entries of one MULTI
CANCEL_TRIES_S = 10.0  # then the worker notices by itself that this gateway's lease is gone
RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class _Write:
    """A message for one stream; `state` with a Submit, `until` with a Cancel."""

    stream: str
    message: Submit | Cancel
    state: RequestState | None = None
    until: float = 0.0

    @property
    def is_void(self) -> bool:
        """True if the request moved on to another attempt, or the Cancel is too old."""
        if self.state is None:
            return time.monotonic() > self.until
        assert isinstance(self.message, Submit)
        target = self.state.target
        is_same = target is not None and target.epoch == self.message.epoch
        return not is_same or self.state.attempt != self.message.attempt

    @property
    def entry(self) -> tuple[str, int]:
        """A key that is equal for writes that may share an entry: a prompt's list belongs to one call."""
        message = self.message
        return self.stream, id(message.prompt_token_ids if isinstance(message, Submit) else message)


class RequestOutbox:
    """The queue of writes.

    It reports each Submit that is not void by then to the owner's callbacks: `on_sent` if Redis took it,
    `on_full` if Redis has no memory for it, `on_unsendable` if it cannot be encoded.
    """

    on_sent: Callable[[RequestState], None]
    on_full: Callable[[RequestState], None]
    on_unsendable: Callable[[RequestState], None]

    def __init__(self, bus: Bus, gateway: str) -> None:
        self._bus, self._gateway = bus, gateway
        self._queue: deque[_Write] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def submit(self, state: RequestState) -> None:
        """Queue the Submit of the current attempt, for its target."""
        request, target = state.request, state.target
        if target is None:
            raise AssertionError(f"{state.id} has no target")
        submit = Submit(
            request_id=request.id,
            attempt=state.attempt,
            gateway=self._gateway,
            epoch=target.epoch,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            sent_token_ids=state.received,
            trace_id=request.trace_id,
            min_precision=request.min_precision,
            cache_salt=request.cache_salt,
            key=request.key,
            weight=request.weight,
            priority=request.priority,
            embeds=request.embeds,
        )
        self._put(_Write(self._bus.names.requests(target.instance), submit, state))

    def cancel(
        self, worker: str, epoch: int, request_ids: Iterable[str], up_to_attempt: int | None = None
    ) -> None:
        """Queue a Cancel. `up_to_attempt`: later attempts continue; None: every attempt ends."""
        command = Cancel(
            id=uuid.uuid4().hex, epoch=epoch, request_ids=list(request_ids), up_to_attempt=up_to_attempt
        )
        self._put(_Write(self._bus.names.control(worker), command, until=time.monotonic() + CANCEL_TRIES_S))

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._write_some()

    def _put(self, write: _Write) -> None:
        self._queue.append(write)
        self._wake.set()

    async def _write_some(self) -> None:
        """Make one round trip. What could not be written stays at the front of the queue."""
        batch = self._bus.batch()
        writes = [write for entry in self._take() if self._add(entry, batch) for write in entry]
        try:
            await batch.send()
        except BusUnavailable:
            self._queue.extendleft(reversed(writes))
            await asyncio.sleep(RETRY_S)
        except BusFull:
            for write in writes:
                if write.state is not None and not write.is_void:  # on_full may end its siblings
                    self.on_full(write.state)
            self._queue.extendleft(write for write in reversed(writes) if write.state is None)
            await asyncio.sleep(RETRY_S)
        else:
            for write in writes:
                if write.state is not None and not write.is_void:
                    self.on_sent(write.state)

    def _take(self) -> list[list[_Write]]:
        """Take the next writes, those of one entry together."""
        entries: dict[tuple[str, int], list[_Write]] = {}
        while self._queue and (len(entries) < MAX_BATCH or self._queue[0].entry in entries):
            write = self._queue.popleft()
            if not write.is_void:
                entries.setdefault(write.entry, []).append(write)
        return list(entries.values())

    def _add(self, entry: list[_Write], batch: WriteBatch) -> bool:
        """Encode an entry. Return False if that fails: only its own requests fail with it."""
        stream, message = entry[0].stream, entry[0].message
        if len(entry) > 1 and isinstance(message, Submit):
            message = replace(message, choices=[_choice(write.message) for write in entry[1:]])
        try:
            batch.publish(stream, message)
        except (OverflowError, TypeError, ValueError) as error:
            log.error("a %s cannot be written to %s: %s", type(message).__name__, stream, error)
            for write in entry:
                if write.state is not None and not write.is_void:
                    self.on_unsendable(write.state)
            return False
        return True


def _choice(message: Submit | Cancel) -> SiblingChoice:
    assert isinstance(message, Submit)
    return SiblingChoice(
        request_id=message.request_id,
        attempt=message.attempt,
        seed=message.sampling.seed,
        sent_token_ids=message.sent_token_ids,
    )

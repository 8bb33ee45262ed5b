"""Publish outputs of steps and reports of morphs, in order.

The way of a token: `ResultQueue` takes it from the engine's thread to the event loop, `OutputPublisher` sorts
it by gateway, and `Outbox` sends it.

While Redis is away the parcels stay, up to `capacity`; then the engine pauses, and resumes when half of them
are out. A parcel whose answer was lost is sent again: gateways drop deltas that they have, by index.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice

from bus.client import Bus, BusFull, BusUnavailable
from bus.messages import Delta, Event, StepOutput
from bus.morphs import MorphReport
from bus.names import Names
from worker.engine.engine import StepResult
from worker.engine.outputs import Output
from worker.service.engine_thread import EngineThread
from worker.service.ledger import Ledger, Ticket
from worker.service.parcels import ENTRY_BYTES, MOST_ENTRY_BYTES, bytes_of, parts_of
from worker.service.tasks import until_taken

log = logging.getLogger(__name__)

# Entries of one MULTI, and the bytes of all but the last: Redis serves no other client while it runs.
MAX_PARCELS_AT_ONCE, MAX_BYTES_AT_ONCE = 64, 1024 * 1024
FULL_RETRY_S = 0.2  # Redis at maxmemory: gateways trim as they read


class ResultQueue:
    """Carries results from the engine's thread to the event loop; those of short steps go together.

    To wake the event loop, Redis and the gateway for each token takes most of a millisecond of the cores that
    compute, as long as a step of a small model. So tokens wait up to `interval_s` for the next ones. The
    first and the last token of a request do not wait, and bring along what waits.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[int, list[StepResult]], None],
        interval_s: float,
    ) -> None:
        """take: gets the epoch and the results, in the event loop and in order."""
        self._loop, self._take, self._interval_s = loop, take, interval_s
        self._waiting: deque[tuple[int, list[StepResult]]] = deque()
        self._timer: asyncio.TimerHandle | None = None  # set while a `_tick` is scheduled

    def put(self, epoch: int, results: list[StepResult]) -> None:
        """Take the results of a step, in the engine's thread."""
        self._waiting.append((epoch, results))
        if self._timer is None or any(_is_urgent(output) for result in results for output in result.outputs):
            self._loop.call_soon_threadsafe(self.flush)

    def flush(self) -> None:
        """Hand over all that waits, by epoch. Only in the event loop."""
        while self._waiting:
            epoch, results = self._waiting.popleft()
            while self._waiting and self._waiting[0][0] == epoch:
                results = results + self._waiting.popleft()[1]
            self._take(epoch, results)
        if self._timer is None and self._interval_s:
            self._timer = self._loop.call_later(self._interval_s, self._tick)

    def _tick(self) -> None:
        self._timer = None  # before the look: a later `put` wakes the event loop itself
        if self._waiting:
            self.flush()


def _is_urgent(output: Output) -> bool:
    return output.delta.finish_reason is not None or _is_first(output)


def _is_first(output: Output) -> bool:
    return not output.delta.index or not output.delta.token_ids


def entries_of(results: Iterable[StepResult]) -> list[list[StepResult]]:
    """Group the steps of each instance that share a stream entry: those in a row with the same shape.

    The first output of a request opens an entry, whose `step_s` tells when the request stopped waiting.
    """
    entries: list[list[StepResult]] = []
    for result in sorted(results, key=lambda each: each.instance):
        if not entries or not _continues(entries[-1][-1], result):
            entries.append([])
        entries[-1].append(result)
    return entries


def _continues(last: StepResult, result: StepResult) -> bool:
    shapes = [(each.instance, each.shape_id, each.layers_below_full) for each in (last, result)]
    return shapes[0] == shapes[1] and not any(map(_is_first, result.outputs))


@dataclass(slots=True)
class Parcel:
    """The output of one or several steps for one gateway, and the entries that it completes, in one MULTI.

    An entry is acknowledged if and only if the last tokens of its requests are out, except while Redis is
    full: the entries could be what fills it. If the worker dies then, the gateway submits them again.
    """

    output: StepOutput | None = None
    stream: str = ""
    acks: list[tuple[str, str]] = field(default_factory=list)  # (requests stream, entry id)
    num_bytes: int = 0  # of the output, at most


class Outbox:
    """`put` from the event loop; `run` publishes. `may_publish` waits while this worker may not speak."""

    def __init__(
        self, bus: Bus, brake: EngineThread, may_publish: Callable[[], Awaitable[None]], capacity: int = 512
    ) -> None:
        self._bus, self._brake, self._may_publish, self._capacity = bus, brake, may_publish, capacity
        self._parcels: deque[Parcel] = deque()
        self._filled, self._emptied = asyncio.Event(), asyncio.Event()
        self._emptied.set()
        self._is_braking = False
        self._generation = 0

    def __len__(self) -> int:
        return len(self._parcels)

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._filled.set()
        self._emptied.clear()
        if len(self._parcels) >= self._capacity and not self._is_braking:
            log.warning("%d outputs wait for Redis; the engine pauses", len(self._parcels))
            self._is_braking = True
            self._brake.pause()

    def ack(self, stream: str, entry_id: str) -> None:
        self.put(Parcel(acks=[(stream, entry_id)]))

    def drop_gateway(self, stream: str) -> None:
        """Drop outputs for `stream`, whose gateway is gone; keep the acknowledgements."""
        for parcel in self._parcels:
            if parcel.stream == stream:
                parcel.output = None

    def clear(self) -> None:
        """Drop the outputs of a lost epoch."""
        self._generation += 1
        self._parcels.clear()
        self._after_removal()

    async def wait_empty(self) -> None:
        await self._emptied.wait()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            await self._may_publish()
            generation, parcels = self._generation, self._next_parcels()
            if await self._send(parcels) and generation == self._generation:
                for _ in parcels:
                    self._parcels.popleft()
                self._after_removal()

    def _next_parcels(self) -> list[Parcel]:
        """Return what goes out in one round trip: at least one parcel."""
        found, num_bytes = list[Parcel](), 0
        for parcel in islice(self._parcels, MAX_PARCELS_AT_ONCE):
            if num_bytes >= MAX_BYTES_AT_ONCE:
                break
            found.append(parcel)
            num_bytes += parcel.num_bytes
        return found

    async def _send(self, parcels: list[Parcel]) -> bool:
        batch = self._bus.batch()
        for parcel in parcels:
            if parcel.output:
                batch.publish(parcel.stream, parcel.output)
            for stream, entry_id in parcel.acks:
                batch.ack(stream, entry_id)
        try:
            await batch.send()
            return True
        except BusUnavailable:
            await self._bus.wait_up()
        except BusFull as error:
            log.warning("Redis is full, %d steps wait: %s", len(self._parcels), error)
            await self._send_acks()
            await asyncio.sleep(FULL_RETRY_S)
        return False

    async def _send_acks(self) -> None:
        """Acknowledge all waiting entries alone, which frees memory."""
        parcels = [parcel for parcel in self._parcels if parcel.acks]
        batch = self._bus.batch()
        for parcel in parcels:
            for stream, entry_id in parcel.acks:
                batch.ack(stream, entry_id)
        with suppress(BusUnavailable, BusFull):
            await batch.send()
            for parcel in parcels:
                parcel.acks = []

    def _after_removal(self) -> None:
        if not self._parcels:
            self._filled.clear()
            self._emptied.set()
        if self._is_braking and len(self._parcels) <= self._capacity // 2:
            self._is_braking = False
            self._brake.resume()


class OutputPublisher:
    """Puts the outputs of steps into the outbox."""

    def __init__(self, names: Names, worker: str, ledger: Ledger, outbox: Outbox) -> None:
        self._names, self._worker = names, worker
        self._ledger, self._outbox = ledger, outbox

    def take(self, epoch: int, results: list[StepResult]) -> None:
        """Put the steps' tokens into as few entries as there can be, none above `MOST_ENTRY_BYTES`.

        Deltas of attempts that were cancelled or replaced meanwhile are dropped here.
        """
        for entry in entries_of(results):
            self._take_entry(epoch, entry)

    def _take_entry(self, epoch: int, entry: list[StepResult]) -> None:
        parcels: dict[str, Parcel] = {}
        for output in chain.from_iterable(result.outputs for result in entry):
            delta = output.delta
            ticket = self._ledger.get(delta.request_id)
            if ticket is None or ticket.attempt != delta.attempt:
                continue
            for part in parts_of(delta):
                parcel, num_bytes = parcels.get(ticket.gateway), bytes_of(part)
                if parcel is None or parcel.num_bytes + num_bytes > MOST_ENTRY_BYTES:
                    if parcel is not None:
                        self._outbox.put(parcel)
                    parcel = parcels[ticket.gateway] = self._parcel(ticket.gateway, epoch, entry[0])
                assert parcel.output
                parcel.output.deltas.append(part)
                parcel.num_bytes += num_bytes
            assert parcel is not None
            if delta.finish_reason:
                self._ledger.end(delta.request_id, delta.attempt)
                _log(ticket, delta)
                if not self._ledger.is_open(ticket.instance, ticket.entry_id):
                    parcel.acks.append((self._names.requests(ticket.instance), ticket.entry_id))
        for parcel in parcels.values():
            self._outbox.put(parcel)

    def _parcel(self, gateway: str, epoch: int, result: StepResult) -> Parcel:
        output = StepOutput(
            worker=self._worker,
            epoch=epoch,
            instance=result.instance,
            step=result.step,
            born_ns=result.born_ns,
            fingerprint=result.shape_id,
            deltas=[],
            layers_below_full=result.layers_below_full,
            step_s=result.step_s,
        )
        return Parcel(output, self._names.tokens(gateway), num_bytes=ENTRY_BYTES)


def _log(ticket: Ticket, delta: Delta) -> None:
    """Log the end of a request, errors too: the gateway may retry elsewhere, so that no client sees them."""
    ids = ticket.log_ids | {"attempt": ticket.attempt}
    if delta.error is not None:
        level = logging.INFO if delta.reject_reason else logging.WARNING
        log.log(level, "not served: %s", delta.error, extra=ids)
    else:
        log.debug("ended: %s", delta.finish_reason, extra=ids)


MAX_WAITING = 1000  # reports kept while Redis is away; the oldest are lost first
REST_S = 2.0  # time for the last reports of a worker that leaves


class ReportPublisher:
    """Publishes reports and events of morphs, in order; one whose answer from Redis was lost comes twice.

    `put` from the event loop; `run` publishes.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._waiting: deque[MorphReport | Event] = deque(maxlen=MAX_WAITING)
        self._filled = asyncio.Event()

    def put(self, reports: Iterable[MorphReport | Event]) -> None:
        self._waiting.extend(reports)
        self._filled.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self._publish_all()

    async def send_rest(self) -> None:
        """Publish the last reports after `run` was cancelled, if Redis takes them in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._publish_all()

    async def _publish_all(self) -> None:
        while self._waiting:
            report = self._waiting[0]
            await until_taken(self._bus, partial(self._bus.publish, self._bus.names.events, report))
            if self._waiting[0] is report:  # else it was dropped meanwhile
                self._waiting.popleft()

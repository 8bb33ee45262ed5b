"""The instances that a worker serves: their cards, and the streams that their requests come on.

The stream of a model that comes is read before its card is shown. One that goes is off the card before its
stream is given up, since gateways that have not looked yet still send to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from bus.client import Bus, BusFull, BusUnavailable
from bus.messages import InstanceCard
from worker.deploy.model_host import HostListener
from worker.service.intake import Intake
from worker.service.ledger import Ledger
from worker.service.tasks import end

log = logging.getLogger("worker")

GATEWAYS_LOOK_S = 2.2  # gateways read the cards every 2 s: until then one of them may choose this worker
CHECK_S = 0.05


class Instances(HostListener):
    """The instances, in the event loop. `in_engine` calls a function in the engine's thread."""

    def __init__(
        self,
        bus: Bus,
        intake: Intake,
        ledger: Ledger,
        cards: Iterable[InstanceCard],
        *,
        on_changed: Callable[[], None],
        in_engine: Callable[[Callable[[], None]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._bus, self._intake, self._ledger = bus, intake, ledger
        self._on_changed, self._in_engine, self._on_error = on_changed, in_engine, on_error
        self._cards = {card.id: card for card in cards}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._hurries: dict[str, asyncio.Event] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._cleaning: dict[str, asyncio.Task[None]] = {}
        self._epoch = 0
        self.loading = ""  # a model that comes

    @property
    def shown(self) -> list[InstanceCard]:
        return [card for name, card in self._cards.items() if name not in self._leaving]

    def replace(self, cards: Iterable[InstanceCard]) -> None:
        """Replace the cards of instances that have changed their shape."""
        self._cards |= {card.id: card for card in cards if card.id in self._cards}

    async def backlog(self) -> int:
        """Entries that are unread or not yet acknowledged; 0 without a Redis to hold any."""
        return sum([await self._backlog(name) for name in list(self._cards)])

    def read(self, epoch: int) -> None:
        """Readers belong to an epoch: their consumer's name and what they accept carry it."""
        self._epoch = epoch
        for name in self._cards:
            self._read(name)

    def _read(self, name: str) -> None:
        previous = self._readers.get(name)
        task = asyncio.create_task(self._read_epoch(name, self._epoch, previous), name=f"requests of {name}")
        self._readers[name] = task
        task.add_done_callback(self._ended)

    async def _read_epoch(self, name: str, epoch: int, previous: asyncio.Task[None] | None) -> None:
        if previous:
            await end(previous)
        if cleaning := self._cleaning.get(name):
            await asyncio.wait([cleaning])
        await self._intake.read_requests(name, epoch)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._on_error(error)

    async def close(self) -> None:
        await end(*self._readers.values(), *self._leaving.values(), *self._cleaning.values())

    def on_loading(self, model: str) -> None:
        self.loading = model
        self._on_changed()

    def on_loaded(self, card: InstanceCard) -> None:
        self._cards[card.id] = card
        self._read(card.id)
        self._on_changed()

    def on_unloading(self, name: str, on_drained: Callable[[], None]) -> None:
        """Take the card away at once and read the stream until nothing more can come."""
        self._hurries[name] = asyncio.Event()
        self._leaving[name] = asyncio.create_task(
            self._read_out(name, on_drained), name=f"last requests of {name}"
        )
        self._leaving[name].add_done_callback(self._ended)
        self._on_changed()

    def on_unload_urgent(self, name: str) -> None:
        if hurry := self._hurries.get(name):
            hurry.set()

    def on_unload_aborted(self, name: str) -> None:
        if leaving := self._leaving.pop(name, None):
            leaving.cancel()
            self._read(name)
            self._on_changed()

    def on_unloaded(self, name: str) -> None:
        """Remove the stream too: a gateway that finds a Submit unanswered there submits it again."""
        self._cards.pop(name, None)
        self._leaving.pop(name, None)
        self._hurries.pop(name, None)
        task = asyncio.create_task(self._clean_up(name, self._readers.pop(name, None)))
        self._cleaning[name] = task
        task.add_done_callback(lambda _: self._cleaning.pop(name, None))
        self._on_changed()

    async def _read_out(self, name: str, on_drained: Callable[[], None]) -> None:
        hurry = self._hurries[name]
        with suppress(TimeoutError):
            async with asyncio.timeout(GATEWAYS_LOOK_S):
                await hurry.wait()
        while not hurry.is_set() and (self._ledger.num_of(name) or await self._backlog(name)):  # noqa: ASYNC110
            await asyncio.sleep(CHECK_S)
        if reader := self._readers.get(name):
            await end(reader)
        self._in_engine(on_drained)

    async def _clean_up(self, name: str, reader: asyncio.Task[None] | None) -> None:
        if reader:
            await end(reader)
        stream = self._bus.names.requests(name)
        with suppress(BusUnavailable, BusFull):  # then it is put away with what this worker leaves
            await self._bus.run(lambda client: client.delete(stream))

    async def _backlog(self, name: str) -> int:
        try:
            return await self._bus.length(self._bus.names.requests(name))
        except BusUnavailable:
            return 0

"""The epoch, lease and card of this worker.

Nothing is published unless the lease was renewed within its own length. A worker that finds its lease lost
fences itself: it drops all it ran, takes a larger epoch and registers again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bus.client import Bus, BusFull, BusUnavailable, RedisProblem
from bus.clock import now_ms
from bus.lease import Lease
from bus.messages import WorkerCard
from worker.service.tasks import RETRY_S, until_taken

log = logging.getLogger(__name__)

# Compilers hold the interpreter's lock for seconds at a time. No request waits for a worker that loads.
LEASES_WHILE_LOADING = 10


class Membership:
    """`join`, which takes the epoch, then `run` for as long as the worker lives, then `leave`.

    `on_fenced(epoch)` is called in the event loop, before others can learn of the new epoch.
    """

    def __init__(self, bus: Bus, card: WorkerCard, lease_s: float) -> None:
        self._bus, self.card, self._lease_s = bus, card, lease_s
        self.on_fenced: Callable[[int], None] = lambda epoch: None
        self._is_stale = False  # Redis has an older card
        self._shown_in = bus.schema  # version of the schema that the card in Redis is in
        self._showing = asyncio.Lock()  # a card must not be overtaken by an older one
        self._lease = Lease()
        self._hurry, self._renewed = asyncio.Event(), asyncio.Event()
        bus.on_restart(lambda _: self._hurry.set())

    @property
    def epoch(self) -> int:
        return self.card.epoch

    @property
    def _length_s(self) -> float:
        return self._lease_s * (LEASES_WHILE_LOADING if self.card.state == "loading" else 1)

    async def join(self) -> None:
        """Take an epoch and register, however long Redis is away or full. Raises RedisProblem, NameTaken."""
        await until_taken(self._bus, self._take_epoch)
        await until_taken(self._bus, self._register)

    async def run(self) -> None:
        """Renew the lease three times in its length, and show a stale card. Raises as `join` does.

        A card in another version of the schema than the one that is written now is stale, too.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                if not await self._renew():
                    await self._fence()
                elif self._is_stale or self._shown_in != self._bus.schema:
                    await self._show()
            except (BusUnavailable, BusFull):
                await asyncio.sleep(RETRY_S)
                await self._bus.wait_up()
                self._hurry.set()

    async def update(self, **changes: Any) -> None:
        """Change fields of the card and show it; where Redis cannot take it, with a later renewal."""
        was_loading = self.card.state == "loading"
        self.card = replace(self.card, **changes)
        self._is_stale = True
        if was_loading and self.card.state != "loading":
            self._hurry.set()  # the lease is a short one from here on
        await self._show()

    async def may_publish(self) -> None:
        """Wait until the lease is known to be this worker's."""
        while not self._lease.is_valid(time.monotonic()):
            self._renewed.clear()
            self._hurry.set()
            await self._renewed.wait()

    async def leave(self) -> None:
        """Give the lease up: what is left of this epoch is replayed elsewhere at once."""
        with suppress(BusUnavailable, BusFull, RedisProblem):  # then it runs out
            await self._bus.drop_lease(self.card.id, self.epoch)

    async def _renew(self) -> bool:
        began, length_s = time.monotonic(), self._length_s
        self._lease = self._lease.asked(began, length_s)
        is_ours = await self._bus.renew_lease(self.card.id, self.epoch, length_s)
        if is_ours:
            self._prolong(began, length_s)
        return is_ours

    async def _fence(self) -> None:
        """Take a new epoch; the controller sees it in the lease and tells the others."""
        lost = self.epoch
        await until_taken(self._bus, self._take_epoch)
        log.warning("epoch %d lost its lease; dropping what ran, going on as epoch %d", lost, self.epoch)
        self.on_fenced(self.epoch)
        await until_taken(self._bus, self._register)

    async def _take_epoch(self) -> None:
        """Take the present time in milliseconds as epoch, or more where the clock was set back.

        Raises NameTaken: of two that live, the one that came last is refused; one that was stopped and
        replaced ends when it goes on.
        """
        await self._bus.refuse_namesake("worker", self.card.id, self._lease_s)
        last = max(self.epoch, await self._bus.last_epoch(self.card.id))
        self.card = replace(self.card, epoch=max(now_ms(), last + 1))

    async def _register(self) -> None:
        began, length_s, card = time.monotonic(), self._length_s, self.card
        version = self._bus.schema
        await self._bus.register_worker(card, length_s)
        self._is_stale, self._shown_in = card is not self.card, version
        self._prolong(began, length_s)

    async def _show(self) -> None:
        async with self._showing:
            card, version = self.card, self._bus.schema
            with suppress(BusUnavailable, BusFull):
                if await self._bus.update_card(card):
                    self._is_stale, self._shown_in = card is not self.card, version

    def _prolong(self, began: float, length_s: float) -> None:
        self._lease = self._lease.granted(self.epoch, began, length_s)
        self._renewed.set()

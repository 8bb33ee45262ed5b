"""This worker among the others: its epoch, its lease, its card.

A lease that could not be renewed in time is lost, whatever the reason (stopped process, partition, Redis
without its data): others may have taken the work over. So nothing is published unless the lease was renewed
within its own length, and when it is found lost the worker fences itself: it drops all it ran, takes a
larger epoch and joins again as somebody new.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from bus.client import Bus, BusFull, BusUnavailable
from bus.messages import WorkerCard

log = logging.getLogger(__name__)

RETRY_S, FULL_RETRY_S = 0.2, 1.0


class Membership:
    """`join`, then `run` for as long as the worker lives, then `leave`. `on_fenced(epoch)` is called in the
    event loop, before anybody can learn of the new epoch."""

    def __init__(self, bus: Bus, card: WorkerCard, lease_s: float) -> None:
        self._bus, self._card, self._lease_s = bus, card, lease_s
        self.on_fenced: Callable[[int], None] = lambda epoch: None
        self._valid_until = 0.0
        self._hurry, self._renewed = asyncio.Event(), asyncio.Event()
        bus.on_restart(lambda _: self._hurry.set())

    @property
    def epoch(self) -> int:
        return self._card.epoch

    @property
    def card(self) -> WorkerCard:
        return self._card

    async def join(self) -> None:
        """Register, however long Redis is away or full."""
        while True:
            began = time.monotonic()
            try:
                await self._bus.register_worker(self._card, self._lease_s)
            except (BusUnavailable, BusFull) as error:
                level = logging.WARNING if isinstance(error, BusFull) else logging.DEBUG
                log.log(level, "cannot register yet: %s", error)
                await asyncio.sleep(FULL_RETRY_S if isinstance(error, BusFull) else RETRY_S)
                await self._bus.wait_up()
            else:
                return self._prolong(began)

    async def run(self) -> None:
        """Renew the lease every third of its length."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / 3):
                    await self._hurry.wait()
            self._hurry.clear()
            began = time.monotonic()
            try:
                if await self._bus.renew_lease(self._card.id, self.epoch, self._lease_s):
                    self._prolong(began)
                else:
                    await self._fence()
            except (BusUnavailable, BusFull):
                await asyncio.sleep(RETRY_S)
                await self._bus.wait_up()
                self._hurry.set()

    async def update(self, **changes: Any) -> None:
        """Change fields of the card and show it. Left to the next `join` where Redis is away."""
        self._card = replace(self._card, **changes)
        with suppress(BusUnavailable, BusFull):
            await self._bus.update_card(self._card)

    async def may_publish(self) -> None:
        """Returns once the lease is known to be ours."""
        while time.monotonic() >= self._valid_until:
            self._renewed.clear()
            self._hurry.set()
            await self._renewed.wait()

    async def leave(self) -> None:
        """Give the lease up: what is left of this epoch is replayed elsewhere at once."""
        with suppress(BusUnavailable, BusFull):
            await self._bus.drop_lease(self._card.id, self.epoch)

    async def _fence(self) -> None:
        lost, new = self.epoch, max(time.time_ns() // 1_000_000, self.epoch + 1)
        log.warning("the lease of epoch %d is lost; dropping what ran, going on as epoch %d", lost, new)
        self._card = replace(self._card, epoch=new)
        self.on_fenced(new)
        await self.join()
        with suppress(BusUnavailable, BusFull):
            await self._bus.event(
                "epoch_changed", self._card.id, "the lease was lost", epoch=new, before=lost
            )

    def _prolong(self, began: float) -> None:
        """`began`: before the command was sent, so that our clock is the stricter one."""
        self._valid_until = began + self._lease_s
        self._renewed.set()

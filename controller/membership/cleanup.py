"""Puts away what the dead leave: entries pending with a lost incarnation, streams of owners gone for good."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from bus.client import Bus
from bus.leftovers import remove_streams, without_owner
from bus.messages import WorkerCard
from bus.names import consumer
from bus.pending import discard_pending

log = logging.getLogger("controller")

SWEEP_EVERY_S = 30.0


def led_by(card: WorkerCard) -> frozenset[str]:
    """Instances whose requests this worker reads: the first of an instance's workers leads it."""
    return frozenset(i.id for i in card.instances if not i.workers or i.workers[0] == card.id)


class Reaper:
    """Remembers which instances a worker led, for the time when its card is gone or another's."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._instances: dict[str, frozenset[str]] = {}

    def remember(self, worker: str, instances: frozenset[str]) -> None:
        self._instances[worker] = self._instances.get(worker, frozenset()) | instances

    def forget(self, worker: str) -> None:
        self._instances.pop(worker, None)

    async def reap(self, worker: str, epoch: int) -> None:
        """Ends what is pending with this incarnation and no other. Its requests are the gateways' to submit
        again; left pending they would count as backlog for ever. Raises BusUnavailable."""
        for instance in sorted(self._instances.get(worker, ())):
            stream = self._bus.names.requests(instance)
            ended = await discard_pending(self._bus.link, stream, consumer(worker, epoch))
            if ended:
                log.info("ended %d entries of %s that %s left pending", ended, instance, worker)


class Sweeper:
    """Deletes streams that nobody owned for `after_s`, looked at every SWEEP_EVERY_S."""

    def __init__(self, bus: Bus, after_s: float) -> None:
        self._bus = bus
        self._after_s = after_s
        self._since: dict[str, float] = {}
        self._next_s = 0.0

    async def sweep(self, now_s: float) -> None:
        """Raises BusUnavailable."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + SWEEP_EVERY_S
        orphans = await without_owner(self._bus)
        self._since = {key: self._since.get(key, now_s) for key in orphans}
        await self._remove(
            [key for key, since_s in self._since.items() if now_s - since_s >= self._after_s], orphans
        )

    async def _remove(self, keys: Iterable[str], leases: dict[str, str]) -> None:
        for key in keys:
            if await remove_streams(self._bus, leases[key], key):
                log.info("deleted %s: its owner is gone", key)
                del self._since[key]

"""The removal of what dead workers leave: pending entries, and streams without an owner."""

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
    """Return the instances whose requests this worker reads: those that it leads."""
    return frozenset(i.id for i in card.instances if i.members(card.id)[0] == card.id)


async def reap(bus: Bus, worker: str, epoch: int, instances: Iterable[str]) -> None:
    """End what is pending with this incarnation: gateways submit it again. Raises BusUnavailable."""
    for instance in sorted(instances):
        if ended := await discard_pending(bus, bus.names.requests(instance), consumer(worker, epoch)):
            log.info("ended %d entries of %s that %s left pending", ended, instance, worker)


class Sweeper:
    """Deletes streams that have had no owner for `after_s`; it looks every SWEEP_EVERY_S."""

    def __init__(self, bus: Bus, after_s: float) -> None:
        self._bus = bus
        self._after_s = after_s
        self._since: dict[str, float] = {}
        self._next_s = 0.0

    async def sweep(self, now_s: float) -> None:
        """Look, if it is time to. Raises BusUnavailable."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + SWEEP_EVERY_S
        orphans = await without_owner(self._bus)
        self._since = {key: self._since.get(key, now_s) for key in orphans}
        for key in [key for key, since_s in self._since.items() if now_s - since_s >= self._after_s]:
            if await remove_streams(self._bus, orphans[key], key):
                log.info("deleted %s: its owner is gone", key)
                del self._since[key]

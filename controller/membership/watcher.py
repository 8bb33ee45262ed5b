"""The loop over the registry of workers: events of those that join, leave and die, and their leftovers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from bus.client import Bus, BusFull, BusUnavailable, Restart
from bus.leftovers import remove_worker
from bus.registry import RegisteredWorker
from bus.settings import ControllerSettings
from controller.failures import Failures
from controller.membership.cleanup import Sweeper, led_by, reap
from controller.membership.liveness import Known, MembershipChange, RegistryView, Sighting, decide

log = logging.getLogger("controller")

GONE_AFTER_S = 60.0  # longer than a supervisor's longest pause before it starts a worker again
SLOW_S = 1.0  # a view that took longer: Redis was stuck, and leases ran out that could not be renewed
EXPIRY_MARGIN_S = 0.02


class MembershipWatcher:
    """The owner of what is known about the workers. One `step` at a time."""

    def __init__(self, settings: ControllerSettings, bus: Bus, failures: Failures) -> None:
        self._settings = settings
        self._bus, self._failures = bus, failures
        self._known = Known()
        self._todo: deque[MembershipChange] = deque()
        self._restart: Restart | None = None  # without its event yet
        self._unsettled = False
        self._data_lost = False
        self._is_full = False
        self._led: dict[str, frozenset[str]] = {}  # the instances that each worker led, its last ones too
        self._sweeper = Sweeper(bus, GONE_AFTER_S)
        bus.on_restart(self._restarted)

    def _restarted(self, restart: Restart) -> None:
        self._restart = restart
        self._unsettled = True
        self._data_lost |= restart.data_lost

    async def run(self) -> None:
        """Take steps without end. Raises RedisProblem."""
        while True:
            pause_s = self._settings.interval_s
            with self._failures.survived("membership"):
                pause_s = await self.step()
            await asyncio.sleep(pause_s)

    async def step(self) -> float:
        """Observe and apply; return the seconds to pause before the next step."""
        try:
            members = await self._observe()
            await self._report_restart()
            await self._apply()
            await self._sweeper.sweep(time.monotonic())
        except BusUnavailable:
            self._unsettled = True
            await self._bus.wait_up()
            return 0.0
        except BusFull as full:  # the rest stays in the queue
            log.log(logging.DEBUG if self._is_full else logging.WARNING, "events wait: %s", full)
            self._is_full = True
            return self._settings.interval_s
        self._is_full = False
        return self._pause(members)

    async def _observe(self) -> list[RegisteredWorker]:
        began_s = time.monotonic()
        members = await self._bus.members()
        now_s = time.monotonic()
        view = RegistryView(
            at_s=now_s,
            sightings=tuple(Sighting(m.id, m.lease_epoch, m.card.epoch if m.card else None) for m in members),
            unsettled=self._unsettled or now_s - began_s > SLOW_S,
            data_lost=self._data_lost,
        )
        grace_s = self._settings.grace_s
        self._known, changes = decide(self._known, view, grace_s=grace_s, gone_after_s=GONE_AFTER_S)
        self._unsettled = self._data_lost = False
        self._todo.extend(changes)
        for member in members:
            if member.card:
                self._led[member.id] = self._led.get(member.id, frozenset()) | led_by(member.card)
        return members

    async def _report_restart(self) -> None:
        if restart := self._restart:
            what = "lost its data" if restart.data_lost else "restarted and kept its data"
            await self._bus.event("bus_restarted", "redis", f"Redis {what}", data_lost=int(restart.data_lost))
            self._restart = None

    async def _apply(self) -> None:
        """Carry out changes in order, each until it is done: gateways rely on the event of every death.

        One that fails for another reason than Redis is given up: it would fail again and hold up the others.
        """
        while self._todo:
            with self._failures.survived("membership"):
                await self._carry_out(self._todo[0])
            self._todo.popleft()

    async def _carry_out(self, change: MembershipChange) -> None:
        if change.verdict == "gone":
            if await remove_worker(self._bus, change.worker):
                self._led.pop(change.worker, None)
                log.debug("%s is forgotten: %s", change.worker, change.reason)
            return
        numbers = {"epoch": change.epoch}
        if change.previous is not None:
            numbers["previous_epoch"] = change.previous
        await self._bus.event(change.verdict, change.worker, change.reason, **numbers)
        level = logging.WARNING if change.verdict in ("worker_lost", "epoch_changed") else logging.INFO
        log.log(level, "%s %s: %s", change.verdict, change.worker, change.reason, extra=numbers)
        if change.verdict != "worker_joined":
            dead_epoch = change.epoch if change.previous is None else change.previous
            await reap(self._bus, change.worker, dead_epoch, self._led.get(change.worker, ()))

    def _pause(self, members: list[RegisteredWorker]) -> float:
        """Return the interval, or less if a lease would run out before that."""
        left_s = [member.lease_ms / 1000 + EXPIRY_MARGIN_S for member in members if member.lease_epoch]
        return min([self._settings.interval_s, *left_s])

"""The gateway's background tasks: read streams, poll leases, renew its own lease, check deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from bus.api_keys import KeysFileError
from bus.client import BusFull, BusUnavailable, Restart
from bus.leader import who_leads
from bus.messages import Event, Metrics, StepOutput
from bus.morphs import MorphReport
from bus.pending import as_numbers
from gateway.delivery.request import InstanceAddress, RetryReason
from gateway.operations.live import Feeds
from gateway.operations.picture import active_models, awaited_models
from gateway.state import BUS_PATIENCE_S, Gateway
from gateway.text import template

log = logging.getLogger("gateway")

LEASE_S = 5.0
POLL_S = 2.0  # events of the controller announce most changes at once
POLL_BUSY_S = 0.4  # interval with requests in flight: they leave a dead worker sooner
TICK_S = 0.25
DEMAND_S = 0.5
KEYS_S = 0.5  # between two looks at the file of keys
TRIM_S = 1.0
HISTORY_BATCH = 1000
SLICE = 32  # deltas, which take half a millisecond


class Loops:
    """The tasks. An error in one ends all: the supervisor then starts the process again."""

    def __init__(self, gateway: Gateway, feeds: Feeds) -> None:
        self._gateway, self._feeds = gateway, feeds
        self._bus, self._delivery, self._losses = gateway.bus, gateway.delivery, gateway.losses
        self._poll_now = gateway.poll_now
        self._had_lease = False
        self._may_lack = False  # Redis may have lost the policy, which is not written again yet

    async def start(self) -> None:
        """Take the lease and poll the registry once. Raises BusUnavailable, BusFull."""
        self._bus.on_restart(self._on_restart)
        await self._bus.drop_gateway(self._gateway.id)  # left by an earlier process of this name
        await self._bus.renew_gateway(self._gateway.id, LEASE_S)
        await self._poll()

    async def run(self) -> None:
        """Run until cancelled."""
        work: list[Coroutine[Any, Any, None]] = [
            self._read_tokens(),
            self._read_metrics(),
            self._read_events(),
            self._poll_registry(),
            self._renew_lease(),
            self._publish_events(),
            self._publish_demand(),
            self._tick(),
            self._watch_keys(),
            self._gateway.outbox.run(),
            self._gateway.streams.run(),
            self._feeds.live.run(),
            self._warm_up(),
        ]
        async with asyncio.TaskGroup() as tasks:
            for coroutine in work:
                tasks.create_task(coroutine)

    async def _warm_up(self) -> None:
        """Import ahead what chats need; if that fails, the first chat says so to its client."""
        try:
            await asyncio.to_thread(template.warm_up)
        except Exception:
            log.exception("chat templates cannot be rendered")

    async def stop(self) -> None:
        """Give up the lease: workers drop what they still run for this gateway."""
        self._gateway.models.close()
        with contextlib.suppress(BusUnavailable, BusFull):
            await self._bus.drop_gateway(self._gateway.id)

    async def _read_tokens(self) -> None:
        stream = self._bus.names.tokens(self._gateway.id)
        trimmed_at = time.monotonic()
        async with self._bus.reader(stream, StepOutput, start="0") as reader:
            async for batch in reader:
                if len(batch) == 1:
                    await self._deliver(batch[0][1])
                else:  # this gateway is behind: one write per stream for all steps
                    for _, step in batch:
                        self._delivery.on_step(step, step.deltas)
                    self._delivery.flush()
                if time.monotonic() - trimmed_at > TRIM_S:
                    trimmed_at = time.monotonic()
                    with contextlib.suppress(BusUnavailable):
                        await self._bus.trim(stream, before=reader.position)

    async def _deliver(self, step: StepOutput) -> None:
        """Deliver a step in slices, so that the first streams are written while the last are decoded."""
        for start in range(0, len(step.deltas), SLICE):
            if start:
                await asyncio.sleep(0)
            self._delivery.on_step(step, step.deltas[start : start + SLICE])
            self._delivery.flush()

    async def _read_metrics(self) -> None:
        async with self._bus.reader(self._bus.names.metrics, Metrics) as reader:
            async for batch in reader:
                self._gateway.cluster.add_metrics(batch[-1][1], time.monotonic())
                self._delivery.table.on_metrics()
                self._feeds.live.changed()
                if self._delivery.table.waiting:  # some may wait for a precision
                    self._delivery.attempts.place_waiting()
                    self._delivery.flush()

    async def _read_events(self) -> None:
        async with self._bus.reader(self._bus.names.events, Event, MorphReport) as reader:
            with contextlib.suppress(BusUnavailable):
                await reader.open()
                await self._read_history(until=reader.position)
            async for batch in reader:
                for _, message in batch:
                    if isinstance(message, Event):
                        self._on_event(message)
                    self._show(message)

    async def _read_history(self, until: str) -> None:
        """Show the events from before this process started, without acting on them."""
        stream = self._bus.names.events
        async with self._bus.reader(stream, Event, MorphReport, start="0-0", count=HISTORY_BATCH) as reader:
            while reader.position != until and (batch := await reader.read()):
                for entry_id, message in batch:
                    if as_numbers(entry_id) <= as_numbers(until):
                        self._show(message, is_history=True)

    def _show(self, message: Event | MorphReport, *, is_history: bool = False) -> None:
        if isinstance(message, Event):
            self._gateway.morphs.on_event(message, is_history=is_history)
            self._gateway.controller_failures.on_event(message, is_history=is_history)
            self._feeds.events.publish(message.kind, message)
            self._feeds.live.publish(message, is_history=is_history)
        else:
            if message.telemetry and not is_history:
                self._gateway.cluster.add_report(message.telemetry)
            entry = self._gateway.morphs.on_report(message, is_history=is_history)
            self._feeds.events.publish("morph", entry.as_json())
            self._feeds.live.publish_morph(entry)
            if message.kind == "transform" and message.state != "running":
                self._poll_now.set()  # the cards show another shape

    def _on_event(self, event: Event) -> None:
        """Act on an event. For a changed epoch the poll does: it knows whether the process died."""
        epoch = event.numbers.get("epoch")
        if event.kind in ("worker_lost", "worker_left") and epoch is not None:
            how = "left" if event.kind == "worker_left" else "died"
            self._losses.on_worker_gone(event.subject, int(epoch), RetryReason(event.kind))
            self._gateway.morphs.worker_gone(event.subject, int(epoch), how)
        if event.kind == "move_decided" and epoch is not None:
            place = InstanceAddress(event.subject, event.subject.rpartition("@")[2], int(epoch))
            tokens, queued = (int(event.numbers.get(name, 0)) for name in ("tokens", "queued_tokens"))
            self._delivery.attempts.move(place, tokens, queued)
            self._delivery.flush()
        if event.kind.startswith(("worker_", "epoch_", "policy_", "model_", "deployment_")):
            self._poll_now.set()

    async def _publish_events(self) -> None:
        while True:
            kind, subject, reason, numbers = await self._gateway.events.get()
            try:
                await self._bus.event(kind, subject, reason, **numbers)
            except (BusUnavailable, BusFull) as error:
                log.warning("the event %s of %s is lost: %s", kind, subject, error)
                await self._bus.wait_up()

    async def _publish_demand(self) -> None:
        """Publish what waits for a group at once, and repeat it: the controller may have restarted."""
        while True:
            await self._gateway.has_demand.wait()
            self._gateway.has_demand.clear()
            while demands := self._delivery.demands(self._gateway.id):
                try:
                    await self._bus.publish(self._bus.names.demand, *demands)
                except BusUnavailable:
                    await self._bus.wait_up()
                except BusFull as error:
                    log.debug("a demand is not published yet: %s", error)
                await asyncio.sleep(DEMAND_S)

    def _on_restart(self, restart: Restart) -> None:
        self._losses.on_restart(restart)
        self._had_lease = self._had_lease and not restart.data_lost  # handled here
        self._may_lack = True  # a replica that became the primary may lack the last writes
        self._poll_now.set()

    async def _poll_registry(self) -> None:
        while True:
            pause_s = POLL_BUSY_S if len(self._delivery.table) else POLL_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._poll_now.wait()
            self._poll_now.clear()
            try:
                await self._poll()
            except BusUnavailable:
                await self._bus.wait_up()

    async def _poll(self) -> None:
        gateway, cluster = self._gateway, self._gateway.cluster
        cluster.update(await self._bus.workers(), time.monotonic())
        gateway.models.preload()
        self._losses.on_poll()
        gateway.morphs.sweep(cluster.workers, 2 * gateway.settings.worker.lease_s)
        await self._poll_policy()
        gateway.catalogue = await self._bus.catalogue.read()
        gateway.leader = await who_leads(self._bus)
        cluster.awaited = awaited_models(gateway.catalogue)
        cluster.forget_retired(active_models(gateway.catalogue))
        self._feeds.live.changed()

    async def _poll_policy(self) -> None:
        """Read the policy. One that Redis lost is written again: manual must not become the default."""
        stored, known = await self._bus.read_policy(), self._gateway.policy
        if self._may_lack and stored.revision < known.revision:
            again = replace(known, revision=stored.revision + 1)
            with contextlib.suppress(BusFull):
                if await self._bus.write_policy(again):
                    why = "written again: Redis had lost it"
                    numbers = {"revision": float(again.revision)}
                    self._gateway.publish("policy_changed", "policy", why, numbers)
                    stored = again
        self._may_lack = False
        self._gateway.policy, cluster = stored, self._gateway.cluster
        cluster.max_tp, cluster.free_share = stored.max_tp, stored.scale_down_free
        cluster.can_split = stored.mode != "manual"

    async def _renew_lease(self) -> None:
        while True:
            try:
                was_held = await self._bus.renew_gateway(self._gateway.id, LEASE_S)
                if self._had_lease and not was_held:
                    log.warning("the lease had run out; all requests in flight are sent again")
                    self._losses.on_own_lease_lost()
                self._had_lease = True
            except BusUnavailable:
                await self._bus.wait_up()
                continue
            except BusFull as error:
                log.warning("the lease cannot be renewed: %s", error)
            await asyncio.sleep(LEASE_S / 3)

    async def _watch_keys(self) -> None:
        """Take the changes of the file of keys, and tell of each."""
        if not self._gateway.settings.gateway.keys_file:
            return
        while True:
            await asyncio.sleep(KEYS_S)
            try:
                changes = self._gateway.use_stored_keys()
            except KeysFileError as error:
                log.error("the API keys stay as they were: %s", error)
                continue
            for change in changes:
                log.info("%s %s: %s", change.kind.replace("_", " "), change.key.id, change.reason)
                self._gateway.publish(change.kind, change.key.id, change.reason, {})

    async def _tick(self) -> None:
        """Check deadlines while requests are in flight, and the counts when the last has ended."""
        was_busy = False
        while True:
            is_busy = len(self._delivery.table) > 0
            await asyncio.sleep(TICK_S if is_busy else 4 * TICK_S)
            away_s = self._gateway.bus_away_s()
            if is_busy:
                self._losses.tick()
                self._losses.on_bus_away(away_s, BUS_PATIENCE_S)
            elif was_busy:
                self._gateway.check_integrity()
            was_busy = is_busy

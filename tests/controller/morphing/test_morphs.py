"""Monitor and controller as they run, over a real Redis: scripted telemetry in, morph commands out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bus.client import Bus, BusUnavailable, connect
from bus.messages import Event, MorphReport, PageCounts, Swap, WorkerTelemetry
from bus.policy import Policy
from bus.settings import ControllerSettings, MonitorSettings, Settings
from controller import service as controller_service
from monitor import service as monitor_service
from tests.conftest import settings_of
from tests.support import service_loop
from tests.support.bus_samples import telemetry
from tests.support.fake_worker import FakeWorker
from tests.support.redis_process import RedisProcess

FAST = Settings(
    monitor=MonitorSettings(interval_s=0.05, idle_interval_s=0.1, window_s=1.0, smoothing=1.0, stale_s=0.5),
    controller=ControllerSettings(interval_s=0.1, grace_s=0.3),
)
REPORT_S = 0.03
COOLDOWN_S = 0.6
EAGER = Policy(revision=1, windows=3, cooldown_s=COOLDOWN_S)
CALM, BURST = 60, 95  # blocks used, of 100

controlling = partial(service_loop.running, controller_service.main, FAST)
monitoring = partial(service_loop.running, monitor_service.main, FAST)


class Device:
    """A worker with a script instead of a load. `used`: KV blocks; `silent`: no telemetry."""

    def __init__(self, bus: Bus, folder: Path) -> None:
        self.bus = bus
        self.worker = FakeWorker(bus, folder, reply=lambda _: [])
        self.used, self.silent = CALM, False

    async def report(self) -> None:
        while True:
            if not self.silent:
                with suppress(BusUnavailable):
                    await self.bus.publish(self.bus.names.telemetry, self._telemetry())
            await asyncio.sleep(REPORT_S)

    def _telemetry(self) -> WorkerTelemetry:
        one = telemetry(self.worker.id, self.worker.epoch, running=1)
        instance = replace(one.instances[0], id=self.worker.instance, kv_blocks=100, kv_used=self.used)
        return replace(one, instances=[instance], pages=PageCounts(budget=250, weights=40, kv=200, free=10))

    async def told(self, count: int = 1, within_s: float = 5.0) -> list[Any]:
        """The morphs it was told to make, when there are so many."""
        async with asyncio.timeout(within_s):
            while len(self.worker.morphs) < count:
                await asyncio.sleep(0.01)
        return self.worker.morphs


@asynccontextmanager
async def device_of(bus: Bus, folder: Path) -> AsyncIterator[Device]:
    device = Device(bus, folder)
    await device.worker.start()
    reports = asyncio.create_task(device.report())
    try:
        yield device
    finally:
        reports.cancel()
        await device.worker.die()


@pytest.fixture
async def device(bus: Bus, tmp_path: Path) -> AsyncIterator[Device]:
    """Served by a monitor and a controller."""
    async with device_of(bus, tmp_path) as one, monitoring(bus), controlling(bus):
        yield one


async def events_of(bus: Bus, kind: type[Any]) -> list[Any]:
    """All that were told so far."""
    async with bus.reader(bus.names.events, Event, MorphReport, start="0") as reader:
        return [message for _, message in await reader.read() if isinstance(message, kind)]


async def test_pressure_swaps_layers_and_the_event_says_why(bus: Bus, device: Device) -> None:
    await bus.write_policy(EAGER)
    await asyncio.sleep(0.4)
    assert device.worker.morphs == []  # calm
    device.used = BURST
    (swap,) = await device.told()
    assert isinstance(swap, Swap)
    assert (swap.instance, swap.epoch) == (device.worker.instance, device.worker.epoch)
    assert (swap.precision, swap.count, swap.layers) == ("int4", 1, [])
    (decided,) = [event for event in await events_of(bus, Event) if event.kind == "morph_decided"]
    assert (decided.morph_id, decided.subject) == (swap.id, device.worker.instance)
    assert decided.reason == (
        "KV use 0.95 is above 0.85: 1 layer more to int4 (0 of at most 1 below full; this reaches the limit)"
    )
    assert (decided.cause, decided.numbers["kv_usage"]) == ("kv_usage", 0.95)
    assert decided.numbers["windows"] >= 3
    assert decided.numbers["policy_revision"] == 1


async def test_pressure_that_stays_morphs_again_without_a_cool_down(bus: Bus, device: Device) -> None:
    await bus.write_policy(replace(EAGER, cooldown_s=3600.0))
    device.used = BURST
    async with asyncio.timeout(60):
        while len(device.worker.morphs) < 3:
            await asyncio.sleep(0.05)


async def test_nothing_morphs_while_one_is_in_flight(bus: Bus, device: Device) -> None:
    await bus.write_policy(EAGER)
    device.worker.outcome = None
    device.used = BURST
    (swap,) = await device.told()
    await asyncio.sleep(2 * COOLDOWN_S)
    assert device.worker.morphs == [swap]
    await device.worker.report(swap, "applied")
    await device.told(2)


async def test_a_policy_of_mode_manual_morphs_nothing_until_it_is_another(bus: Bus, device: Device) -> None:
    await bus.write_policy(replace(EAGER, mode="manual"))
    device.used = BURST
    await asyncio.sleep(1.0)
    assert device.worker.morphs == []
    await bus.write_policy(replace(EAGER, revision=2))
    await device.told()


async def test_stale_metrics_morph_nothing(bus: Bus, device: Device) -> None:
    """The worker lives (its lease is renewed) and says nothing; the monitor goes on publishing."""
    await bus.write_policy(replace(EAGER, windows=40))  # two seconds of pressure
    device.used = BURST
    await asyncio.sleep(0.3)
    device.silent = True
    await asyncio.sleep(2.5)
    assert device.worker.morphs == []
    device.silent = False
    assert await device.told()


async def test_a_controller_that_starts_again_knows_what_is_in_flight(bus: Bus, tmp_path: Path) -> None:
    await bus.write_policy(EAGER)
    async with device_of(bus, tmp_path) as device, monitoring(bus):
        device.worker.outcome = None
        async with controlling(bus):
            device.used = BURST
            (swap,) = await device.told()
        await device.worker.report(swap, "running")
        async with controlling(bus):
            await asyncio.sleep(1.0)
            assert device.worker.morphs == [swap]
            await device.worker.report(swap, "applied")
            await device.told(2)


async def test_a_draining_worker_is_left_alone(bus: Bus, device: Device) -> None:
    await bus.write_policy(EAGER)
    await bus.update_card(device.worker.card("draining"))
    device.used = BURST
    await asyncio.sleep(0.8)
    assert device.worker.morphs == []


async def test_the_policy_goes_on_after_redis_was_away(
    own_redis: Callable[..., RedisProcess], tmp_path: Path
) -> None:
    server = own_redis(append_only=True)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(settings_of(server.url)))
        await bus.write_policy(EAGER)
        device = await stack.enter_async_context(device_of(bus, tmp_path))
        await stack.enter_async_context(monitoring(bus))
        await stack.enter_async_context(controlling(bus))
        await asyncio.sleep(0.3)
        server.kill()
        await asyncio.sleep(0.3)
        server.start()
        await bus.wait_up()
        device.used = BURST
        await device.told(within_s=10)

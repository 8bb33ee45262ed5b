"""The controller as it runs, over a real Redis: what workers may do by themselves reaches them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from bus.client import Bus, connect
from bus.messages import Event
from bus.policy import Envelope, Policy
from bus.settings import ControllerSettings, MonitorSettings, Settings
from controller import service as controller_service
from tests.conftest import settings_of
from tests.support import service_loop
from tests.support.fake_worker import FakeWorker
from tests.support.metrics_samples import metrics_of
from tests.support.redis_process import RedisProcess

FAST = Settings(
    controller=ControllerSettings(interval_s=0.1, grace_s=0.3), monitor=MonitorSettings(stale_s=1.0)
)

controlling = partial(service_loop.running, controller_service.main, FAST)


@asynccontextmanager
async def worker_of(bus: Bus, folder: Path) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(bus, folder, reply=lambda _: [])
    await worker.start()
    try:
        yield worker
    finally:
        await worker.die()


@pytest.fixture
async def worker(bus: Bus, tmp_path: Path) -> AsyncIterator[FakeWorker]:
    """Served by a controller."""
    async with worker_of(bus, tmp_path) as one, controlling(bus):
        yield one


async def granted(worker: FakeWorker, count: int = 1, within_s: float = 10.0) -> Envelope:
    """The envelope with this number, when there are so many."""
    async with asyncio.timeout(within_s):
        while len(worker.envelopes) < count:
            await asyncio.sleep(0.01)
    return worker.envelopes[count - 1]


async def test_a_worker_hears_what_it_may_do_and_every_change_of_it(bus: Bus, worker: FakeWorker) -> None:
    first = await granted(worker)
    assert (first.instance, first.epoch) == (worker.instance, worker.epoch)
    assert first.policy == Policy().in_force()
    await bus.write_policy(Policy(revision=1, mode="manual"))
    assert (await granted(worker, 2)).policy.mode == "manual"
    await bus.write_policy(Policy(revision=2, mode="accuracy", loss_budget=0.5))
    changed = await granted(worker, 3)
    assert (changed.policy.revision, changed.policy.loss_budget) == (2, 0.5)
    await asyncio.sleep(1.2)  # two looks: nothing has changed
    assert len(worker.envelopes) == 3


async def test_a_worker_that_comes_again_hears_it_again(bus: Bus, worker: FakeWorker) -> None:
    await granted(worker)
    await worker.die()
    await worker.start()
    async with asyncio.timeout(10):
        while worker.envelopes[-1].epoch != worker.epoch:
            await asyncio.sleep(0.01)


async def test_a_worker_hears_of_pressure_that_is_expected_once_forecasts_were_right(
    bus: Bus, worker: FakeWorker
) -> None:
    await granted(worker)
    async with asyncio.timeout(30), bus.reader(bus.names.events, Event) as events:
        await events.open()
        while not any(one.expected_blocks for one in worker.envelopes):
            for used in (10, 20, 30, 40, 50, 60, 70, 80, 90):  # of 100
                await bus.publish(bus.names.metrics, metrics_of(worker.instance, kv_used=used, kv_blocks=100))
                await asyncio.sleep(0.05)
        (_, first), *_ = await events.read()
    assert (first.kind, first.subject, first.numbers["is_right"]) == ("forecast_scored", worker.instance, 1)
    assert max(one.expected_blocks for one in worker.envelopes) > 85


async def test_what_is_expected_is_over_when_the_monitor_falls_silent(bus: Bus, worker: FakeWorker) -> None:
    await granted(worker)
    async with asyncio.timeout(30):
        while not worker.envelopes[-1].expected_blocks:
            for used in (10, 20, 30, 40, 50, 60, 70, 80, 90):  # of 100
                await bus.publish(bus.names.metrics, metrics_of(worker.instance, kv_used=used, kv_blocks=100))
                await asyncio.sleep(0.05)
                if worker.envelopes[-1].expected_blocks:
                    break
        while worker.envelopes[-1].expected_blocks:
            await asyncio.sleep(0.05)


async def test_a_draining_worker_is_left_alone(bus: Bus, worker: FakeWorker) -> None:
    await granted(worker)
    await bus.update_card(worker.card("draining"))
    await bus.write_policy(Policy(revision=1, mode="manual"))
    await asyncio.sleep(1.2)
    assert len(worker.envelopes) == 1


async def test_a_controller_that_starts_again_says_it_again(bus: Bus, tmp_path: Path) -> None:
    async with worker_of(bus, tmp_path) as worker:
        for times in (1, 2):
            async with controlling(bus):
                await granted(worker, times)


async def test_workers_hear_changes_after_redis_was_away(
    own_redis: Callable[..., RedisProcess], tmp_path: Path
) -> None:
    server = own_redis(append_only=True)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(settings_of(server.url)))
        worker = await stack.enter_async_context(worker_of(bus, tmp_path))
        await stack.enter_async_context(controlling(bus))
        await granted(worker)
        server.kill()
        await asyncio.sleep(0.3)
        server.start()
        await bus.wait_up()
        await bus.write_policy(Policy(revision=1, mode="manual"))
        async with asyncio.timeout(10):
            while worker.envelopes[-1].policy.mode != "manual":
                await asyncio.sleep(0.01)

"""The controller as it runs: leases in Redis, events out, and what the dead left put away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest

from bus.client import Bus, connect
from bus.messages import Event, Submit
from bus.names import consumer
from bus.settings import ControllerSettings, Settings
from controller.membership import cleanup, watcher
from controller.membership.cleanup import Sweeper, led_by
from controller.service import main
from tests.conftest import settings_of
from tests.support import service_loop
from tests.support.bus_samples import card, step_output, submit
from tests.support.redis_process import RedisProcess

FAST = Settings(controller=ControllerSettings(interval_s=0.1, grace_s=0.3))
LEASE_S = 0.4

running = partial(service_loop.running, main, FAST)


class Told:
    """Reads the events from the beginning."""

    def __init__(self, bus: Bus) -> None:
        self._reader = bus.reader(bus.names.events, Event, start="0")
        self.events: list[Event] = []

    async def until(self, kind: str, within_s: float = 5.0) -> Event:
        async with asyncio.timeout(within_s):
            while not (found := [event for event in self.events if event.kind == kind]):
                self.events += [event for _, event in await self._reader.read()]
        return found[-1]

    async def aclose(self) -> None:
        await self._reader.aclose()


@pytest.fixture
async def told(bus: Bus) -> AsyncIterator[Told]:
    events = Told(bus)
    yield events
    await events.aclose()


async def keep_alive(bus: Bus, worker: str, epoch: int) -> None:
    while True:
        await bus.renew_lease(worker, epoch, LEASE_S)
        await asyncio.sleep(LEASE_S / 3)


async def test_a_worker_that_stops_renewing_is_declared_lost_soon_and_its_pending_entries_end(
    bus: Bus, told: Told
) -> None:
    stream = bus.names.requests("demo@w0")
    async with running(bus), bus.group_reader(stream, consumer("w0", 5), Submit) as group:
        await bus.register_worker(card("w0", 5), LEASE_S)
        heart = asyncio.create_task(keep_alive(bus, "w0", 5))
        await group.open()
        await bus.publish(stream, submit("r1", epoch=5))
        await group.read()
        assert (await told.until("worker_joined")).numbers == {"epoch": 5}
        await asyncio.sleep(2 * LEASE_S)
        heart.cancel()
        died = time.monotonic()
        event = await told.until("worker_lost")
        assert time.monotonic() - died < LEASE_S + 0.35
        assert (event.subject, event.numbers) == ("w0", {"epoch": 5})
        async with asyncio.timeout(2):
            while await bus.length(stream):
                await asyncio.sleep(0.02)
    assert [event.kind for event in told.events] == ["worker_joined", "worker_lost"]


async def test_a_clean_exit_is_told_as_one(bus: Bus, told: Told) -> None:
    async with running(bus):
        await bus.register_worker(card("w0", 5), 10)
        await told.until("worker_joined")
        await bus.drop_lease("w0", 5)
        assert (await told.until("worker_left")).numbers == {"epoch": 5}
    assert "worker_lost" not in [event.kind for event in told.events]


async def test_a_new_incarnation_is_told_with_the_one_it_replaces_whose_entries_end(
    bus: Bus, told: Told
) -> None:
    stream = bus.names.requests("demo@w0")
    async with running(bus), bus.group_reader(stream, consumer("w0", 5), Submit) as old:
        await bus.register_worker(card("w0", 5), 10)
        await old.open()
        await bus.publish(stream, submit("r1", epoch=5))
        await old.read()
        await told.until("worker_joined")
        await bus.register_worker(card("w0", 6), 10)
        async with bus.group_reader(stream, consumer("w0", 6), Submit) as new:
            await bus.publish(stream, submit("r2", epoch=6))
            ((entry_id, _),) = await new.read()
            assert (await told.until("epoch_changed")).numbers == {"epoch": 6, "previous_epoch": 5}
            async with asyncio.timeout(2):
                while await bus.length(stream) > 1:
                    await asyncio.sleep(0.02)
            await new.ack([entry_id])


async def test_a_worker_that_died_while_no_controller_was_there_is_declared_lost(
    bus: Bus, told: Told
) -> None:
    await bus.register_worker(card("w0", 5), 0.01)
    await asyncio.sleep(0.05)
    async with running(bus):
        assert (await told.until("worker_lost")).numbers == {"epoch": 5}


async def test_nobody_dies_of_a_redis_that_was_frozen_or_came_back_empty(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    async with connect(settings_of(server.url)) as bus, running(bus):
        await bus.register_worker(card("w0", 5), LEASE_S)
        heart = asyncio.create_task(keep_alive_through_outages(bus))
        told = Told(bus)
        await told.until("worker_joined")
        server.freeze()
        await asyncio.sleep(
            1.5
        )  # longer than the lease and than a slow picture, shorter than the time limits
        server.thaw()
        assert (await told.until("epoch_changed")).numbers["previous_epoch"] == 5
        await asyncio.sleep(0.5)
        server.kill()
        server.start()
        assert (await told.until("bus_restarted")).numbers == {"data_lost": 1}
        await asyncio.sleep(1.0)
        heart.cancel()
        assert "worker_lost" not in [event.kind for event in told.events]
        assert "worker_left" not in [event.kind for event in told.events]
        await told.aclose()


async def keep_alive_through_outages(bus: Bus) -> None:
    """Act as a worker: renew, and register as a new incarnation when the lease is lost."""
    epoch = 5
    while True:
        await bus.wait_up()
        try:
            if not await bus.renew_lease("w0", epoch, LEASE_S):
                epoch += 1
                await bus.register_worker(card("w0", epoch), LEASE_S)
        except Exception:  # noqa: BLE001  whatever the outage does to it, the worker tries again
            await asyncio.sleep(0.01)
        await asyncio.sleep(LEASE_S / 3)


async def test_cards_and_streams_of_the_long_dead_are_removed(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "GONE_AFTER_S", 0.3)
    monkeypatch.setattr(cleanup, "SWEEP_EVERY_S", 0.1)
    await bus.register_worker(card("w0", 5), 0.01)
    await bus.register_worker(card("w1", 5), 60)
    await bus.renew_gateway("alive", 60)
    owned = [bus.names.requests("demo@w1"), bus.names.control("w1"), bus.names.tokens("alive")]
    orphans = [bus.names.requests("demo@w0"), bus.names.control("w0"), bus.names.tokens("dead")]
    for stream in (*owned, *orphans):
        await bus.publish(stream, step_output())
    async with running(bus), asyncio.timeout(5):
        while any([await bus.length(stream) for stream in orphans]):
            await asyncio.sleep(0.05)
        while len(await bus.members()) > 1:
            await asyncio.sleep(0.05)
    assert all([await bus.length(stream) for stream in owned])
    assert [member.id for member in await bus.members()] == ["w1"]


async def test_a_stream_whose_owner_came_back_in_time_stays(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "SWEEP_EVERY_S", 0)
    sweeper = Sweeper(bus, after_s=10)
    stream = bus.names.control("w0")
    await bus.publish(stream, step_output())
    await sweeper.sweep(100)
    await bus.register_worker(card("w0"), 60)
    await sweeper.sweep(105)  # seen with its owner: the count begins anew
    await bus.drop_lease("w0", 1)
    await sweeper.sweep(111)
    assert await bus.length(stream) == 1
    await sweeper.sweep(121)
    assert await bus.length(stream) == 0


async def test_events_of_a_full_redis_wait_until_it_has_room(own_redis: Callable[..., RedisProcess]) -> None:
    server = own_redis("--maxmemory-policy", "noeviction")
    async with connect(settings_of(server.url)) as bus, running(bus):
        await bus.register_worker(card("w0", 5), 0.5)
        told = Told(bus)
        await told.until("worker_joined")
        with server.client() as client:
            client.config_set("maxmemory", 1)
            await asyncio.sleep(1.2)
            assert await bus.length(bus.names.events) == 1
            client.config_set("maxmemory", 0)
        assert (await told.until("worker_lost")).numbers == {"epoch": 5}
        await told.aclose()


def test_a_worker_leads_the_instances_whose_first_worker_it_is() -> None:
    assert led_by(card("w0")) == {"demo@w0"}

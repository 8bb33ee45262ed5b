"""A worker among the others: its epoch, its lease and its card, on a Redis that refuses and forgets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from bus.client import Bus, BusUnavailable, connect
from bus.errors import NameTaken, RedisForbidden
from bus.settings import RedisSettings, Settings, WorkerSettings
from tests.conftest import settings_of
from tests.support.bus_samples import card
from tests.support.redis_process import RedisProcess
from worker.deploy.model_host import ModelHost
from worker.service.loading import Progress
from worker.service.membership import Membership
from worker.service.tasks import end
from worker.service.worker import serve

LEASE_S = 0.6


@contextlib.asynccontextmanager
async def member(bus: Bus) -> AsyncIterator[Membership]:
    membership = Membership(bus, card("w0", 0), LEASE_S)
    await membership.join()
    renewal = asyncio.create_task(membership.run())
    yield membership
    await end(renewal)


async def until_state(bus: Bus, state: str) -> None:
    async with asyncio.timeout(5):
        while [live.card.state for live in await bus.workers()] != [state]:
            await asyncio.sleep(0.02)


async def test_a_card_that_a_full_redis_refused_is_shown_later(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis("--maxmemory-policy", "noeviction")
    async with connect(settings_of(server.url)) as bus, member(bus) as membership:
        with server.client() as client:
            client.config_set("maxmemory", "1")
            await membership.update(state="draining")
            await asyncio.sleep(LEASE_S)
            await until_state(bus, "serving")
            client.config_set("maxmemory", "0")
        await until_state(bus, "draining")


async def test_a_card_whose_update_met_no_redis_is_shown_later(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object) -> bool:
        raise BusUnavailable("away")

    async with member(bus) as membership:
        with monkeypatch.context() as patch:
            patch.setattr(bus, "update_card", away)
            await membership.update(state="draining")
        await until_state(bus, "draining")


async def test_of_two_workers_with_one_name_the_second_is_refused_by_name(
    bus: Bus, redis_settings: RedisSettings
) -> None:
    first = Membership(bus, card("w0", 0), 0.6)
    await first.join()
    renewing = asyncio.ensure_future(first.run())
    async with connect(redis_settings, source="second") as other:
        second = Membership(other, card("w0", 0), 0.6)
        with pytest.raises(NameTaken, match=r"another worker is called 'w0' and lives.*INSTAR_WORKER__ID"):
            await second.join()
        await second.leave()
        assert [live.epoch for live in await bus.workers()] == [first.epoch]
        # One that died is no hindrance, though its lease has not run out.
        renewing.cancel()
        await second.join()
        assert second.epoch > first.epoch
        # And where it was only stopped, it ends when it goes on.
        renewing_second = asyncio.ensure_future(second.run())
        with pytest.raises(NameTaken):
            await asyncio.wait_for(first.run(), 5)
        assert [live.epoch for live in await bus.workers()] == [second.epoch]
        renewing_second.cancel()


async def test_an_epoch_is_above_the_one_before_though_the_clock_was_set_back(bus: Bus) -> None:
    ahead = time.time_ns() // 1_000_000 + 3_600_000
    await bus.register_worker(card("w0", ahead), lease_s=0.01)
    async with member(bus) as membership:
        assert membership.epoch == ahead + 1
        await bus.run(lambda client: client.delete(bus.names.lease("w0")))
        async with asyncio.timeout(5):
            while membership.epoch == ahead + 1:
                await asyncio.sleep(0.02)
        assert membership.epoch == ahead + 2


async def test_a_lease_is_longer_while_loading_and_short_as_soon_as_that_is_over(bus: Bus) -> None:
    membership = Membership(bus, card("w0", 0, state="loading"), LEASE_S)
    await membership.join()
    (live,) = await bus.workers()
    assert live.lease_ms > 5 * LEASE_S * 1000
    renewal = asyncio.create_task(membership.run())
    await membership.update(state="serving")
    await asyncio.sleep(LEASE_S / 4)
    (live,) = await bus.workers()
    assert live.lease_ms <= LEASE_S * 1000
    await membership.may_publish()
    await end(renewal)


def endless_load(settings: WorkerSettings, worker: str, progress: Progress) -> ModelHost:
    while True:
        progress("loading")
        time.sleep(0.01)


async def test_a_renewal_that_is_forbidden_ends_the_worker(own_redis: Callable[..., RedisProcess]) -> None:
    server = own_redis()
    redis = settings_of(server.url)
    async with connect(redis) as bus:
        settings = Settings(redis=redis, worker=WorkerSettings(id="w0", lease_s=LEASE_S))
        task = asyncio.create_task(serve(settings, bus, asyncio.Event(), endless_load))
        await until_state(bus, "loading")
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval")
        with pytest.raises(RedisForbidden):
            await asyncio.wait_for(task, 5)


async def test_sigterm_is_heard_while_redis_is_away_at_the_start(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    redis = settings_of(server.url)
    async with connect(redis) as bus:
        server.kill()
        stop = asyncio.Event()
        settings = Settings(redis=redis, worker=WorkerSettings(id="w0", lease_s=LEASE_S))
        task = asyncio.create_task(serve(settings, bus, stop, endless_load))
        await asyncio.sleep(0.3)
        assert not task.done()
        stop.set()
        await asyncio.wait_for(task, 2)


async def test_a_card_is_shown_again_when_another_version_of_the_schema_is_written(bus: Bus) -> None:
    async def written_in() -> int:
        data: Any = await bus.run(lambda client: client.get(bus.names.card("w0")))
        return int(msgspec.msgpack.decode(data)[0])

    async with member(bus):
        assert await written_in() == 2
        for version in (1, 2):
            await bus.run(lambda client, version=version: client.set(bus.names.schema, version))  # type: ignore[misc]
            async with asyncio.timeout(5):
                while await written_in() != version:
                    await asyncio.sleep(0.05)

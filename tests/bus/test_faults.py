"""The bus on a Redis that dies, forgets, freezes, fills up, and on a bad road to it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bus.client import Bus, BusFull, BusUnavailable, Restart, connect
from bus.codec import encode
from bus.messages import Event, StepOutput, Submit
from bus.names import GROUP
from bus.pending import discard_pending
from tests.conftest import settings_of
from tests.faults.proxy import FaultProxy
from tests.support.bus_samples import card, event, step_output, submit
from tests.support.redis_process import RedisProcess

FILL_AND_READ = """
for _ = 1, 1000 do redis.call('XADD', KEYS[1], '*', 'm', ARGV[1]) end
redis.call('XREADGROUP', 'GROUP', ARGV[2], ARGV[3], 'COUNT', 1000, 'STREAMS', KEYS[1], '>')
"""

Starter = Callable[..., RedisProcess]


@asynccontextmanager
async def bus_at(url: str) -> AsyncIterator[tuple[Bus, list[Restart]]]:
    """Start a bus and collect the restarts that it reports."""
    restarts: list[Restart] = []
    bus = connect(settings_of(url), source="test")
    bus.on_restart(restarts.append)
    async with bus:
        yield bus, restarts


async def until(what: str, true: Callable[[], bool], within_s: float = 5.0) -> None:
    try:
        async with asyncio.timeout(within_s):
            while not true():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"waited {within_s} s for {what}") from None


async def publish_when_up(bus: Bus, stream: str, message: object) -> None:
    while True:
        await bus.wait_up()
        try:
            return await bus.publish(stream, message)
        except BusUnavailable:
            continue


async def test_a_lost_reply_writes_one_entry_and_is_told(redis_server: RedisProcess) -> None:
    with FaultProxy(redis_server.port) as proxy:
        async with bus_at(proxy.url) as (bus, _):
            stream = bus.names.requests("demo@w0")
            proxy.harm(swallow_xadd_replies=1)
            with pytest.raises(BusUnavailable):
                await bus.publish(stream, submit())
            await bus.wait_up()
            assert await bus.length(stream) == 1
            await bus.publish(stream, submit())  # the sender's own decision: the same id and attempt
            assert await bus.length(stream) == 2


async def test_a_redis_that_comes_back_empty_is_told_once_and_readers_go_on(own_redis: Starter) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, restarts):
        stream = bus.names.requests("demo@w0")
        async with (
            bus.reader(bus.names.events, Event) as reader,
            bus.group_reader(stream, "a", Submit) as group,
        ):
            await reader.open()
            await group.open()
            event_read = asyncio.create_task(reader.next_batch())
            request_read = asyncio.create_task(group.next_batch())
            await asyncio.sleep(0.05)
            server.kill()
            await until("the loss to be noticed", lambda: not bus.up)
            began = time.monotonic()
            with pytest.raises(BusUnavailable, match="has not answered for"):
                await bus.publish(stream, submit())
            assert time.monotonic() - began < 0.05  # at once, without another attempt to connect
            server.start()
            await publish_when_up(bus, bus.names.events, event("after"))
            await publish_when_up(bus, stream, submit("after"))
            async with asyncio.timeout(5):
                ((_, told),) = await event_read
                ((_, request),) = await request_read
            assert (told.kind, request.request_id) == ("after", "after")
        assert [restart.data_lost for restart in restarts] == [True]


async def test_a_redis_with_an_append_only_file_keeps_groups_and_what_is_pending(own_redis: Starter) -> None:
    server = own_redis("--appendfsync", "always", append_only=True)
    async with bus_at(server.url) as (bus, restarts):
        stream = bus.names.requests("demo@w0")
        async with bus.group_reader(stream, "a", Submit) as group:
            await group.open()
            await bus.publish(stream, submit("pending"), submit("pending too"))
            ids = [entry_id for entry_id, _ in await group.read()]
            server.kill()
            server.start()
            await until("the restart to be told", lambda: len(restarts) == 1)
            assert restarts[0].data_lost is False
            await group.ack(ids)
            assert await bus.length(stream) == 0


async def test_a_flush_is_told_although_no_connection_broke(own_redis: Starter) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, restarts):
        with server.client() as client:
            client.flushall()
        await until("the flush to be told", lambda: len(restarts) == 1)
        assert restarts[0].data_lost
        assert bus.up


async def test_two_services_name_the_same_data_set(own_redis: Starter) -> None:
    server = own_redis()
    settings = settings_of(server.url)
    async with connect(settings) as one, connect(settings) as other:
        told: list[Restart] = []
        one.on_restart(told.append)
        other.on_restart(told.append)
        with server.client() as client:
            client.flushall()
        await until("both to tell", lambda: len(told) == 2)
        await asyncio.sleep(0.2)
        assert one._identity == other._identity
        assert len(told) == 2


async def test_a_reader_whose_position_is_ahead_of_a_new_server_starts_over(own_redis: Starter) -> None:
    server = own_redis()
    async with (
        bus_at(server.url) as (bus, restarts),
        bus.reader(bus.names.events, Event, start="0") as reader,
    ):
        with server.client() as client:  # as if the old server's clock had been far ahead
            client.xadd(bus.names.events, {b"m": encode(event("old"))}, id="99999999999999-0")
            assert len(await reader.read()) == 1
            client.flushall()
        await until("the flush to be told", lambda: len(restarts) == 1)
        await bus.publish(bus.names.events, event("new"))
        async with asyncio.timeout(3):
            ((_, told),) = await reader.next_batch()
        assert told.kind == "new"


async def test_an_outage_is_one_line_however_many_wait(
    own_redis: Starter, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, _):
        readers = [bus.reader(bus.names.tokens(str(i)), StepOutput) for i in range(10)]
        tasks = [asyncio.create_task(reader.next_batch()) for reader in readers]
        await asyncio.sleep(0.2)
        server.kill()
        await asyncio.sleep(1.5)
        server.start()
        await asyncio.wait_for(bus.wait_up(), 5)
        await asyncio.sleep(0.3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for reader in readers:
            await reader.aclose()
    assert sum("lost Redis" in record.message for record in caplog.records) == 1
    assert len(caplog.records) == 3  # lost it, it lost its data, it is back


async def test_who_tries_again_at_every_recovery_is_slowed_down(bus: Bus) -> None:
    """A refusal that lasts (MISCONF, BUSY) while Redis answers: no sender may spin on it."""
    tries = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(1.0):
            while True:
                await bus.wait_up()
                bus.failed(BusUnavailable("refused for now"))
                tries += 1
    assert 2 <= tries <= 6


async def test_a_picture_of_an_emptied_redis_is_not_handed_out_before_the_loss_is_told(
    own_redis: Starter,
) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, restarts):
        await bus.register_worker(card("w0"), lease_s=30)
        server.kill()
        server.start()
        try:
            assert await bus.members() == []
        except BusUnavailable:
            await bus.wait_up()
        assert [restart.data_lost for restart in restarts] == [True]


async def test_killed_connections_are_made_again_and_nothing_is_told(own_redis: Starter) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, restarts), bus.reader(bus.names.events, Event) as reader:
        await reader.open()
        for round_number in range(3):
            read = asyncio.create_task(reader.next_batch())
            await asyncio.sleep(0.05)
            with server.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await publish_when_up(bus, bus.names.events, event(str(round_number)))
            async with asyncio.timeout(3):
                assert (await read)[0][1].kind == str(round_number)
        assert restarts == []


async def test_a_frozen_redis_fails_within_the_time_limits_and_loses_nothing(own_redis: Starter) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, restarts), bus.reader(bus.names.events, Event) as reader:
        await reader.open()
        read = asyncio.create_task(reader.next_batch())
        await asyncio.sleep(0.05)
        server.freeze()
        began = time.monotonic()
        with pytest.raises(BusUnavailable):
            await bus.publish(bus.names.events, event("maybe"))
        assert time.monotonic() - began < 3.5  # socket timeout 2 s, the guard 1 s later
        await asyncio.sleep(1.0)
        server.thaw()
        await publish_when_up(bus, bus.names.events, event("surely"))
        async with asyncio.timeout(5):
            kinds = [message.kind for _, message in await read]
            while "surely" not in kinds:
                kinds += [message.kind for _, message in await reader.read()]
        # the one that failed arrived after all: that is why receivers go by attempt, epoch and index
        assert kinds == ["maybe", "surely"]
        assert restarts == []


async def test_a_road_that_swallows_everything_is_noticed_by_writers_and_readers(
    redis_server: RedisProcess,
) -> None:
    with FaultProxy(redis_server.port) as proxy:
        async with bus_at(proxy.url) as (bus, _), bus.reader(bus.names.events, Event) as reader:
            await reader.open()
            read = asyncio.create_task(reader.next_batch())
            await asyncio.sleep(0.05)
            proxy.harm(blackhole=True)
            await until("the watcher to give up", lambda: not bus.up, within_s=8)
            proxy.harm()
            await publish_when_up(bus, bus.names.events, event("after"))
            async with asyncio.timeout(5):
                assert (await read)[-1][1].kind == "after"


async def test_a_slow_road_only_delays(redis_server: RedisProcess) -> None:
    with FaultProxy(redis_server.port) as proxy:
        async with bus_at(proxy.url) as (bus, restarts):
            proxy.harm(delay_s=0.1)
            stream = bus.names.tokens("g")
            async with bus.reader(stream, StepOutput, start="0") as reader:
                for index in range(3):
                    await bus.publish(stream, step_output(index=index))
                indices = [message.deltas[0].index for _, message in await reader.read()]
            assert indices == [0, 1, 2]
            assert restarts == []


async def test_a_full_redis_refuses_writes_and_recovers_when_trimmed(own_redis: Starter) -> None:
    server = own_redis("--maxmemory", "6mb", "--maxmemory-policy", "noeviction")
    async with bus_at(server.url) as (bus, restarts):
        requests, tokens = bus.names.requests("demo@w0"), bus.names.tokens("g")
        await bus.register_worker(card("w0", 5), lease_s=30)
        await bus.renew_gateway("g", lease_s=30)
        async with bus.group_reader(requests, "a", Submit) as group:
            await group.open()
            await bus.publish(requests, submit())
            ((entry_id, _),) = await group.read()
            with pytest.raises(BusFull):
                for _ in range(10_000):
                    await bus.publish(tokens, step_output(256))
            with server.client() as client:  # full for small ones as well, whatever buffers come and go
                client.config_set("maxmemory", client.info("memory")["used_memory"] - 1_000_000)
            full_length = await bus.length(tokens)

            ending = bus.batch()
            ending.publish(tokens, step_output())
            ending.ack(requests, entry_id)
            with pytest.raises(BusFull):
                await ending.send()
            assert await bus.length(requests) == 1  # none of a refused batch was carried out
            with pytest.raises(BusFull):
                await bus.register_worker(card("w1"), lease_s=30)
            with pytest.raises(BusFull):
                await bus.update_card(card("w0", 5, state="draining"))

            # what keeps the service alive works without memory
            assert await bus.renew_lease("w0", 5, lease_s=30)
            await bus.renew_gateway("g", lease_s=30)
            assert [worker.epoch for worker in await bus.workers()] == [5]
            await group.ack([entry_id])
            assert bus.up

            async with bus.reader(tokens, StepOutput, start="0", count=full_length) as reader:
                batch_read = await reader.read()
            await bus.trim(tokens, before=batch_read[-1][0])
            await bus.publish(tokens, step_output())
            assert await bus.length(tokens) == 2
        assert restarts == []


async def test_a_hundred_thousand_pending_entries_are_ended_in_bounded_time(own_redis: Starter) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, _):
        stream = bus.names.requests("demo@w0")
        async with bus.group_reader(stream, "w0:2", Submit) as group:
            await group.open()
            with server.client() as client:
                fill = client.register_script(FILL_AND_READ)
                for _ in range(100):
                    fill(keys=[stream], args=[encode(submit()), GROUP, "w0:1"])
            await bus.publish(stream, submit("new", epoch=2))
            began = time.monotonic()
            assert await group.claim_all() == 100_000
            assert time.monotonic() - began < 10
            assert [message.request_id for _, message in await group.read()] == ["new"]
            assert await bus.length(stream) == 1


async def test_entries_of_a_consumer_that_was_removed_with_them_do_not_stay_for_ever(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    async with bus.group_reader(stream, "w0:1", Submit) as old:
        await old.open()
        await bus.publish(stream, submit("r1"), submit("r2"))
        (first_id, _), _ = await old.read()
        await bus.run(lambda client: client.xgroup_delconsumer(stream, GROUP, "w0:1"))
        await old.ack([first_id])  # its list is gone; the entry goes all the same
        assert await bus.length(stream) == 1
    await bus.publish(stream, submit("r3"))
    async with bus.group_reader(stream, "w0:2", Submit) as new:
        assert await new.claim_all() == 1
        assert [message.request_id for _, message in await new.read()] == ["r3"]
        assert await bus.length(stream) == 1


async def test_what_was_delivered_on_a_connection_that_broke_is_read_again(own_redis: Starter) -> None:
    server = own_redis()
    async with bus_at(server.url) as (bus, _):
        stream = bus.names.requests("demo@w0")
        async with bus.group_reader(stream, "w0:1", Submit, count=2) as group:
            await group.open()
            await bus.publish(stream, *(submit(f"lost-{i}") for i in range(3)))
            with server.client() as client:  # delivered to this consumer, and never received
                client.xreadgroup(GROUP, "w0:1", {stream: ">"})
                read = asyncio.create_task(group.next_batch())
                await asyncio.sleep(0.1)
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            async with asyncio.timeout(5):
                batch = await read
                await bus.wait_up()
                await bus.publish(stream, submit("new"))
                batch += await group.next_batch() + await group.next_batch()
            assert [message.request_id for _, message in batch] == ["lost-0", "lost-1", "lost-2", "new"]
            assert await group.read() == []


async def test_reaping_a_dead_incarnation_leaves_its_successor_alone(bus: Bus) -> None:
    stream = bus.names.requests("demo@w0")
    async with (
        bus.group_reader(stream, "w0:1", Submit) as old,
        bus.group_reader(stream, "w0:2", Submit) as new,
    ):
        await old.open()
        await bus.publish(stream, submit("r1"))
        await old.read()
        await bus.publish(stream, submit("r2"))
        ((entry_id, _),) = await new.read()
        assert await discard_pending(bus, stream, "w0:1") == 1
        assert await discard_pending(bus, stream, "w0:1") == 0
        assert await bus.length(stream) == 1
        await new.ack([entry_id])
        assert await bus.length(stream) == 0

"""The version that all processes write, as the controller chooses it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bus.client import Bus, connect
from bus.messages import READS, SCHEMA_VERSION, Event
from bus.settings import RedisSettings
from controller.failures import Failures
from controller.membership.versions import SchemaChooser
from tests.support.bus_samples import card


@pytest.fixture
async def monitor(redis_settings: RedisSettings, bus: Bus) -> AsyncIterator[Bus]:
    """A monitor of this release."""
    async with connect(redis_settings, role="monitor") as started:
        yield started


async def named(bus: Bus) -> bytes:
    found: Any = await bus.run(lambda client: client.get(bus.names.schema))
    return bytes(found or b"")


async def events(bus: Bus) -> list[Event]:
    async with bus.reader(bus.names.events, Event, start="0") as reader:
        return [event for _, event in await reader.read()]


async def test_the_version_goes_down_for_an_older_worker_and_up_when_it_has_left(
    bus: Bus, monitor: Bus
) -> None:
    chooser = SchemaChooser(bus, Failures(bus))
    await bus.register_worker(card("new"), 60)
    await bus.register_worker(replace(card("old", 5), reads=(1,)), 60)
    await chooser.step()
    assert (await named(bus), bus.schema) == (b"1", 1)
    await chooser.step()
    await bus.drop_lease("old", 5)
    await chooser.step()
    assert (await named(bus), bus.schema) == (b"2", 2)
    told = [(event.kind, event.numbers, event.reason) for event in await events(bus)]
    assert told == [
        ("schema_changed", {"version": 1, "previous_version": 2}, "the newest that worker old reads"),
        ("schema_changed", {"version": 2, "previous_version": 1}, "all read it"),
    ]
    async with asyncio.timeout(5):  # a process that waited all the time
        while monitor.schema != 2:
            await asyncio.sleep(0.02)


async def test_it_does_not_go_up_before_a_monitor_and_every_gateway_reads_it(
    bus: Bus, redis_settings: RedisSettings
) -> None:
    chooser, key = SchemaChooser(bus, Failures(bus)), bus.names.gateway_lease("g0")
    await bus.run(lambda client: client.set(bus.names.schema, 1))
    await bus.run(lambda client: client.set(key, b"1", px=60_000))
    await bus.doubt()
    await chooser.step()
    assert await named(bus) == b"1"
    async with connect(redis_settings, role="monitor"):
        await chooser.step()
        assert await named(bus) == b"1"
        await bus.renew_gateway("g0")  # it was replaced
        await chooser.step()
        assert await named(bus) == b"2"


async def test_who_reads_nothing_of_it_is_named_once_and_nothing_changes(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    fields = msgspec.to_builtins(card("later"), builtin_types=(bytes,)) | {"reads": [3, 4]}
    await bus.register_worker(card("later"), 60)
    later = msgspec.msgpack.encode([SCHEMA_VERSION, "WorkerCard", fields])
    await bus.run(lambda client: client.set(bus.names.card("later"), later))
    chooser = SchemaChooser(bus, Failures(bus))
    with caplog.at_level(logging.ERROR, "controller"):
        await chooser.step()
        await chooser.step()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "this controller reads 1 and 2, but not worker later (reads 3 and 4); stop these" in line
    assert (bus.schema, await events(bus)) == (READS[-1], [])

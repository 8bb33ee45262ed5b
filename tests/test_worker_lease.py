"""A worker that lost its lease fences itself: nothing of the old epoch runs, goes out or is acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bus.client import Bus, RedisPassword, connect
from bus.messages import Submit
from bus.names import consumer
from bus.settings import RedisSettings
from tests.bus_samples import submit
from tests.engine_toys import continuation
from tests.worker_bench import INSTANCE, Bench, running
from worker.service.intake import Intake
from worker.service.ledger import Ledger

pytest_plugins = ["tests.worker_fixtures"]


async def test_a_worker_whose_lease_was_lost_drops_everything_and_joins_as_somebody_new(bench: Bench) -> None:
    bench.model.step_s = 0.02
    before = await bench.epoch()
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    lease = bench.bus.names.lease("w0")
    await bench.bus.link.run(lambda client: client.delete(lease))

    async def is_somebody_new() -> bool:
        live = await bench.bus.workers()
        return bool(live) and live[0].epoch > before

    await bench.until(is_somebody_new)
    blocks = bench.instance.scheduler.blocks
    await bench.until(lambda: blocks.num_free == blocks.capacity)
    said = len(bench.deltas("a"))
    await bench.until(bench.is_settled)
    await bench.submit("b", [2], 5)
    await bench.until(lambda: bench.end("b"))
    assert bench.tokens("b") == continuation([2], 5)
    assert len(bench.deltas("a")) == said


async def test_a_batch_that_an_earlier_epoch_read_is_not_run(bus: Bus) -> None:
    """Its reader is cancelled a moment after the epoch changed."""
    intake = Intake(bus, "w0", lambda: 2, Ledger(), Unusable(), Unusable())  # type: ignore[arg-type]
    stream = bus.names.requests("other@w0")
    async with bus.group_reader(stream, consumer("w0", 1), Submit) as reader:
        await reader.open()
    await bus.publish(stream, submit("a", epoch=1))
    await asyncio.wait_for(intake.read_requests("other@w0", epoch=1), 5)


class Unusable:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


async def test_leftovers_of_an_earlier_epoch_are_ended_at_the_start(redis_settings: RedisSettings) -> None:
    async with connect(redis_settings) as bus:
        stream = bus.names.requests(INSTANCE)
        async with bus.group_reader(stream, consumer("w0", 3), Submit) as reader:
            await reader.open()
            await bus.publish(stream, submit("a", epoch=3), submit("b", epoch=3))
            assert len(await reader.read()) == 2
        await bus.publish(stream, submit("c", epoch=3))
        async with running(redis_settings) as bench:
            await bench.until(bench.is_settled)
            assert not bench.model.num_tokens, "something was run"


async def test_an_error_of_the_renewal_ends_a_serving_worker(bench: Bench) -> None:
    async def refused(*_: object) -> bool:
        raise RedisPassword("the password was changed")

    assert bench.worker_bus is not None and bench.task is not None
    bench.worker_bus.renew_lease = refused  # type: ignore[method-assign, assignment]
    with pytest.raises(RedisPassword):
        await asyncio.wait_for(bench.task, 10)
    bench.task = None

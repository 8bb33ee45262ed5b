"""A worker that is asked to end finishes what runs, and what was on its way, and gives its lease up."""

from __future__ import annotations

import asyncio

import pytest

from bus.messages import Drain
from bus.settings import RedisSettings
from tests.support.engine_toys import continuation
from tests.support.worker_bench import Bench, running

pytest_plugins = ["tests.support.worker_fixtures"]


@pytest.fixture(autouse=True)
def _gateways_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.service.worker.GATEWAYS_LOOK_S", 0.8)


async def test_sigterm_finishes_what_runs_and_gives_the_lease_up(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 40)
    await bench.until(lambda: bench.tokens("a"))
    bench.stop.set()
    await bench.until(bench.is_draining)
    assert bench.task is not None
    await asyncio.wait_for(bench.task, 10)
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1], 40)
    assert await bench.bus.workers() == []
    assert await bench.backlog() == 0


async def test_a_drain_command_does_the_same(bench: Bench) -> None:
    command = Drain(id="d1", epoch=await bench.epoch())
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    assert bench.task is not None
    await asyncio.wait_for(bench.task, 10)
    assert await bench.bus.workers() == []


async def test_a_request_that_came_as_the_drain_began_is_finished(bench: Bench) -> None:
    bench.stop.set()
    await bench.until(bench.is_draining)
    assert bench.task is not None
    await asyncio.sleep(0.3)  # a gateway that has not read the card yet
    assert not bench.task.done()
    await bench.submit("late", [1], 9)
    await asyncio.wait_for(bench.task, 10)
    await bench.until(lambda: bench.end("late"))
    assert bench.tokens("late") == continuation([1], 9)


async def test_a_drain_that_takes_too_long_leaves_the_rest_to_others(redis_settings: RedisSettings) -> None:
    async with running(redis_settings, drain_timeout_s=0.3) as bench:
        bench.model.step_s = 0.05
        await bench.submit("a", [1], 190)
        await bench.until(lambda: bench.tokens("a"))
        bench.stop.set()
        assert bench.task is not None
        await asyncio.wait_for(bench.task, 5)
        assert bench.end("a") is None
        assert await bench.bus.workers() == []

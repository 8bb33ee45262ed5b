"""The monitor as it runs: telemetry in one stream, metrics in another, a process that ends when asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from bus.client import Bus, connect
from bus.messages import Metrics
from bus.settings import MonitorSettings, Settings
from monitor.service import main
from tests.conftest import settings_of
from tests.support import service_loop
from tests.support.bus_samples import telemetry
from tests.support.redis_process import RedisProcess

FAST = Settings(monitor=MonitorSettings(interval_s=0.05, idle_interval_s=0.4, window_s=2.0, stale_s=5.0))

running = partial(service_loop.running, main, FAST)


async def metrics_with(bus: Bus, wanted: Callable[[Metrics], bool], start: str = "$") -> Metrics:
    async with bus.reader(bus.names.metrics, Metrics, start=start) as reader, asyncio.timeout(5):
        async for batch in reader:
            for _, metrics in batch:
                if wanted(metrics):
                    return metrics
    raise AssertionError("a reader does not end")


async def test_reports_become_metrics(bus: Bus) -> None:
    async with running(bus):
        await bus.publish(bus.names.telemetry, telemetry(running=4, tokens=0))
        await asyncio.sleep(0.1)
        await bus.publish(bus.names.telemetry, telemetry(running=4, tokens=50))
        metrics = await metrics_with(
            bus, lambda m: bool(m.instances and m.instances[0].prompt_tokens_per_second)
        )
    (instance,) = metrics.instances
    assert instance.running == 4
    assert 100 < instance.prompt_tokens_per_second <= 600
    assert metrics.workers[0].age_seconds < 1


async def test_a_monitor_that_starts_again_has_its_window_back_at_once(bus: Bus) -> None:
    await bus.publish(bus.names.telemetry, telemetry(tokens=0))
    await asyncio.sleep(0.1)
    await bus.publish(bus.names.telemetry, telemetry(tokens=50, ttft=(0.03,)))
    async with running(bus):
        metrics = await metrics_with(bus, lambda m: bool(m.instances), start="0")
    assert metrics.instances[0].ttft_p50 is not None


async def test_idle_metrics_are_rare_and_load_makes_them_frequent_at_once(bus: Bus) -> None:
    async with running(bus):
        await bus.publish(bus.names.telemetry, telemetry(running=0))
        await asyncio.sleep(1.0)
        idle = await bus.length(bus.names.metrics)
        await bus.publish(bus.names.telemetry, telemetry(running=1))
        await asyncio.sleep(0.5)
        busy = await bus.length(bus.names.metrics) - idle
    assert idle <= 4
    assert busy >= 5


async def test_another_shape_of_an_idle_worker_is_told_at_once(bus: Bus) -> None:
    rare = MonitorSettings(interval_s=0.05, idle_interval_s=30.0, window_s=2.0, stale_s=60.0)
    first = telemetry()
    (one,) = first.instances
    async with service_loop.running(main, Settings(monitor=rare), bus):
        await bus.publish(bus.names.telemetry, first)
        await metrics_with(bus, lambda m: bool(m.instances), start="0")
        morphed = replace(first, instances=[replace(one, kv_blocks=140)])
        await bus.publish(bus.names.telemetry, morphed)
        metrics = await metrics_with(bus, lambda m: any(i.kv_blocks == 140 for i in m.instances), start="0")
        assert metrics.instances[0].kv_blocks == 140
        num = await bus.length(bus.names.metrics)
        await bus.publish(bus.names.telemetry, morphed)
        await asyncio.sleep(0.2)
        assert await bus.length(bus.names.metrics) == num  # the same again is no news


async def test_the_monitor_outlives_a_redis_that_comes_back_empty(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    async with connect(settings_of(server.url)) as bus, running(bus):
        await bus.publish(bus.names.telemetry, telemetry(running=2))
        await metrics_with(bus, lambda m: bool(m.instances))
        server.kill()
        await asyncio.sleep(0.3)
        server.start()
        await asyncio.wait_for(bus.wait_up(), 5)
        await bus.publish(bus.names.telemetry, telemetry(running=1))
        metrics = await metrics_with(bus, lambda m: bool(m.instances), start="0")
        assert metrics.instances[0].running == 1  # nothing of before: another data set, another clock

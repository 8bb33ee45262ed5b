"""Moments: what of the metrics is kept for a chart, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from bus.client import Bus, connect
from bus.messages import InstanceMetrics, LayerShape, Metrics, Moment
from bus.names import LIMITS
from bus.settings import MonitorSettings, Settings
from monitor import moments
from monitor.moments import Rhythm, moment_of
from monitor.service import main
from tests.conftest import settings_of
from tests.support import metrics_samples, service_loop
from tests.support.bus_samples import telemetry
from tests.support.redis_process import RedisProcess

FAST = Settings(monitor=MonitorSettings(interval_s=0.05, idle_interval_s=0.1, window_s=2.0))

running = partial(service_loop.running, main, FAST)


def member(worker: str, group: list[str], **changes: float | None) -> InstanceMetrics:
    (one,) = metrics_samples.metrics_of(f"m@{worker}", kv_blocks=128, kv_used=32).instances
    return replace(one, last=replace(one.last, workers=group), **changes)  # type: ignore[arg-type]


def picture(*instances: InstanceMetrics) -> Metrics:
    return Metrics(at_ms=5500, window_seconds=10.0, workers=[], instances=list(instances))


def test_an_instance_alone_is_as_it_was_measured() -> None:
    one = member("w0", [], running=2.5, ttft_p95=0.123456789, queue_delay_seconds=0.5)
    one = replace(one, last=replace(one.last, layers=[LayerShape(ffn="int4"), LayerShape()]))
    moment = moment_of(picture(one))
    assert moment.at == 5.5 and list(moment.instances) == ["m@w0"]
    shown = moment.instances["m@w0"]
    assert (shown.running, shown.queue_delay_s, shown.ttft_p95_s, shown.tpot_p95_s) == (
        2.5,
        0.5,
        0.12346,
        None,
    )
    assert (shown.kv_blocks, shown.kv_used, shown.layers_below_full, shown.tp) == (128, 32, 1, 1)


def test_a_group_is_one_instance_whose_kv_is_counted_once() -> None:
    group = ["w2", "w1"]
    first = member("w1", group, running=1.0, tpot_p95=0.2, generation_tokens_per_second=10.0)
    second = member("w2", group, running=2.0, tpot_p95=0.1, generation_tokens_per_second=5.0)
    moment = moment_of(picture(member("w0", []), first, second))
    assert list(moment.instances) == ["m@w0", "m@w2"]  # under its leader's name
    shown = moment.instances["m@w2"]
    assert (shown.tp, shown.running, shown.kv_blocks, shown.kv_used) == (2, 3.0, 128, 32)
    assert (shown.tpot_p95_s, shown.tokens_per_s) == (0.2, 15.0)


def test_a_group_whose_leader_is_silent_is_told_by_who_is_left() -> None:
    moment = moment_of(picture(member("w1", ["w0", "w1"], running=1.0)))
    assert moment.instances["m@w1"].running == 1.0


def test_moments_come_every_two_seconds_under_load_and_every_ten_without() -> None:
    rhythm = Rhythm()
    loads = [5 <= at < 10 for at in range(40)]
    written = [at for at, has_load in enumerate(loads) if rhythm.is_due(at, has_load)]
    assert written == [0, 5, 7, 9, 11, 21, 31]


async def next_moment(bus: Bus, wanted: Callable[[Moment], bool]) -> Moment:
    async with bus.reader(bus.names.moments, Moment, start="0") as reader, asyncio.timeout(5):
        async for batch in reader:
            for _, moment in batch:
                if wanted(moment):
                    return moment
    raise AssertionError("a reader does not end")


async def test_the_monitor_writes_them_and_goes_on_after_redis_lost_its_data(
    own_redis: Callable[..., RedisProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "BUSY_S", 0.1)
    server = own_redis()
    async with connect(settings_of(server.url)) as bus, running(bus):
        assert (await next_moment(bus, lambda _: True)).instances == {}
        await bus.publish(bus.names.telemetry, telemetry(running=2))
        before = await next_moment(bus, lambda moment: "demo@w0" in moment.instances)
        assert before.instances["demo@w0"].running == 2
        await bus.run(lambda client: client.flushall())
        await bus.publish(bus.names.telemetry, telemetry(running=1))
        assert (await next_moment(bus, lambda moment: bool(moment.instances))).at > before.at


@pytest.mark.parametrize("period_s", [1.0, 2.2, 3.0, 60.0])
def test_a_stream_of_moments_holds_15_minutes_however_often_a_load_begins(period_s: float) -> None:
    rhythm = Rhythm()
    told = sum(rhythm.is_due(step / 4, (step / 4) % period_s < 0.4) for step in range(900 * 4))
    assert told <= LIMITS["moments"]

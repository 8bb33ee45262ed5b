"""The reports of a worker."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from bus.client import Bus
from bus.messages import GpuTelemetry, WorkerTelemetry
from tests.support.bus_samples import telemetry
from worker.service.engine_thread import EngineThread, Snapshot
from worker.service.telemetry import TelemetryReporter


class Idle:
    """The part of an engine's thread that a report needs."""

    def busy_seconds(self) -> float:
        return 0.0


async def test_a_report_says_which_group_its_instance_is_in(bus: Bus) -> None:
    thread = cast(EngineThread, Idle())
    times: dict[str, Any] = {"busy_interval_s": 0.01, "idle_interval_s": 0.01}
    reporter = TelemetryReporter(bus, "w1", lambda: 1, thread, **times)
    sample = telemetry("w1")
    async with bus.reader(bus.names.telemetry, WorkerTelemetry) as reader, asyncio.timeout(5):
        await reader.open()
        reporting = asyncio.create_task(reporter.run())
        for group in ((), ("w0", "w1"), ()):
            reporter.group = group
            reporter.take(Snapshot(1, sample.instances, sample.pages))
            async for batch in reader:
                if batch[-1][1].instances[0].workers == list(group):
                    break
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


async def test_a_report_has_the_state_of_the_gpu_at_its_time(bus: Bus) -> None:
    thread, sample = cast(EngineThread, Idle()), telemetry("w1")
    readings = iter((None, GpuTelemetry(utilization=0.5)))
    reporter = TelemetryReporter(
        bus, "w1", lambda: 1, thread, busy_interval_s=1.0, idle_interval_s=1.0, gpu=lambda: next(readings)
    )
    reporter.take(Snapshot(1, sample.instances, sample.pages))
    for expected in (None, GpuTelemetry(utilization=0.5)):
        latest = reporter.latest
        assert latest is not None and latest.gpu == expected

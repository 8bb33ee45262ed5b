"""The worker's service with a toy model on a real Redis: how it starts, what it says, what ends it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from bus.client import connect
from bus.messages import WorkerTelemetry
from bus.settings import RedisSettings, Settings, WorkerSettings
from tests.support.engine_toys import continuation
from tests.support.fake_nvml import UUID, FakeNvml
from tests.support.worker_bench import INSTANCE, LEASE_S, Bench, running
from worker.deploy.model_host import ModelHost
from worker.service.gpu_watch import GpuWatch
from worker.service.loading import CannotServe
from worker.service.worker import serve

pytest_plugins = ["tests.support.worker_fixtures"]


async def test_a_request_is_run_published_and_its_entry_deleted(bench: Bench) -> None:
    await bench.submit("a", [1, 2, 3], 9)
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1, 2, 3], 9)
    assert bench.end("a") == "length"
    await bench.until(bench.is_settled)
    last = bench.received[-1]
    assert (last.worker, last.instance, last.fingerprint) == ("w0", INSTANCE, "tp1-full")


async def test_requests_of_one_step_share_one_entry_per_gateway(bench: Bench) -> None:
    bench.model.step_s = 0.03
    for i in range(6):
        await bench.submit(str(i), [i], 20, gateway="g0" if i % 2 else "g1")
    await bench.until(lambda: all(bench.end(str(i)) for i in (1, 3, 5)))
    assert max(len(output.deltas) for output in bench.received) == 3
    assert not bench.deltas("0"), "what another gateway asked for is not ours to read"


async def test_a_failing_step_answers_its_requests_and_the_worker_goes_on(bench: Bench) -> None:
    bench.model.fail_on = 77
    await bench.submit("bad", [77])
    await bench.until(lambda: bench.end("bad"))
    assert bench.end("bad") == "error"
    await bench.submit("good", [1], 4)
    await bench.until(lambda: bench.end("good"))
    assert bench.tokens("good") == continuation([1], 4)
    await bench.until(bench.is_settled)


async def test_telemetry_comes_while_idle_and_counts_what_was_done(bench: Bench) -> None:
    await bench.submit("a", [1, 2], 6)
    await bench.until(lambda: bench.end("a"))
    async with bench.bus.reader(bench.bus.names.telemetry, WorkerTelemetry, start="0") as reader:
        reports: list[WorkerTelemetry] = []
        async with asyncio.timeout(5):
            while not reports or reports[-1].instances[0].generation_tokens < 6:
                reports += [message for _, message in await reader.read()]
    last = reports[-1].instances[0]
    assert (last.id, last.prompt_tokens, last.generation_tokens, last.running) == (INSTANCE, 2, 6, 0)
    assert last.finished == {"length": 1}
    assert reports[-1].pages.budget == 4 and reports[-1].epoch == await bench.epoch()


async def test_telemetry_has_what_nvml_says_of_the_gpu_and_the_watch_ends_with_the_worker(
    redis_settings: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeNvml().install(monkeypatch)
    watch = GpuWatch(UUID, pytest.fail, read_s=0.02)
    monkeypatch.setattr("worker.service.worker.watch_of", lambda device: watch)
    async with running(redis_settings) as bench:
        async with bench.bus.reader(bench.bus.names.telemetry, WorkerTelemetry, start="0") as reader:
            async with asyncio.timeout(5):
                while not [message.gpu for _, message in await reader.read() if message.gpu]:
                    pass
        assert watch.is_running
    assert not watch.is_running


async def test_a_model_that_cannot_be_served_is_told_to_the_caller_and_the_lease_given_up(
    redis_settings: RedisSettings,
) -> None:
    def refuse(settings: WorkerSettings, worker: str, progress: Callable[[str], None]) -> ModelHost:
        raise CannotServe("no config.json in /nowhere")

    async with connect(redis_settings) as bus:
        settings = Settings(redis=redis_settings, worker=WorkerSettings(id="w0"))
        with pytest.raises(CannotServe, match="no config"):
            await serve(settings, bus, asyncio.Event(), refuse)
        assert await bus.workers() == []


async def test_loading_is_on_the_card_and_can_be_stopped(redis_settings: RedisSettings) -> None:
    stop = asyncio.Event()
    stopped = threading.Event()

    def load(settings: WorkerSettings, worker: str, progress: Callable[[str], None]) -> ModelHost:
        for i in range(1000):
            try:
                progress(f"loading toy: {i / 10:.0f} %")
            except BaseException:
                stopped.set()
                raise
            time.sleep(0.01)
        raise AssertionError("it was not stopped")

    async with connect(redis_settings) as bus:
        settings = Settings(redis=redis_settings, worker=WorkerSettings(id="w0", lease_s=LEASE_S))
        task = asyncio.create_task(serve(settings, bus, stop, load))
        async with asyncio.timeout(10):
            while not any(live.card.progress for live in await bus.workers()):
                await asyncio.sleep(0.05)
        (live,) = await bus.workers()
        assert live.card.state == "loading" and live.card.progress.startswith("loading toy")
        stop.set()
        await asyncio.wait_for(task, 10)
        assert stopped.is_set()
        assert await bus.workers() == []


async def test_an_engine_that_dies_takes_the_worker_with_it_and_the_lease_is_given_up(
    redis_settings: RedisSettings,
) -> None:
    async with running(redis_settings) as bench:

        def broken(*args: Any) -> Any:
            raise MemoryError("the device is gone")

        bench.engine.check_integrity = broken  # type: ignore[method-assign]
        await bench.submit("a", [1], 2)
        assert bench.task is not None
        with pytest.raises(MemoryError, match="the device is gone"):
            await asyncio.wait_for(bench.task, 10)
        assert await bench.bus.workers() == []
        bench.task = None

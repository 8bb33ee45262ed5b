"""Morph commands over a real Redis to a worker with a toy model over real pages, and what it answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from bus.client import connect
from bus.messages import RejectReason, WorkerTelemetry
from bus.morphs import CancelMorph, MorphReport, Resize, Swap, Transform
from bus.settings import RedisSettings
from tests.conftest import settings_of
from tests.support.engine_toys import continuation
from tests.support.morph_toys import Rig
from tests.support.redis_process import RedisProcess
from tests.support.worker_bench import INSTANCE, Bench, started


@dataclass
class MorphBench(Bench):
    """A worker whose model has variants; `reports` and `telemetry` are what it said of them."""

    reports: list[MorphReport] = field(default_factory=list)
    telemetry: list[WorkerTelemetry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rig = Rig()
        self.engine, self.instance, self.model = self.rig.engine, self.rig.instance, self.rig.model
        self.morphs = self.rig.executor

    async def listen(self) -> None:
        await asyncio.gather(super().listen(), self._listen_to_events(), self._listen_to_telemetry())

    async def _listen_to_events(self) -> None:
        names = self.bus.names
        async with self.bus.reader(names.events, MorphReport, start="0") as reader:
            async for batch in reader:
                self.reports += [message for _, message in batch]

    async def _listen_to_telemetry(self) -> None:
        async with self.bus.reader(self.bus.names.telemetry, WorkerTelemetry, start="0") as reader:
            async for batch in reader:
                self.telemetry += [message for _, message in batch]

    async def command(self, kind: Callable[..., Any], name: str, **fields: Any) -> None:
        fields = {"epoch": await self.epoch(), **fields}
        await self.bus.publish(self.bus.names.control("w0"), kind(id=name, **fields))

    async def swap(self, name: str, precision: str, **fields: Any) -> None:
        await self.command(Swap, name, **{"instance": INSTANCE, "precision": precision, **fields})

    def end_of(self, name: str) -> MorphReport | None:
        ends = [report for report in self.reports if report.id == name and report.state != "running"]
        assert len(ends) <= 1
        return ends[0] if ends else None

    async def ended(self, name: str) -> MorphReport:
        report: MorphReport = await self.until(lambda: self.end_of(name))
        return report

    async def is_quiet(self) -> bool:
        return not self.morphs.num_running

    def check(self) -> None:
        """Read its books, once the worker is gone."""
        self.rig.pool.check_integrity()


@contextlib.asynccontextmanager
async def morphing(settings: RedisSettings) -> AsyncIterator[MorphBench]:
    async with connect(settings, source="test") as bus, started(MorphBench(bus, settings)) as bench:
        yield bench


@pytest.fixture
async def bench(redis_settings: RedisSettings) -> AsyncIterator[MorphBench]:
    async with morphing(redis_settings) as running:
        yield running
    running.check()


async def test_a_swap_is_reported_and_telemetry_and_tokens_tell_of_it(bench: MorphBench) -> None:
    bench.model.step_s = 0.01
    await bench.submit("a", [1, 2], 60)
    await bench.until(lambda: len(bench.tokens("a")) > 5)
    await bench.swap("m", "int4", layers=[0], parts=["ffn"])
    report = await bench.ended("m")
    assert (report.state, report.kind, report.target, report.worker) == ("applied", "swap", INSTANCE, "w0")
    assert [r.state for r in bench.reports if r.id == "m"] == ["running", "applied"]
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1, 2], 60)
    shapes = [(output.fingerprint, output.layers_below_full) for output in bench.received]
    assert shapes[0] == ("tp1-full", 0) and shapes[-1] == ("tp1-int4x0.5", 1)
    last = await bench.until(lambda: bench.telemetry and bench.telemetry[-1])
    assert [layer.ffn for layer in last.instances[0].layers] == ["int4", "full"]


async def test_a_transform_that_cannot_be_is_answered_and_the_worker_serves_on(bench: MorphBench) -> None:
    await bench.command(Transform, "t", instance=INSTANCE, workers=["w0", "w9"], epochs={}, tp=2)
    report = await bench.ended("t")
    assert (report.state, report.kind, report.target) == ("failed", "transform", INSTANCE) and report.reason
    await bench.submit("a", [1, 2], 5)
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1, 2], 5)


async def test_an_idle_worker_morphs_at_once(bench: MorphBench) -> None:
    began = time.monotonic()
    await bench.swap("down", "int4", count=2)
    assert (await bench.ended("down")).state == "applied"
    await bench.command(Resize, "resize", instance=INSTANCE, blocks=60)
    assert (await bench.ended("resize")).numbers["blocks_after"] >= 60
    await bench.swap("up", "full", count=2)
    assert (await bench.ended("up")).state == "applied"
    assert time.monotonic() - began < 3.0


async def test_an_idle_worker_gives_up_waiting_in_time(bench: MorphBench) -> None:
    bench.rig.resizer.min_blocks = 1000
    await bench.swap("down", "int3", count=1)
    await bench.ended("down")
    await bench.swap("up", "full", count=1, wait_s=0.4)
    report = await bench.ended("up")
    assert report.state == "deferred" and 0.3 < report.numbers["seconds"] < 2.0


async def test_a_command_for_another_epoch_is_answered_with_stale(bench: MorphBench) -> None:
    epoch = await bench.epoch()
    await bench.swap("old", "int4", count=1, epoch=epoch - 1)
    report = await bench.ended("old")
    assert (report.state, report.epoch) == ("stale", epoch)
    assert report.reason == f"it is for epoch {epoch - 1}; this is {epoch}"


async def test_a_lost_lease_gives_a_running_morph_up_and_the_new_epoch_can_morph(bench: MorphBench) -> None:
    bench.rig.variants.hold.clear()
    epoch = await bench.epoch()
    await bench.swap("m", "int4", count=2)
    await bench.until(lambda: bench.reports)
    await bench.lose_lease()
    report = await bench.ended("m")
    assert (report.state, report.epoch) == ("failed", epoch) and "lost its lease" in report.reason
    bench.rig.variants.hold.set()
    await bench.swap("next", "int4", count=2)
    assert (await bench.ended("next")).state == "applied"


async def test_a_morph_can_be_cancelled(bench: MorphBench) -> None:
    bench.rig.variants.hold.clear()
    await bench.swap("m", "int4", count=2)
    await bench.until(lambda: bench.reports)
    await bench.command(CancelMorph, "c", morph_id="m")
    report = await bench.ended("m")
    assert (report.state, report.reason) == ("failed", "cancelled")
    bench.rig.variants.hold.set()


async def test_a_request_below_whose_floor_the_shape_is_is_sent_back(bench: MorphBench) -> None:
    await bench.swap("m", "int4", count=1)
    await bench.ended("m")
    await bench.submit("a", [1], 5, min_precision="full")
    await bench.until(lambda: bench.end("a"))
    (delta,) = bench.deltas("a")
    assert delta.finish_reason == "error" and delta.reject_reason is RejectReason.PRECISION_FLOOR
    await bench.submit("a", [1], 5, attempt=2)
    await bench.until(lambda: bench.tokens("a") == continuation([1], 5))
    await bench.until(bench.is_settled)


async def test_reports_wait_for_a_redis_that_is_away(own_redis: Callable[..., RedisProcess]) -> None:
    server = own_redis(append_only=True)
    async with morphing(settings_of(server.url)) as bench:
        bench.rig.variants.hold.clear()
        await bench.swap("m", "int4", count=2)
        await bench.until(lambda: bench.reports)
        server.freeze()
        bench.rig.variants.hold.set()
        await bench.until(bench.is_quiet)
        await asyncio.sleep(0.3)
        server.thaw()
        assert (await bench.ended("m")).state == "applied"


async def test_a_worker_that_leaves_mid_morph_says_so_and_leaves_its_books_in_order(
    redis_settings: RedisSettings,
) -> None:
    async with morphing(redis_settings) as bench:
        bench.rig.variants.hold.clear()
        await bench.swap("m", "int4", count=2)
        await bench.until(lambda: bench.reports)
        assert bench.task
        bench.task.cancel()
        end = await bench.ended("m")
        assert (end.state, end.reason) == ("failed", "the worker leaves")
    bench.check()
    assert not bench.morphs.num_running
    assert bench.rig.pool.counts().weights == 0, "the variants are released with the worker"

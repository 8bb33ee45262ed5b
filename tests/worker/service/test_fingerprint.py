"""Measure commands over a real Redis, to a worker that serves meanwhile."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bus.checkpoints import folder_digest
from bus.client import connect
from bus.deployments import Measure, Profile
from bus.messages import Drain, Event
from bus.morphs import CancelMorph
from bus.settings import RedisSettings
from tests.support.deploy_models import settings_for, write_model
from tests.support.loaded_bench import QUICK, LoadedBench
from tests.support.worker_bench import started
from worker.profiler.measurer import Measurer
from worker.profiler.profiler import Profiler


@dataclass
class MeasureBench(LoadedBench):
    """`told` is what it said of measuring `second`."""

    kind: type[Any] = Event
    told: list[Event] = field(default_factory=list)

    def hear(self, message: Event) -> None:
        if message.kind.startswith("profile"):
            self.told.append(message)

    async def measure(self, name: str, **changes: Any) -> None:
        path = self.folder / "second"
        fields: dict[str, Any] = {
            "epoch": await self.epoch(),
            "model": "second",
            "path": str(path),
            "digest": folder_digest(path),
            "precisions": ["full", "int4"],
            "prompt_tokens": [8],
            "batch_sizes": [1],
        }
        await self.bus.publish(self.bus.names.control("w0"), Measure(id=name, **{**fields, **changes}))

    async def profile(self) -> Profile | None:
        return (await self.bus.catalogue.read()).profiles.get(("second", "cpu"))

    def failure(self, name: str) -> str:
        return next(
            (one.reason for one in self.told if (one.kind, one.morph_id) == ("profile_failed", name)), ""
        )

    def is_measuring(self, name: str) -> bool:
        return any((one.kind, one.morph_id) == ("profile_progress", name) for one in self.told)

    def has_all_pages(self, before: Any) -> bool:
        assert self.loaded
        return bool(self.loaded.pool.counts() == before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "first", 1)
    write_model(tmp_path / "second", 2, num_hidden_layers=4)
    return tmp_path


@pytest.fixture
async def bench(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[MeasureBench]:
    fields = settings_for(folder / "first", folder).model_dump(exclude={"lease_s"})
    fields |= QUICK
    async with (
        connect(redis_settings, source="test") as bus,
        started(MeasureBench(bus, redis_settings, folder=folder), **fields) as running,
    ):
        yield running


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring goes on until something ends it."""
    prepare = Measurer.prepare

    def without_end(self: Measurer, command: Measure) -> Profiler:
        return prepare(replace(self, max_rounds=10**6), command)

    monkeypatch.setattr(Measurer, "prepare", without_end)
    monkeypatch.setattr("worker.profiler.measurer.ROUNDS", 10**6)


async def test_a_model_is_measured_beside_requests_and_never_twice(
    bench: MeasureBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.loaded
    pages = bench.loaded.pool.counts()
    await bench.measure("m1")
    await bench.submit("a", [1, 2, 3], 20, instance="first@w0")
    profile = await bench.until(bench.profile, within_s=20.0)
    assert profile.num_layers == 4 and profile.device_seconds > 0
    assert {one.num_layers for one in profile.latency} == {1, 2}
    await bench.until(lambda: bench.end("a"))
    assert len(bench.tokens("a")) == 20
    await bench.until(lambda: bench.has_all_pages(pages))

    monkeypatch.setattr(Measurer, "prepare", None)
    await bench.bus.catalogue.write(replace(profile, digest="of something else"))
    await bench.measure("m2")
    await bench.until(lambda: _is(bench, profile))
    assert not bench.failure("m2")


async def _is(bench: MeasureBench, profile: Profile) -> bool:
    return await bench.profile() == profile


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("how", ["cancel", "drain", "fence"])
async def test_what_ends_a_profile_early_is_told_and_gives_all_pages_back(
    bench: MeasureBench, how: str
) -> None:
    assert bench.loaded
    pages = bench.loaded.pool.counts()
    await bench.measure("m1")
    await bench.until(lambda: not bench.has_all_pages(pages))
    control, epoch = bench.bus.names.control("w0"), await bench.epoch()
    if how == "cancel":
        await bench.bus.publish(control, CancelMorph(id="c", epoch=epoch, morph_id="m1"))
    elif how == "drain":
        await bench.bus.publish(control, Drain(id="d", epoch=epoch))
    else:
        await bench.lose_lease()
    reason = {"cancel": "cancelled", "drain": "w0 is draining", "fence": "had lost its lease"}[how]
    assert reason in await bench.until(lambda: bench.failure("m1"))
    await bench.until(lambda: bench.has_all_pages(pages))
    assert await bench.profile() is None


@pytest.mark.usefixtures("endless")
async def test_a_profile_that_is_cancelled_at_once_never_begins(bench: MeasureBench) -> None:
    assert bench.loaded
    pages = bench.loaded.pool.counts()
    await bench.measure("m1")
    cancel = CancelMorph(id="c", epoch=await bench.epoch(), morph_id="m1")
    await bench.bus.publish(bench.bus.names.control("w0"), cancel)
    assert "cancelled" in await bench.until(lambda: bench.failure("m1"))
    await bench.until(lambda: bench.has_all_pages(pages))
    assert await bench.profile() is None


async def test_a_checkpoint_that_changed_and_one_that_finds_no_room_are_told(bench: MeasureBench) -> None:
    await bench.measure("small", max_bytes=4096)
    assert "are available" in await bench.until(lambda: bench.failure("small"))
    os.utime(bench.folder / "second" / "model.safetensors", ns=(0, 0))
    await bench.measure("changed", digest="of before")
    assert "register it again" in await bench.until(lambda: bench.failure("changed"))

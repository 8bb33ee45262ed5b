"""Models that come and go over a real Redis: cards, streams, answers, fences."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bus.client import connect
from bus.messages import RejectReason, Stage, WorkerCard
from bus.morphs import Deploy, MorphReport, Retire
from bus.settings import RedisSettings
from tests.support.deploy_models import settings_for, write_model
from tests.support.loaded_bench import QUICK, LoadedBench
from tests.support.worker_bench import started
from worker.service.instances import GATEWAYS_LOOK_S


@dataclass
class DeployBench(LoadedBench):
    """`reports` is what it said of morphs."""

    kind: type[Any] = MorphReport
    reports: list[MorphReport] = field(default_factory=list)

    def hear(self, message: MorphReport) -> None:
        self.reports.append(message)

    async def order(self, kind: Callable[..., Any], name: str, **fields: Any) -> None:
        fields = {"epoch": await self.epoch(), "instance": "second@w0", **fields}
        await self.bus.publish(self.bus.names.control("w0"), kind(id=name, **fields))

    async def deploy(self, name: str, **fields: Any) -> None:
        stages = [Stage(workers=["w0"], first=0, end=3)]
        path = str(self.folder / "second")
        await self.order(Deploy, name, model="second", path=path, stages=stages, **fields)

    async def ended(self, name: str) -> MorphReport:
        report: MorphReport = await self.until(lambda: self._end(name), within_s=20.0)
        return report

    def _end(self, name: str) -> MorphReport | None:
        return next((one for one in self.reports if one.id == name and one.state != "running"), None)

    async def card(self) -> WorkerCard:
        (live,) = await self.bus.workers()
        return live.card

    async def models(self) -> list[str]:
        return [one.model for one in (await self.card()).instances]


@contextlib.asynccontextmanager
async def deploying(settings: RedisSettings, folder: Path, **changes: Any) -> AsyncIterator[DeployBench]:
    fields = settings_for(folder / "first", folder, **changes).model_dump(exclude={"lease_s"})
    fields |= QUICK
    async with (
        connect(settings, source="test") as bus,
        started(DeployBench(bus, settings, folder=folder), **fields) as bench,
    ):
        yield bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_model(made / "first", 1)
    write_model(made / "second", 2, num_hidden_layers=3, num_key_value_heads=4)
    return made


@pytest.fixture
async def bench(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[DeployBench]:
    async with deploying(redis_settings, folder) as running:
        yield running


async def test_a_model_that_comes_is_shown_and_answers_and_one_that_goes_is_cleaned_up(
    bench: DeployBench,
) -> None:
    await bench.deploy("d")
    report = await bench.ended("d")
    assert (report.state, report.kind, report.target) == ("applied", "deploy", "second@w0"), report
    assert await bench.models() == ["first", "second"] and not (await bench.card()).loading
    (card,) = [one for one in (await bench.card()).instances if one.model == "second"]
    assert (card.id, card.num_layers, card.variants) == ("second@w0", 3, ["full", "int8", "int4"])
    await bench.submit("a", [1, 2, 3], 10, instance="second@w0")
    await bench.submit("b", [1, 2, 3], 10, instance="first@w0")
    await bench.until(lambda: bench.end("a") and bench.end("b"))
    assert len(bench.tokens("a")) == len(bench.tokens("b")) == 10 and bench.tokens("a") != bench.tokens("b")
    await bench.submit("last", [1, 2, 3], 40, instance="second@w0")
    await bench.order(Retire, "r")
    await bench.until(lambda: bench.reports[-1].id == "r")
    assert await bench.models() == ["first"]
    await bench.submit("late", [4], 4, instance="second@w0")  # of a gateway that has not looked yet
    assert (await bench.ended("r")).state == "applied"
    await bench.until(lambda: bench.end("last") == bench.end("late") == "length")
    stream = bench.bus.names.requests("second@w0")
    await bench.until(lambda: _is_gone(bench, stream))
    await bench.deploy("again")
    assert (await bench.ended("again")).state == "applied"
    await bench.submit("c", [1, 2, 3], 10, instance="second@w0")
    await bench.until(lambda: bench.end("c"))
    assert bench.tokens("c") == bench.tokens("a")


async def _is_gone(bench: DeployBench, stream: str) -> bool:
    return not await bench.bus.run(lambda client: client.exists(stream))


async def test_what_is_not_finished_in_time_is_told_to_run_elsewhere(bench: DeployBench) -> None:
    await bench.deploy("d")
    await bench.ended("d")
    await bench.submit("first", [1], 60, instance="first@w0")
    await bench.submit("a", [1, 2, 3], 60, instance="second@w0")
    await bench.order(Retire, "r", wait_s=0.0)
    report = await bench.ended("r")
    assert report.state == "applied" and report.numbers["seconds"] < GATEWAYS_LOOK_S
    if bench.end("a") != "length":
        (last,) = [delta for delta in bench.deltas("a") if delta.finish_reason]
        assert last.reject_reason is RejectReason.RETIRED
    await bench.until(lambda: bench.end("first") == "length")


async def test_a_lost_lease_ends_a_deploy_and_the_next_epoch_can_deploy(bench: DeployBench) -> None:
    await bench.deploy("d")
    await bench.lose_lease()
    report = await bench.ended("d")
    assert report.state in ("failed", "applied")
    if report.state == "failed":
        assert await bench.models() == ["first"]
        await bench.deploy("again")
        assert (await bench.ended("again")).state == "applied"
    await bench.submit("a", [1, 2, 3], 5, instance="second@w0")
    await bench.until(lambda: bench.end("a"))


async def test_an_order_for_another_epoch_is_stale(bench: DeployBench) -> None:
    await bench.deploy("d", epoch=5)
    assert (await bench.ended("d")).state == "stale"


async def test_a_worker_without_a_model_waits_for_one(redis_settings: RedisSettings, folder: Path) -> None:
    async with deploying(redis_settings, folder, models=[], may_be_empty=True) as bench:
        assert await bench.models() == []
        await bench.deploy("d")
        assert (await bench.ended("d")).state == "applied"
        await bench.submit("a", [1, 2, 3], 5, instance="second@w0")
        await bench.until(lambda: bench.end("a"))
        bench.stop.set()  # a drain, with what came at run time
        await bench.until(bench.is_draining)


async def test_a_worker_may_join_groups_with_its_only_model(
    redis_settings: RedisSettings, folder: Path
) -> None:
    changes: dict[str, Any] = {"group_host": "127.0.0.1", "max_tp": 2}
    async with deploying(redis_settings, folder, models=[], may_be_empty=True, **changes) as bench:
        assert (await bench.card()).link
        await bench.deploy("d")
        assert (await bench.ended("d")).state == "applied"
        card = await bench.card()
        assert card.link and card.instances[0].degrees == [1, 2] and card.instances[0].tokens_at[2]
        first = {"instance": "other@w0", "model": "other", "path": str(folder / "first"), "stages": []}
        await bench.order(Deploy, "e", **first)
        assert (await bench.ended("e")).state == "applied"
        both = await bench.card()
        assert [one.degrees for one in both.instances] == [[1], [1]]
        (second,) = [one for one in both.instances if one.id == card.instances[0].id]
        assert second.max_blocks < card.instances[0].max_blocks, "alone its FFN is not divided"
        await bench.order(Retire, "r", wait_s=0.0)
        assert (await bench.ended("r")).state == "applied"
        (left,) = (await bench.card()).instances
        assert (await bench.card()).link and (left.id, left.degrees) == ("other@w0", [1, 2])
        await bench.submit("a", [1, 2, 3], 5, instance="other@w0")
        await bench.until(lambda: bench.end("a"))

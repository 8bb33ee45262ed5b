"""Stages over a real Redis: orders to every worker, doors on the cards, one card of the instance, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bus.client import connect
from bus.messages import RETIRED, Deploy, InstanceCard, Stage, WorkerCard
from bus.settings import RedisSettings
from tests.deploy_models import settings_for, write_model
from tests.test_deploy_service import DeployBench
from tests.worker_bench import started

LAYERS = 3


@dataclass
class StageBench(DeployBench):
    """One of two workers; both without a model at first."""

    worker: str = ""

    async def card(self) -> WorkerCard:
        (card,) = [live.card for live in await self.bus.workers() if live.card.id == self.worker]
        return card

    async def epoch(self) -> int:
        return (await self.card()).epoch

    async def is_serving(self) -> bool:
        return any(
            live.card.state == "serving" and live.card.id == self.worker for live in await self.bus.workers()
        )

    async def instances(self) -> list[InstanceCard]:
        return (await self.card()).instances


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    write_model(made / "second", 2, num_hidden_layers=LAYERS)
    return made


@contextlib.asynccontextmanager
async def working(settings: RedisSettings, folder: Path, name: str) -> AsyncIterator[StageBench]:
    fields = settings_for(folder, folder, models=[], may_be_empty=True, group_host="127.0.0.1", id=name)
    changes = fields.model_dump(exclude={"lease_s"}) | {"telemetry_s": 0.05, "idle_telemetry_s": 0.2}
    async with (
        connect(settings, source="test") as bus,
        started(StageBench(bus, settings, folder=folder, worker=name), **changes) as bench,
    ):
        yield bench


@pytest.fixture
async def pair(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[tuple[StageBench, StageBench]]:
    async with (
        working(redis_settings, folder, "w0") as leader,
        working(redis_settings, folder, "w1") as follower,
    ):
        yield leader, follower


async def deploy(pair: tuple[StageBench, StageBench], name: str) -> None:
    stages = [Stage(workers=["w0"], first=0, end=1), Stage(workers=["w1"], first=1, end=LAYERS)]
    epochs = {each.worker: await each.epoch() for each in pair}
    for number, each in enumerate(pair):
        command = Deploy(
            id=f"{name}-{each.worker}",
            epoch=epochs[each.worker],
            instance=f"second@{each.worker}",
            model="second",
            path=str(each.folder / "second"),
            stages=stages,
            stage=number,
            epochs=epochs,
        )
        await each.bus.publish(each.bus.names.control(each.worker), command)
    for each in pair:
        report = await each.ended(f"{name}-{each.worker}")
        assert report.state == "applied", report


async def test_two_workers_serve_one_instance_until_one_of_them_leaves(
    pair: tuple[StageBench, StageBench],
) -> None:
    leader, follower = pair
    await deploy(pair, "d")
    (card,) = await leader.instances()
    assert (card.id, card.pp, card.workers, card.num_layers) == ("second@w0", 2, ["w0", "w1"], LAYERS)
    assert await follower.instances() == []
    await leader.submit("a", [1, 2, 3], 10, instance="second@w0")
    await leader.until(lambda: leader.end("a") == "length")
    await leader.submit("b", [1, 2, 3], 60, instance="second@w0")
    await follower.aclose()
    await leader.until(lambda: leader.end("b"))
    assert leader.tokens("b")[:10] == leader.tokens("a")[: len(leader.tokens("b"))]
    errors = [delta.error for delta in leader.deltas("b") if delta.error]
    assert all(error.startswith(RETIRED) for error in errors)
    await leader.until(lambda: _is_empty(leader))


async def _is_empty(bench: StageBench) -> bool:
    assert bench.loaded and bench.loaded.site
    pool = bench.loaded.site.pool
    await asyncio.sleep(0.02)
    return not await bench.instances() and pool.num_free == pool.num_pages


@pytest.mark.faults
@pytest.mark.slow
async def test_a_follower_that_loses_its_lease_ends_the_instance(pair: tuple[StageBench, StageBench]) -> None:
    leader, follower = pair
    await deploy(pair, "d")
    before = await follower.epoch()
    lease = follower.bus.names.lease("w1")
    await follower.bus.link.run(lambda client: client.delete(lease))
    await leader.until(lambda: _is_empty(leader))
    await follower.until(lambda: _is_empty(follower))
    assert await follower.epoch() > before
    await deploy(pair, "again")
    await leader.submit("c", [1, 2, 3], 5, instance="second@w0")
    await leader.until(lambda: leader.end("c") == "length")

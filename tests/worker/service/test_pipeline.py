"""Stages over a real Redis: orders to every worker, one card of the instance, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bus.client import connect
from bus.messages import InstanceCard, RejectReason, Stage, WorkerCard
from bus.morphs import Deploy
from bus.settings import RedisSettings
from tests.support.deploy_models import settings_for, write_model
from tests.support.worker_bench import started
from tests.worker.service.test_deploy import DeployBench

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
async def working(
    settings: RedisSettings, folder: Path, name: str, **changes: Any
) -> AsyncIterator[StageBench]:
    empty = {"models": [], "may_be_empty": True, "group_host": "127.0.0.1", "id": name}
    fields = settings_for(folder, folder, **(empty | changes))
    dumped = fields.model_dump(exclude={"lease_s"}) | {"telemetry_s": 0.05, "idle_telemetry_s": 0.2}
    async with (
        connect(settings, source="test") as bus,
        started(StageBench(bus, settings, folder=folder, worker=name), **dumped) as bench,
    ):
        yield bench


@pytest.fixture
async def pair(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[tuple[StageBench, StageBench]]:
    async with (
        working(redis_settings, folder, "w0") as leader,
        working(redis_settings, folder, "w1") as follower,
    ):
        yield leader, follower


async def deploy(benches: Sequence[StageBench], name: str, num_stages: int = 2) -> None:
    """Deploy in one or two stages, each on as many of the workers."""
    names, tp = [each.worker for each in benches], len(benches) // num_stages
    bounds = [0, LAYERS] if num_stages == 1 else [0, 1, LAYERS]
    stages = [
        Stage(workers=names[i * tp : (i + 1) * tp], first=bounds[i], end=bounds[i + 1])
        for i in range(num_stages)
    ]
    epochs = {each.worker: await each.epoch() for each in benches}
    for number, each in enumerate(benches):
        command = Deploy(
            id=f"{name}-{each.worker}",
            epoch=epochs[each.worker],
            instance=f"second@{each.worker}",
            model="second",
            path=str(each.folder / "second"),
            stages=stages,
            stage=number // tp,
            epochs=epochs,
        )
        await each.bus.publish(each.bus.names.control(each.worker), command)
    for each in benches:
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
    reasons = [delta.reject_reason for delta in leader.deltas("b") if delta.error]
    assert all(reason is RejectReason.RETIRED for reason in reasons)
    await leader.until(lambda: _is_empty(leader))


async def test_two_workers_serve_one_stage_with_half_of_everything_each(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with (
        working(redis_settings, folder, "w0", max_tp=2) as leader,
        working(redis_settings, folder, "w1", max_tp=2) as follower,
    ):
        await deploy((leader, follower), "d", num_stages=1)
        (card,) = await leader.instances()
        assert (card.id, card.tp, card.pp, card.workers) == ("second@w0", 2, 1, ["w0", "w1"])
        await leader.submit("a", [1, 2, 3], 10, instance="second@w0")
        await leader.until(lambda: leader.end("a") == "length")


@pytest.mark.faults
@pytest.mark.slow
async def test_a_follower_that_drains_leaves_when_the_requests_have_ended(
    pair: tuple[StageBench, StageBench],
) -> None:
    leader, follower = pair
    await deploy(pair, "d")
    await leader.submit("a", [1, 2, 3], 50, instance="second@w0")
    await leader.until(lambda: leader.tokens("a"))
    follower.stop.set()
    await leader.until(lambda: leader.end("a"))
    assert leader.end("a") == "length"
    assert follower.task
    await asyncio.wait_for(asyncio.shield(follower.task), 20.0)
    await leader.until(lambda: _is_empty(leader))


async def _is_empty(bench: StageBench) -> bool:
    assert bench.loaded
    pool = bench.loaded.pool
    await asyncio.sleep(0.02)
    return not await bench.instances() and pool.num_free == pool.num_pages


@pytest.mark.faults
@pytest.mark.slow
async def test_two_stages_of_two_ranks_serve_one_instance_until_a_rank_leaves(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        benches = [
            await stack.enter_async_context(working(redis_settings, folder, f"w{i}", max_tp=2))
            for i in range(4)
        ]
        leader, last = benches[0], benches[3]
        await deploy(benches, "d")
        (card,) = await leader.instances()
        assert (card.tp, card.pp, card.workers) == (2, 2, ["w0", "w1", "w2", "w3"])
        await leader.submit("a", [1, 2, 3], 10, instance="second@w0")
        await leader.until(lambda: leader.end("a") == "length")
        whole = Stage(workers=["w3"], first=0, end=LAYERS)
        fields: dict[str, Any] = {"instance": "beside@w3", "model": "beside", "path": str(folder / "second")}
        beside = Deploy(id="beside", epoch=await last.epoch(), stages=[whole], **fields)
        await last.bus.publish(last.bus.names.control("w3"), beside)
        assert (await last.ended("beside")).state == "applied"
        (card,) = await last.instances()
        assert card.degrees == [1], "it joins no group beside its rank"
        await leader.submit("b", [1, 2, 3], 60, instance="second@w0")
        await leader.until(lambda: leader.tokens("b"))
        await last.aclose()
        await leader.until(lambda: leader.end("b"))
        assert leader.tokens("b")[:10] == leader.tokens("a")[: len(leader.tokens("b"))]
        for each in benches[:3]:
            await leader.until(partial(_is_empty, each))


@pytest.mark.faults
@pytest.mark.slow
async def test_a_follower_that_loses_its_lease_ends_the_instance(pair: tuple[StageBench, StageBench]) -> None:
    leader, follower = pair
    await deploy(pair, "d")
    before = await follower.epoch()
    lease = follower.bus.names.lease("w1")
    await follower.bus.run(lambda client: client.delete(lease))
    await leader.until(lambda: _is_empty(leader))
    await follower.until(lambda: _is_empty(follower))
    assert await follower.epoch() > before
    await deploy(pair, "again")
    await leader.submit("c", [1, 2, 3], 5, instance="second@w0")
    await leader.until(lambda: leader.end("c") == "length")

"""A fake worker that measures, loads and retires as it is told, one deployed model at a time; and a cluster
of a gateway, a controller and such workers in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from bus.client import Bus, connect
from bus.deployments import Measure, Profile
from bus.messages import Event, Metrics, PageCounts, WorkerCard, WorkerMetrics
from bus.morphs import CancelMorph, Deploy, MorphOutcome, MorphReport, Retire
from bus.settings import ControllerSettings, RedisSettings, Settings
from controller import service as controller_service
from tests.support import service_loop
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_harness import ANSWER, Gate, running
from tests.support.known_truths import Truth, profile_of
from tests.support.metrics_samples import metrics_of

FAST = Settings(controller=ControllerSettings(interval_s=0.05, grace_s=0.1))
FREE_PAGES = 16_384  # of 64 KiB
KV_BLOCKS = 64  # of what is deployed
TRUTH = Truth(layers=4)
COMMANDS = (Measure, CancelMorph, Deploy, Retire)


class DeployableWorker(FakeWorker):
    """Starts without a model. `measures`, `loads`: False: it says that it cannot; None: no word."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.measures: bool | None = True
        self.loads: bool | None = True
        self.deployed = ""
        self.measured: list[Measure] = []
        self.given_up: list[str] = []
        self.deploys: list[Deploy] = []
        self.retires: list[Retire] = []

    def card(self, state: str = "serving") -> WorkerCard:
        card = super().card(state)
        return replace(
            card, instances=[replace(card.instances[0], deployed=self.deployed)] if self.deployed else []
        )

    async def _obey(self) -> None:
        control = self.bus.names.control(self.id)
        async with self.bus.reader(control, *COMMANDS, start="0") as reader:
            async for batch in reader:
                for _, command in batch:
                    if command.epoch == self.epoch:
                        await self._follow(command)

    async def _follow(self, command: Measure | CancelMorph | Deploy | Retire) -> None:
        if isinstance(command, CancelMorph):
            self.given_up.append(command.morph_id)
        elif isinstance(command, Measure):
            self.measured.append(command)
            if self.measures is not None:
                await self._measure(command, self.measures)
        elif isinstance(command, Deploy):
            self.deploys.append(command)
            if self.loads is not None:
                await self._load(command, self.loads)
        else:
            self.retires.append(command)
            self.deployed = ""
            await self._tell(command, "applied")

    async def _measure(self, command: Measure, succeeds: bool) -> None:
        if succeeds:
            await self.bus.catalogue.write(profile(command.model, command.digest))
            return
        event = Event(
            kind="profile_failed",
            source=self.id,
            subject=command.model,
            reason="the test says no",
            at_ms=1,
            morph_id=command.id,
        )
        await self.bus.publish(self.bus.names.events, event)

    async def _load(self, command: Deploy, succeeds: bool) -> None:
        if succeeds:
            self.deployed, self.model, self.instance = command.id, command.model, command.instance
            self.folder = Path(command.path)
            self._tasks.append(asyncio.create_task(self._read()))
        await self._tell(command, "applied" if succeeds else "failed")

    async def _tell(self, command: Deploy | Retire, state: MorphOutcome) -> None:
        await self.bus.update_card(self.card())
        report = MorphReport(
            id=command.id,
            kind="deploy" if isinstance(command, Deploy) else "retire",
            target=command.instance,
            worker=self.id,
            epoch=self.epoch,
            state=state,
            reason=f"the test says {state}",
            started_ms=time.time_ns() // 1_000_000,
            ended_ms=time.time_ns() // 1_000_000,
        )
        await self.bus.publish(self.bus.names.events, report)


def profile(model: str, digest: str) -> Profile:
    return replace(profile_of(TRUTH), model=model, digest=digest)


class Cluster:
    """`gate`: the gateway; `workers`: by name; `http` speaks to it."""

    def __init__(self, gate: Gate, http: httpx.AsyncClient) -> None:
        self.gate, self.http = gate, http
        self.workers: dict[str, DeployableWorker] = {}
        self.free_pages = FREE_PAGES

    async def join(self, name: str) -> DeployableWorker:
        worker = DeployableWorker(self.gate.bus, self.gate.folder, self.gate.says(ANSWER), worker=name)
        self.workers[name] = worker
        await worker.start()
        return worker

    async def report(self) -> None:
        """Publish without end what a monitor would report of memory."""
        while True:
            pages = PageCounts(budget=self.free_pages, weights=0, kv=0, free=self.free_pages)
            told = [
                WorkerMetrics(worker=one.id, epoch=one.epoch, busy=0.0, pages=pages, age_seconds=0.0)
                for one in self.workers.values()
            ]
            held = [
                metrics_of(one.instance, one.epoch, kv_blocks=KV_BLOCKS).instances[0]
                for one in self.workers.values()
                if one.deployed
            ]
            metrics = Metrics(at_ms=1, window_seconds=1.0, workers=told, instances=held)
            await self.gate.bus.publish(self.gate.bus.names.metrics, metrics)
            await asyncio.sleep(0.05)

    async def profiled(self, name: str = "m") -> None:
        """Registered, and measured."""
        body = {"name": name, "path": str(self.gate.folder)}
        answer = await self.http.post("/admin/models?wait=true", json=body)
        assert answer.json()["state"] == "profiled", answer.text

    async def serving(self, name: str = "m", **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/admin/deployments?wait=true", json={"model": name} | body)
        found: dict[str, Any] = answer.json()
        assert found["state"] == "serving", answer.text
        return found


@contextlib.asynccontextmanager
async def cluster_of(
    redis: RedisSettings, folder: Path, *, workers: int = 1, controller: bool = True
) -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        gate = await stack.enter_async_context(running(redis, folder, workers=0))
        http = await stack.enter_async_context(gate.http())
        cluster = Cluster(gate, http)
        for index in range(workers):
            worker = await cluster.join(f"w{index}")
            stack.push_async_callback(worker.die)
        reports = asyncio.create_task(cluster.report())
        stack.callback(reports.cancel)
        if controller:
            await stack.enter_async_context(controlling(redis))
        yield cluster


@contextlib.asynccontextmanager
async def controlling(redis: RedisSettings) -> AsyncIterator[Bus]:
    with patch("controller.deployments.deployer.LOOK_S", 0.1):
        async with (
            connect(redis, source="controller") as bus,
            service_loop.running(controller_service.main, FAST, bus),
        ):
            yield bus

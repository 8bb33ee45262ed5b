"""A real gateway over real HTTP and a real Redis, with fake workers, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import openai

from bench.common.service import free_port
from bus.client import Bus, connect
from bus.messages import Metrics, Submit
from bus.settings import GatewaySettings, RedisSettings, Settings, TracingSettings, WorkerSettings
from gateway.service import main
from gateway.text.tokenizer import Tokenizer
from instar.running import trust_of, url_of
from tests.support import metrics_samples
from tests.support.fake_worker import LEASE_S, FakeWorker

BODY: dict[str, Any] = {"model": "demo", "prompt": "fox", "max_tokens": 100}
ANSWER = "the quick Größe 🌍 jumps over 你好, too."
# In seconds: a gateway that serves looks less often after dead workers, deadlines, keys and who leads.
OFTEN: dict[str, Any] = {"POLL_S": 0.3, "POLL_BUSY_S": 0.1, "TICK_S": 0.05, "DEMAND_S": 0.2, "KEYS_S": 0.1}


@dataclass
class Gate:
    """A gateway, its workers, and clients of it."""

    settings: Settings
    bus: Bus
    tokenizer: Tokenizer
    folder: Path
    workers: list[FakeWorker] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self.settings.gateway)

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    def as_new(self) -> Gate:
        """Let its worker forget all and behave again; return it."""
        self.worker.behave(self.says(ANSWER))
        return self

    def client(self, **options: Any) -> Any:
        """An openai.AsyncOpenAI; typed loosely, since tests send it what its types forbid."""
        defaults: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 20}
        return openai.AsyncOpenAI(base_url=self.url + "/v1", **(defaults | options))

    def http(self, **options: Any) -> httpx.AsyncClient:
        options.setdefault("verify", trust_of(self.settings.gateway, is_own=True))
        return httpx.AsyncClient(base_url=self.url, timeout=20, **options)

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A bare socket, for what no client library would do."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.settings.gateway.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer._rust.encode(text, add_special_tokens=False).ids)

    def says(self, text: str, *, ends: bool = True) -> Callable[[Submit], list[int]]:
        """A reply; `ends`: with the end token."""
        tokens = self.ids(text) + ([self.tokenizer.stop_token_ids[0]] if ends else [])
        return lambda submit: tokens if submit.sampling.stop_token_ids else tokens + tokens

    async def add_worker(self, name: str = "w0", **options: Any) -> FakeWorker:
        state = options.pop("state", "serving")
        worker = FakeWorker(self.bus, self.folder, self.says(ANSWER), worker=name, **options)
        self.workers.append(worker)
        await worker.start(state)
        await self.bus.event("worker_joined", name, "test")
        return worker

    async def until(self, what: str, true: Callable[[], Any], within_s: float = 8.0) -> None:
        deadline = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
            await asyncio.sleep(0.01)

    async def state(self) -> dict[str, Any]:
        async with self.http() as http:
            found: dict[str, Any] = (await http.get("/admin/state")).json()
            return found

    async def is_ready(self, models: int = 1) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            async with self.http() as http:
                answer = await http.get("/ready")
                return answer.status_code == 200 and len(answer.json()["models"]) >= models
        return False

    async def wait_ready(self) -> None:
        deadline = time.monotonic() + 10
        while not await self.is_ready():
            assert time.monotonic() < deadline, "the gateway did not become ready"
            await asyncio.sleep(0.02)

    async def settled(self) -> None:
        """Check that nothing is left in the state."""
        deadline = time.monotonic() + 8
        while (found := (await self.state())["gateway"])["inflight"] or found["streams"]:
            assert time.monotonic() < deadline, f"still in state: {found}"
            await asyncio.sleep(0.02)


class Hasty:
    """asyncio for uvicorn, which sleeps for a tenth of a second whenever it ends."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay: float) -> None:
        await asyncio.sleep(min(delay, 0.01))


@contextlib.asynccontextmanager
async def running(
    redis: RedisSettings,
    folder: Path,
    *,
    workers: int = 1,
    wait: bool = True,
    tracing: TracingSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Gate]:
    """`settings` are those of the gateway."""
    section = GatewaySettings(port=free_port(), **{"drain_timeout_s": 2.0} | settings)
    all_settings = Settings(
        redis=redis,
        gateway=section,
        worker=WorkerSettings(lease_s=LEASE_S),
        tracing=tracing or TracingSettings(),
    )
    with (
        patch.multiple("gateway.loops", **OFTEN),
        patch("gateway.operations.answers.LOOK_S", 0.05),
        patch("uvicorn.server.asyncio", Hasty()),
    ):
        async with _running(all_settings, redis, folder, workers=workers, wait=wait) as gate:
            yield gate


@contextlib.asynccontextmanager
async def _running(
    all_settings: Settings, redis: RedisSettings, folder: Path, *, workers: int, wait: bool
) -> AsyncIterator[Gate]:
    async with connect(redis, source="test") as bus, connect(redis, source="gateway") as own:
        gate = Gate(all_settings, bus, Tokenizer(folder, 1000), folder)
        for index in range(workers):
            await gate.add_worker(f"w{index}")
        gate.task = asyncio.create_task(main(all_settings, own, gate.stop))
        try:
            if wait:
                await (gate.wait_ready() if workers else _answers(gate))
            yield gate
        finally:
            gate.stop.set()
            await asyncio.wait([gate.task], timeout=10)
            for worker in gate.workers:
                await worker.die()
            gate.task.result()


async def _answers(gate: Gate) -> None:
    deadline = time.monotonic() + 10
    while True:
        with contextlib.suppress(httpx.HTTPError):
            async with gate.http() as http:
                if (await http.get("/health")).status_code == 200:
                    return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def metrics_of(worker: FakeWorker, **numbers: int) -> Metrics:
    """A monitor's picture of one worker."""
    return metrics_samples.metrics_of(worker.instance, worker.epoch, layers=worker.shape.layers, **numbers)

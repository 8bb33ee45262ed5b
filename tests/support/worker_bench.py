"""A worker's service with a toy model on a real Redis, and a gateway that hears what it says."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from bus.client import Bus, BusUnavailable, connect
from bus.messages import Delta, InstanceCard, SamplingParams, StepOutput, Submit
from bus.settings import RedisSettings, Settings, WorkerSettings
from tests.support.engine_toys import VOCAB, ToyModel, toy_engine
from worker.deploy.model_host import HostedModel, ModelHost
from worker.engine.core import EngineCore
from worker.memory import CpuBackend, PagePool
from worker.morph.manager import MorphManager
from worker.service.worker import serve

B = TypeVar("B", bound="Bench")

INSTANCE = "toy@w0"
LEASE_S = 6.0  # longer than a busy machine can keep the renewal waiting


class SlowToy(ToyModel):
    """A step takes `step_s`, and does not end while `may_end` is clear: tests can act in mid-stream."""

    def __init__(self) -> None:
        super().__init__()
        self.step_s = 0.0
        self.may_end = threading.Event()
        self.may_end.set()

    def forward(self, *args: Any) -> Any:
        time.sleep(self.step_s)
        assert self.may_end.wait(10), "a test forgot to let the step end"
        return super().forward(*args)


def toy_target(pool: PagePool) -> Any:
    """Return a target of one layer without variants, of which only the number of possible blocks is asked."""
    cache = SimpleNamespace(pool=pool, num_layers=1, blocks_in=lambda pages: pages)
    variants = SimpleNamespace(precisions=["full"], pages=lambda layer, part, precision: 0)
    return SimpleNamespace(resizer=SimpleNamespace(cache=cache), variants=variants)


@dataclass
class Bench:
    """A running worker, a bus to talk to it, and what it said to gateway g0."""

    bus: Bus
    settings: RedisSettings
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    received: list[StepOutput] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    worker_bus: Bus | None = None

    def __post_init__(self) -> None:
        self.engine, self.instance = toy_engine(num_blocks=40)
        self.model: Any = SlowToy()
        self.instance.model = self.instance.local_executor._model = self.model
        self.morphs = MorphManager("w0", {})

    def load(self, settings: WorkerSettings, worker: str, progress: Callable[[str], None]) -> ModelHost:
        progress("loading toy: 50 %")
        pool = PagePool(CpuBackend(65536), 4 * 65536)
        host = ModelHost(worker, pool, self.engine, settings, self.morphs)
        model: Any = None  # no test loads one here
        for instance in self.engine.instances.values():
            host.models[instance.id] = HostedModel(card(instance), toy_target(pool), model)
        return host

    async def start(self, **changes: Any) -> None:
        worker = WorkerSettings(
            **{"id": "w0", "lease_s": LEASE_S, "telemetry_s": 0.05, "idle_telemetry_s": 0.2, **changes}
        )
        self.worker_bus = connect(self.settings, source="w0")
        await self.worker_bus.start()
        settings = Settings(redis=self.settings, worker=worker)
        self.task = asyncio.create_task(serve(settings, self.worker_bus, self.stop, self.load))
        await self.until(self.is_serving)

    async def aclose(self) -> None:
        try:
            if self.task:
                self.stop.set()
                self.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self.task
        finally:
            if self.worker_bus:
                await self.worker_bus.aclose()

    async def is_serving(self) -> bool:
        return any(live.card.state == "serving" for live in await self.bus.workers())

    async def is_draining(self) -> bool:
        return any(live.card.state == "draining" for live in await self.bus.workers())

    async def lose_lease(self) -> int:
        """End the lease as if it had run out, and return the epoch that the worker takes then."""
        before = await self.epoch()
        lease = self.bus.names.lease("w0")
        await self.bus.run(lambda client: client.delete(lease))
        return await self.epoch_above(before)

    async def epoch_above(self, before: int) -> int:
        """The worker's next one."""

        async def newer() -> int:
            return next((live.epoch for live in await self.bus.workers() if live.epoch > before), 0)

        epoch: int = await self.until(newer)
        return epoch

    async def epoch(self) -> int:
        (live,) = await self.bus.workers()
        return live.epoch

    async def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        instance: str = INSTANCE,
        **changes: Any,
    ) -> None:
        """Submit as gateway g0 does, greedily, to this epoch; `changes` are other fields of Submit."""
        fields: dict[str, Any] = {
            "request_id": name,
            "attempt": 1,
            "gateway": "g0",
            "prompt_token_ids": prompt,
            "sampling": SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0),
        }
        epoch = changes.pop("epoch", None) or await self.epoch()
        submit = Submit(**{**fields, "epoch": epoch, **changes})
        await self.bus.publish(self.bus.names.requests(instance), submit)

    @property
    def stream(self) -> str:
        return self.bus.names.requests(INSTANCE)

    async def listen(self) -> None:
        """A gateway that keeps its lease and reads its tokens."""
        await self.bus.renew_gateway("g0", 60.0)
        async with self.bus.reader(self.bus.names.tokens("g0"), StepOutput, start="0") as reader:
            async for batch in reader:
                self.received += [message for _, message in batch]

    def deltas(self, name: str, epoch: int | None = None) -> list[Delta]:
        return [
            delta
            for output in self.received
            for delta in output.deltas
            if delta.request_id == name and epoch in (None, output.epoch)
        ]

    def tokens(self, name: str, epoch: int | None = None) -> list[int]:
        """Return the tokens by index, as a gateway puts them together."""
        placed: dict[int, int] = {}
        for delta in self.deltas(name, epoch):
            placed |= {delta.index + i: token for i, token in enumerate(delta.token_ids)}
        return [placed[i] for i in sorted(placed)]

    def end(self, name: str, epoch: int | None = None) -> str | None:
        return next((d.finish_reason for d in self.deltas(name, epoch) if d.finish_reason), None)

    async def until(self, true: Callable[[], Any], within_s: float = 10.0) -> Any:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            with contextlib.suppress(BusUnavailable):
                value = true()
                if isinstance(value, Awaitable):
                    value = await value
                if value:
                    return value
            await asyncio.sleep(0.01)
        raise AssertionError("waited in vain")

    async def backlog(self) -> int:
        return await self.bus.length(self.stream)

    async def is_settled(self) -> bool:
        """No entry left, every block free."""
        blocks = self.instance.scheduler.blocks
        return await self.backlog() == 0 and blocks.num_free == blocks.capacity


def card(instance: EngineCore) -> InstanceCard:
    return InstanceCard(
        id=instance.id,
        model="toy",
        model_path="/nowhere",
        max_model_len=200,
        vocab_size=VOCAB,
        num_layers=2,
        dtype="float32",
        block_tokens=4,
        workers=["w0"],
    )


@contextlib.asynccontextmanager
async def running(settings: RedisSettings, **changes: Any) -> AsyncIterator[Bench]:
    async with connect(settings, source="test") as bus, started(Bench(bus, settings), **changes) as bench:
        yield bench


@contextlib.asynccontextmanager
async def started(bench: B, **changes: Any) -> AsyncIterator[B]:
    listener = asyncio.create_task(bench.listen())
    try:
        await bench.start(**changes)
        yield bench
    finally:
        listener.cancel()
        await bench.aclose()

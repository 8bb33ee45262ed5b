"""The worker's service with a toy model on a real Redis: what it reads, runs, publishes and gives up."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from bus.client import Bus, BusUnavailable, RedisPassword, connect
from bus.messages import (
    Cancel,
    Delta,
    Drain,
    InstanceCard,
    PageCounts,
    SamplingParams,
    StepOutput,
    Submit,
    WorkerTelemetry,
)
from bus.settings import RedisSettings, Settings, WorkerSettings
from tests.conftest import settings_of
from tests.engine_toys import VOCAB, ToyModel, continuation, toy_engine, toy_instance
from tests.redis_process import RedisProcess
from worker.engine.instance import Instance
from worker.service import gateways
from worker.service.intake import Intake
from worker.service.ledger import Ledger
from worker.service.loaded import CannotServe, Loaded
from worker.service.worker import serve

INSTANCE = "toy@w0"
LEASE_S = 0.6


class SlowToy(ToyModel):
    """A step takes `step_s`, so that a test can act in mid-stream."""

    step_s = 0.0

    def forward(self, *args: Any) -> Any:
        time.sleep(self.step_s)
        return super().forward(*args)


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
        self.model = SlowToy()
        self.instance.model = self.model

    def load(self, settings: WorkerSettings, worker: str, progress: Callable[[str], None]) -> Loaded:
        progress("loading toy: 50 %")
        return Loaded(
            engine=self.engine,
            cards=[card(instance) for instance in self.engine.instances.values()],
            pages=lambda: PageCounts(budget=4, weights=1, kv=2, free=1),
            device="cpu",
            page_bytes=65536,
            fingerprint="tp1-full",
        )

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
        if self.task:
            self.stop.set()
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task
        if self.worker_bus:
            await self.worker_bus.aclose()

    async def is_serving(self) -> bool:
        return any(live.card.state == "serving" for live in await self.bus.workers())

    async def is_draining(self) -> bool:
        return any(live.card.state == "draining" for live in await self.bus.workers())

    async def epoch(self) -> int:
        (live,) = await self.bus.workers()
        return live.epoch

    async def submit(self, name: str, prompt: list[int], max_tokens: int = 8, **changes: Any) -> str:
        fields: dict[str, Any] = {
            "request_id": name,
            "attempt": 1,
            "gateway": "g0",
            "prompt_token_ids": prompt,
            "sampling": SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0),
        }
        epoch = changes.pop("epoch", None) or await self.epoch()
        await self.bus.publish(self.stream, Submit(**{**fields, "epoch": epoch, **changes}))
        return name

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
        """By index, as a gateway puts them together."""
        placed: dict[int, int] = {}
        for delta in self.deltas(name, epoch):
            placed |= {delta.index + i: token for i, token in enumerate(delta.token_ids)}
        return [placed[i] for i in sorted(placed)]

    def end(self, name: str) -> str | None:
        return next((delta.finish_reason for delta in self.deltas(name) if delta.finish_reason), None)

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


def card(instance: Instance) -> InstanceCard:
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
    async with connect(settings, source="test") as bus:
        bench = Bench(bus, settings)
        listener = asyncio.create_task(bench.listen())
        try:
            await bench.start(**changes)
            yield bench
        finally:
            listener.cancel()
            await bench.aclose()


@pytest.fixture
async def bench(redis_settings: RedisSettings) -> AsyncIterator[Bench]:
    async with running(redis_settings) as started:
        yield started


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


async def test_a_submit_for_another_epoch_is_deleted_and_never_run(bench: Bench) -> None:
    await bench.submit("old", [1], epoch=5)
    await bench.submit("new", [1])
    await bench.until(lambda: bench.end("new"))
    await bench.until(bench.is_settled)
    assert not bench.deltas("old")


async def test_the_same_submit_twice_runs_once(bench: Bench) -> None:
    bench.model.step_s = 0.02
    for _ in range(3):
        await bench.submit("a", [1], 10)
    await bench.until(lambda: bench.end("a"))
    await bench.until(bench.is_settled)
    indexes = [delta.index for delta in bench.deltas("a") if delta.token_ids]
    assert indexes == list(range(10))


async def test_a_request_whose_entry_is_read_again_runs_once_and_is_acknowledged_at_its_end(
    bench: Bench, redis_server: RedisProcess
) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 60)
    await bench.until(lambda: bench.tokens("a"))
    with redis_server.client() as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.4)
    assert await bench.backlog() == 1
    await bench.until(lambda: bench.end("a"))
    await bench.until(bench.is_settled)
    assert bench.tokens("a") == continuation([1], 60)
    assert bench.instance.stats.finished == {"length": 1}


async def test_a_batch_that_an_earlier_epoch_read_is_not_run(bench: Bench) -> None:
    """Its reader is cancelled a moment after the epoch changed."""
    intake = Intake(bench.bus, "w0", lambda: 2, Ledger(), Unusable(), Unusable())  # type: ignore[arg-type]
    async with bench.bus.group_reader(bench.bus.names.requests("other@w0"), "w0:1", Submit) as reader:
        await reader.open()
    submit = Submit(
        request_id="a",
        attempt=1,
        gateway="g0",
        epoch=1,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1, seed=0),
    )
    await bench.bus.publish(bench.bus.names.requests("other@w0"), submit)
    await asyncio.wait_for(intake.read_requests("other@w0", epoch=1), 5)


class Unusable:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


async def test_a_higher_attempt_replaces_the_running_one_and_goes_on_from_what_was_sent(bench: Bench) -> None:
    bench.model.step_s = 0.02
    whole = continuation([1], 30)
    await bench.submit("a", [1], 30)
    await bench.until(lambda: len(bench.tokens("a")) >= 5)
    await bench.submit("a", [1], 30, attempt=2, sent_token_ids=whole[:5])
    await bench.until(lambda: bench.end("a"))
    second = [delta for delta in bench.deltas("a") if delta.attempt == 2]
    assert second[0].index == 5
    assert [token for delta in second for token in delta.token_ids] == whole[5:]
    await bench.until(bench.is_settled)


async def test_a_cancel_stops_a_running_request_and_frees_its_blocks(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 150)
    await bench.until(lambda: len(bench.tokens("a")) >= 3)
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["a", "nobody"])
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await bench.until(bench.is_settled)
    said = len(bench.deltas("a"))
    await asyncio.sleep(0.2)
    assert len(bench.deltas("a")) == said and bench.end("a") is None


async def test_a_cancel_that_overtakes_its_submit_works_too(bench: Bench) -> None:
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["a"])
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await asyncio.sleep(0.2)
    await bench.submit("a", [1], 150)
    await bench.until(bench.is_settled)
    assert not bench.deltas("a")


async def test_requests_of_a_gateway_that_died_are_cancelled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "CHECK_S", 0.1)
    monkeypatch.setattr(gateways, "GRACE_S", 0.3)
    bench.model.step_s = 0.02
    await bench.submit("theirs", [1], 190, gateway="dead")
    await bench.submit("ours", [2], 150)
    await bench.until(lambda: bench.instance.stats.finished["cancelled"] == 1)
    await bench.until(lambda: bench.end("ours"))
    assert bench.tokens("ours") == continuation([2], 150)
    await bench.until(bench.is_settled)


async def test_a_gateway_whose_lease_ran_out_may_submit_its_requests_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "CHECK_S", 0.05)
    monkeypatch.setattr(gateways, "GRACE_S", 0.1)
    bench.model.step_s = 0.02
    lease = bench.bus.names.gateway_lease("g0")
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    await bench.bus.link.run(lambda client: client.delete(lease))
    await bench.until(lambda: bench.instance.stats.finished["cancelled"] == 1)
    await bench.bus.renew_gateway("g0", 60.0)
    bench.model.step_s = 0.0
    await bench.submit("a", [1], 10, attempt=2)
    await bench.until(lambda: bench.end("a"))
    await bench.until(bench.is_settled)


async def test_a_cancel_of_an_earlier_attempt_leaves_the_running_one_alone(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 30, attempt=2)
    await bench.until(lambda: bench.tokens("a"))
    command = Cancel(id="c1", epoch=await bench.epoch(), request_ids=["a"], up_to_attempt=1)
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1], 30)


async def test_a_failing_step_answers_its_requests_and_the_worker_goes_on(bench: Bench) -> None:
    bench.model.fail_on = 77
    await bench.submit("bad", [77])
    await bench.until(lambda: bench.end("bad"))
    assert bench.end("bad") == "error"
    await bench.submit("good", [1], 4)
    await bench.until(lambda: bench.end("good"))
    assert bench.tokens("good") == continuation([1], 4)
    await bench.until(bench.is_settled)


async def test_a_worker_whose_lease_was_lost_drops_everything_and_joins_as_somebody_new(bench: Bench) -> None:
    bench.model.step_s = 0.02
    before = await bench.epoch()
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    lease = bench.bus.names.lease("w0")
    await bench.bus.link.run(lambda client: client.delete(lease))

    async def is_somebody_new() -> bool:
        live = await bench.bus.workers()
        return bool(live) and live[0].epoch > before

    await bench.until(is_somebody_new)
    blocks = bench.instance.scheduler.blocks
    await bench.until(lambda: blocks.num_free == blocks.capacity)
    said = len(bench.deltas("a"))
    await bench.until(bench.is_settled)
    await bench.submit("b", [2], 5)
    await bench.until(lambda: bench.end("b"))
    assert bench.tokens("b") == continuation([2], 5)
    assert len(bench.deltas("a")) == said


async def test_leftovers_of_an_earlier_epoch_are_ended_at_the_start(redis_settings: RedisSettings) -> None:
    async with connect(redis_settings) as bus:
        stream = bus.names.requests(INSTANCE)
        submit = Submit(
            request_id="a",
            attempt=1,
            gateway="g0",
            epoch=3,
            prompt_token_ids=[1],
            sampling=SamplingParams(max_tokens=1, seed=0),
        )
        async with bus.group_reader(stream, "w0:3", Submit) as reader:
            await reader.open()
            await bus.publish(stream, submit, submit)
            assert len(await reader.read()) == 2
        await bus.publish(stream, submit)
        async with running(redis_settings) as bench:
            await bench.until(bench.is_settled)
            assert not bench.received


async def test_sigterm_finishes_what_runs_and_gives_the_lease_up(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 40)
    await bench.until(lambda: bench.tokens("a"))
    bench.stop.set()
    await bench.until(bench.is_draining)
    assert bench.task is not None
    await asyncio.wait_for(bench.task, 10)
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1], 40)
    assert await bench.bus.workers() == []
    assert await bench.backlog() == 0


async def test_a_drain_command_does_the_same(bench: Bench) -> None:
    command = Drain(id="d1", epoch=await bench.epoch())
    await bench.bus.publish(bench.bus.names.control("w0"), command)
    assert bench.task is not None
    await asyncio.wait_for(bench.task, 10)
    assert await bench.bus.workers() == []


async def test_a_request_that_came_as_the_drain_began_is_finished(bench: Bench) -> None:
    bench.stop.set()
    await bench.until(bench.is_draining)
    assert bench.task is not None
    await asyncio.sleep(0.3)  # a gateway that has not read the card yet
    assert not bench.task.done()
    await bench.submit("late", [1], 9)
    await asyncio.wait_for(bench.task, 10)
    await bench.until(lambda: bench.end("late"))
    assert bench.tokens("late") == continuation([1], 9)


async def test_a_drain_that_takes_too_long_leaves_the_rest_to_others(redis_settings: RedisSettings) -> None:
    async with running(redis_settings, drain_timeout_s=0.3) as bench:
        bench.model.step_s = 0.05
        await bench.submit("a", [1], 190)
        await bench.until(lambda: bench.tokens("a"))
        bench.stop.set()
        assert bench.task is not None
        await asyncio.wait_for(bench.task, 5)
        assert bench.end("a") is None
        assert await bench.bus.workers() == []


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


async def test_redis_that_comes_back_within_the_lease_costs_nothing(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis(append_only=True)
    async with running(settings_of(server.url), lease_s=6.0) as bench:
        bench.model.step_s = 0.02
        await bench.submit("a", [1], 60)
        await bench.until(lambda: len(bench.tokens("a")) > 5)
        server.freeze()
        await asyncio.sleep(0.5)
        server.thaw()
        await bench.until(lambda: bench.end("a"))
        assert bench.tokens("a") == continuation([1], 60)
        await bench.until(bench.is_settled)


async def test_redis_that_lost_its_data_gets_a_worker_of_a_new_epoch(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis()
    async with running(settings_of(server.url)) as bench:
        bench.model.step_s = 0.02
        before = await bench.epoch()
        await bench.submit("a", [1], 190)
        await bench.until(lambda: bench.tokens("a"))
        server.kill()
        server.start()
        await bench.until(lambda: bench.bus.up)
        await bench.until(bench.is_serving)
        assert await bench.epoch() > before
        await bench.bus.renew_gateway("g0", 60.0)
        await bench.submit("b", [3], 5)
        await bench.until(lambda: bench.end("b"))
        assert bench.tokens("b") == continuation([3], 5)


async def test_a_redis_without_memory_holds_the_tokens_back_and_loses_none(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis("--maxmemory-policy", "noeviction")
    async with running(settings_of(server.url)) as bench:
        bench.model.step_s = 0.01
        await bench.submit("a", [1], 80)
        await bench.until(lambda: len(bench.tokens("a")) > 5)
        with server.client() as client:
            client.config_set("maxmemory", "1")
            await asyncio.sleep(0.5)
            client.config_set("maxmemory", "0")
        await bench.until(lambda: bench.end("a"))
        assert bench.tokens("a") == continuation([1], 80)
        await bench.until(bench.is_settled)


async def test_a_model_that_cannot_be_served_is_told_to_the_caller_and_the_lease_given_up(
    redis_settings: RedisSettings,
) -> None:
    def refuse(settings: WorkerSettings, worker: str, progress: Callable[[str], None]) -> Loaded:
        raise CannotServe("no config.json in /nowhere")

    async with connect(redis_settings) as bus:
        settings = Settings(redis=redis_settings, worker=WorkerSettings(id="w0"))
        with pytest.raises(CannotServe, match="no config"):
            await serve(settings, bus, asyncio.Event(), refuse)
        assert await bus.workers() == []


async def test_loading_is_on_the_card_and_can_be_stopped(redis_settings: RedisSettings) -> None:
    stop = asyncio.Event()
    stopped = threading.Event()

    def load(settings: WorkerSettings, worker: str, progress: Callable[[str], None]) -> Loaded:
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


async def test_an_error_of_the_renewal_ends_a_serving_worker(bench: Bench) -> None:
    async def refused(*_: object) -> bool:
        raise RedisPassword("the password was changed")

    assert bench.worker_bus is not None and bench.task is not None
    bench.worker_bus.renew_lease = refused  # type: ignore[method-assign, assignment]
    with pytest.raises(RedisPassword):
        await asyncio.wait_for(bench.task, 10)
    bench.task = None


async def test_two_instances_of_one_worker_have_streams_of_their_own(redis_settings: RedisSettings) -> None:
    async with connect(redis_settings, source="test") as bus:
        bench = Bench(bus, redis_settings)
        second = toy_instance()
        second.id = "other@w0"
        bench.engine.add_instance(second)
        listener = asyncio.create_task(bench.listen())
        try:
            await bench.start()
            await bench.submit("a", [1], 5)
            submit = Submit(
                request_id="b",
                attempt=1,
                gateway="g0",
                epoch=await bench.epoch(),
                prompt_token_ids=[2],
                sampling=SamplingParams(max_tokens=5, seed=1, temperature=0.0),
            )
            await bus.publish(bus.names.requests("other@w0"), submit)
            await bench.until(lambda: bench.end("a") and bench.end("b"))
            assert bench.tokens("b") == continuation([2], 5)
            assert {output.instance for output in bench.received} == {"toy@w0", "other@w0"}
        finally:
            listener.cancel()
            await bench.aclose()

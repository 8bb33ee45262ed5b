"""A worker that lost its lease fences itself: nothing of the old epoch runs, goes out or is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus.client import Bus, BusUnavailable, connect
from bus.errors import RedisPassword
from bus.messages import Cancel, Drain, Submit
from bus.names import consumer
from bus.settings import RedisSettings
from tests.support.bus_samples import submit
from tests.support.engine_toys import continuation
from tests.support.worker_bench import INSTANCE, Bench, running
from worker.service.intake import Intake
from worker.service.ledger import Ledger

LEASE_S = 0.6


@pytest.fixture
async def bench(redis_settings: RedisSettings) -> AsyncIterator[Bench]:
    """A worker with a short lease."""
    async with running(redis_settings, lease_s=LEASE_S) as started:
        yield started


async def test_a_worker_whose_lease_was_lost_drops_everything_and_joins_as_somebody_new(bench: Bench) -> None:
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    await bench.lose_lease()
    blocks = bench.instance.scheduler.blocks
    await bench.until(lambda: blocks.num_free == blocks.capacity, within_s=1.0)  # "a" would take 4 s
    said = len(bench.deltas("a"))
    await bench.until(bench.is_settled)
    await bench.submit("b", [2], 5)
    await bench.until(lambda: bench.end("b"))
    assert bench.tokens("b") == continuation([2], 5)
    assert len(bench.deltas("a")) == said


async def test_a_worker_that_cannot_renew_falls_silent_and_what_it_made_meanwhile_never_goes_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its renewals fail: whatever else it sends would arrive."""

    async def away(*_: object) -> bool:
        raise BusUnavailable("away")

    async def is_gone() -> bool:
        return not await bench.bus.workers()

    bench.model.step_s = 0.02
    before = await bench.epoch()
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    with monkeypatch.context() as patch:
        patch.setattr(bench.worker_bus, "renew_lease", away)
        await bench.until(is_gone)  # from here on others may take its work over
        await asyncio.sleep(0.1)
        said, num_steps = len(bench.deltas("a")), len(bench.model.num_tokens)
        await asyncio.sleep(0.4)
        assert len(bench.deltas("a")) == said
        assert len(bench.model.num_tokens) > num_steps, "the engine goes on: the lease may still be renewed"
    await bench.epoch_above(before)
    await bench.submit("b", [2], 5)
    await bench.until(lambda: bench.end("b"))
    assert len(bench.deltas("a")) == said


async def test_a_step_that_ends_after_the_lease_was_lost_says_nothing_and_its_requests_may_come_again(
    bench: Bench,
) -> None:
    """Even the same attempts of them, as long as they are addressed to the new epoch."""
    before = await bench.epoch()
    await bench.submit("ended", [3], 5)
    await bench.until(lambda: bench.end("ended"))
    bench.model.step_s = 0.02
    await bench.submit("a", [1], 190)
    await bench.until(lambda: bench.tokens("a"))
    bench.model.may_end.clear()
    await asyncio.sleep(0.1)
    said = len(bench.deltas("a"))
    after = await bench.lose_lease()
    await bench.submit("a", [1], 5)
    await bench.submit("ended", [3], 5)
    await asyncio.sleep(0.3)
    bench.model.may_end.set()
    await bench.until(lambda: bench.end("a", after) and bench.end("ended", after))
    assert bench.tokens("a", after) == continuation([1], 5)
    assert len(bench.deltas("a", before)) == said
    await bench.until(bench.is_settled)


async def test_commands_for_another_epoch_are_not_obeyed(bench: Bench) -> None:
    bench.model.step_s = 0.02
    control, before = bench.bus.names.control("w0"), await bench.epoch()
    await bench.lose_lease()
    await bench.submit("a", [1], 30)
    await bench.until(lambda: bench.tokens("a"))
    await bench.bus.publish(
        control, Cancel(id="c", epoch=before, request_ids=["a"]), Drain(id="d", epoch=before)
    )
    await bench.until(lambda: bench.end("a"))
    assert bench.tokens("a") == continuation([1], 30)
    assert await bench.is_serving()


async def test_a_batch_that_an_earlier_epoch_read_is_not_run(bus: Bus) -> None:
    """The old reader is cancelled a moment after the epoch changed."""
    intake = Intake(bus, "w0", lambda: 2, Ledger(), Unusable(), Unusable())  # type: ignore[arg-type]
    stream = bus.names.requests("other@w0")
    async with bus.group_reader(stream, consumer("w0", 1), Submit) as reader:
        await reader.open()
    await bus.publish(stream, submit("a", epoch=1))
    await asyncio.wait_for(intake.read_requests("other@w0", epoch=1), 5)


class Unusable:
    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was used")


async def test_leftovers_of_an_earlier_epoch_are_ended_at_the_start(redis_settings: RedisSettings) -> None:
    async with connect(redis_settings) as bus:
        stream = bus.names.requests(INSTANCE)
        async with bus.group_reader(stream, consumer("w0", 3), Submit) as reader:
            await reader.open()
            await bus.publish(stream, submit("a", epoch=3), submit("b", epoch=3))
            assert len(await reader.read()) == 2
        await bus.publish(stream, submit("c", epoch=3))
        async with running(redis_settings) as bench:
            await bench.until(bench.is_settled)
            assert not bench.model.num_tokens, "something was run"


async def test_an_error_of_the_renewal_ends_a_serving_worker(bench: Bench) -> None:
    async def refused(*_: object) -> bool:
        raise RedisPassword("the password was changed")

    assert bench.worker_bus is not None and bench.task is not None
    bench.worker_bus.renew_lease = refused  # type: ignore[method-assign, assignment]
    with pytest.raises(RedisPassword):
        await asyncio.wait_for(bench.task, 10)
    bench.task = None

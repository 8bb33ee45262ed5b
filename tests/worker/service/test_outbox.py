"""The outbox keeps order through an outage, brakes the engine when it is full, and forgets a lost epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from bus.client import BusFull, BusUnavailable
from bus.messages import StepOutput
from worker.service import publisher as outbox_module
from worker.service.publisher import Outbox, Parcel
from worker.service.tasks import end


class FakeBus:
    """Takes whole batches or raises `trouble`; counts what was sent twice."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.trouble: Exception | None = None
        self.loses_the_next_reply = False
        self.attempts = 0

    def batch(self) -> FakeBatch:
        return FakeBatch(self)

    async def wait_up(self) -> None:
        await asyncio.sleep(0.01)


class FakeBatch:
    def __init__(self, bus: FakeBus) -> None:
        self._bus, self._steps = bus, list[Any]()

    def publish(self, stream: str, message: StepOutput) -> None:
        self._steps.append((stream, message.step))

    def ack(self, stream: str, entry_id: str) -> None:
        self._steps.append((stream, entry_id))

    async def send(self) -> None:
        self._bus.attempts += 1
        trouble = self._bus.trouble  # of the moment at which it is sent
        await asyncio.sleep(0)
        publishes = any(stream.startswith("tokens") for stream, _ in self._steps)
        if trouble and (publishes or not isinstance(trouble, BusFull)):
            raise trouble
        self._bus.sent += self._steps
        if self._bus.loses_the_next_reply:
            self._bus.loses_the_next_reply = False
            raise BusUnavailable("the reply was lost")


class FakeBrake:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class Bench:
    def __init__(self) -> None:
        self.bus, self.brake = FakeBus(), FakeBrake()
        self.allowed = asyncio.Event()
        self.allowed.set()
        self.outbox = Outbox(self.bus, self.brake, self.may_publish, capacity=8)  # type: ignore[arg-type]

    async def may_publish(self) -> None:
        await self.allowed.wait()

    def put(self, *steps: int) -> None:
        for step in steps:
            output = StepOutput(
                worker="w0", epoch=1, instance="i", step=step, born_ns=0, fingerprint="", deltas=[]
            )
            self.outbox.put(Parcel(output, "tokens:g0", [("requests:i", f"{step}-0")]))

    def steps(self) -> list[int]:
        return [what for stream, what in self.bus.sent if stream.startswith("tokens")]

    async def is_empty(self) -> None:
        async with asyncio.timeout(5):
            await self.outbox.wait_empty()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    task = asyncio.create_task(made.outbox.run())
    yield made
    await end(task)


async def test_parcels_go_out_in_order_each_with_its_acknowledgements(bench: Bench) -> None:
    bench.put(1, 2, 3)
    await bench.is_empty()
    assert bench.bus.sent[:2] == [("tokens:g0", 1), ("requests:i", "1-0")]
    assert bench.steps() == [1, 2, 3]


@pytest.mark.parametrize("trouble", [BusUnavailable("away"), BusFull("no memory")])
async def test_nothing_is_lost_or_reordered_while_redis_cannot_take_it(
    bench: Bench, trouble: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "FULL_RETRY_S", 0.01)
    bench.bus.trouble = trouble
    bench.put(1, 2)
    await asyncio.sleep(0.1)
    bench.put(3)
    assert bench.bus.attempts > 1 and not bench.steps()
    bench.bus.trouble = None
    await bench.is_empty()
    assert bench.steps() == [1, 2, 3]


async def test_a_full_redis_gets_the_acknowledgements_which_free_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "FULL_RETRY_S", 0.01)
    bench.bus.trouble = BusFull("no memory")
    bench.put(1, 2)
    await asyncio.sleep(0.1)
    assert bench.bus.sent == [("requests:i", "1-0"), ("requests:i", "2-0")]
    bench.bus.trouble = None
    await bench.is_empty()
    assert bench.bus.sent[2:] == [("tokens:g0", 1), ("tokens:g0", 2)]


async def test_a_batch_whose_reply_was_lost_is_sent_again(bench: Bench) -> None:
    bench.bus.loses_the_next_reply = True
    bench.put(1, 2)
    await bench.is_empty()
    assert bench.steps() == [1, 2, 1, 2], "gateways drop what they have by index"


async def test_a_full_outbox_pauses_the_engine_and_a_half_empty_one_lets_it_go_on(bench: Bench) -> None:
    bench.bus.trouble = BusUnavailable("away")
    bench.put(*range(7))
    assert bench.brake.calls == []
    bench.put(7, 8)
    assert bench.brake.calls == ["pause"]
    bench.bus.trouble = None
    await bench.is_empty()
    assert bench.brake.calls == ["pause", "resume"]
    assert bench.steps() == list(range(9))


async def test_nothing_goes_out_while_the_lease_is_in_doubt(bench: Bench) -> None:
    bench.allowed.clear()
    bench.put(1)
    await asyncio.sleep(0.05)
    assert bench.bus.attempts == 0
    bench.outbox.clear()
    bench.put(2)
    bench.allowed.set()
    await bench.is_empty()
    assert bench.steps() == [2]


async def test_clearing_during_an_outage_drops_what_waited_and_releases_the_engine(bench: Bench) -> None:
    bench.bus.trouble = BusUnavailable("away")
    bench.put(*range(8))
    await asyncio.sleep(0.05)
    bench.outbox.clear()
    assert bench.brake.calls == ["pause", "resume"]
    bench.bus.trouble = None
    bench.put(100)
    await bench.is_empty()
    assert bench.steps() == [100]


async def test_what_a_new_epoch_makes_while_the_batch_of_the_lost_one_is_on_its_way_goes_out(
    bench: Bench,
) -> None:
    bench.put(1, 2)
    while not bench.bus.attempts:
        await asyncio.sleep(0)
    bench.outbox.clear()
    bench.put(3)
    await bench.is_empty()
    assert bench.steps() == [1, 2, 3]


async def test_a_dead_gateways_tokens_are_dropped_and_its_entries_still_acknowledged(bench: Bench) -> None:
    bench.bus.trouble = BusUnavailable("away")
    bench.put(1)
    bench.outbox.drop_gateway("tokens:g0")
    bench.bus.trouble = None
    await bench.is_empty()
    assert bench.bus.sent == [("requests:i", "1-0")]

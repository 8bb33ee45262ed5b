"""An order to become one with others always ends in a report: what the engine is told, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus.client import BusUnavailable
from bus.morphs import CancelMorph, Command, Transform
from bus.names import Names
from worker.service.intake import Intake

ORDER = Transform(id="t", epoch=1, instance="toy@w0", workers=["w0", "w1"], epochs={}, tp=2)


class Engine:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def morph(self, command: Transform, peers: object) -> None:
        self.told.append(("morph", command.id))

    def cancel_morph(self, morph_id: str) -> None:
        self.told.append(("cancel", morph_id))


class Bus:
    """A bus whose control stream has these commands; it says when it may who is a member."""

    names = Names("test:")

    def __init__(self, *commands: Command, error: Exception | None = None) -> None:
        self.commands, self.error = commands, error
        self.may_answer = asyncio.Event()

    async def members(self) -> list[Any]:
        await self.may_answer.wait()
        if self.error:
            raise self.error
        return []

    @asynccontextmanager
    async def reader(self, *_: Any) -> AsyncIterator[Bus]:
        yield self

    async def open(self) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[list[tuple[str, Command]]]:
        yield [("1-0", command) for command in self.commands]
        await asyncio.Event().wait()


def reading(bus: Any, engine: Any) -> asyncio.Task[None]:
    nothing: Any = None
    intake = Intake(bus, "w0", lambda: 1, nothing, engine, nothing)
    return asyncio.create_task(intake.read_commands(lambda: None))


async def stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until_told(engine: Engine, number: int) -> None:
    async with asyncio.timeout(5):
        while len(engine.told) < number:
            await asyncio.sleep(0.001)


async def test_a_cancel_right_behind_its_order_does_not_overtake_it() -> None:
    bus, engine = Bus(ORDER, CancelMorph(id="c", epoch=1, morph_id="t")), Engine()
    task = reading(bus, engine)
    await asyncio.sleep(0.01)
    bus.may_answer.set()
    await until_told(engine, 2)
    assert engine.told == [("morph", "t"), ("cancel", "t")]
    await stopped(task)


@pytest.mark.parametrize("error", [BusUnavailable("away"), ValueError("no card")])
async def test_an_order_goes_on_when_the_cards_cannot_be_read(error: Exception) -> None:
    bus, engine = Bus(ORDER, error=error), Engine()
    bus.may_answer.set()
    task = reading(bus, engine)
    await until_told(engine, 1)
    assert engine.told == [("morph", "t")]
    await stopped(task)


async def test_an_order_that_comes_as_the_worker_leaves_is_answered() -> None:
    engine = Engine()
    task = reading(Bus(ORDER), engine)
    await asyncio.sleep(0.01)
    await stopped(task)
    assert engine.told == [("morph", "t")]

"""A decision or an order fails for an error in the code: told, counted, answered; the controller goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from bus.client import Bus, RedisProblem
from bus.deployments import RegisterModel
from bus.leader import who_leads
from bus.messages import Event
from bus.settings import ControllerSettings, MonitorSettings, Settings
from controller import failures
from controller.deployments import deployer
from controller.membership import versions, watcher
from controller.morphing import morpher
from controller.service import main
from tests.support import service_loop
from tests.support.bus_samples import card

FAST = Settings(
    controller=ControllerSettings(interval_s=0.1, grace_s=0.3), monitor=MonitorSettings(stale_s=1.0)
)
PATIENCE_S = 20.0

running = partial(service_loop.running, main, FAST, survives=True)


@dataclass
class Fault:
    """A function of the controller that fails `left` times, then does what it did. Counts its calls."""

    real: Callable[..., Any]
    left: int
    error: Exception
    failed: int = 0
    done: int = 0

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.left:
            self.left, self.failed = self.left - 1, self.failed + 1
            raise self.error
        self.done += 1
        return self.real(*args, **named)


Inject = Callable[..., Fault]


@pytest.fixture
def inject(monkeypatch: pytest.MonkeyPatch) -> Inject:
    """`inject(module, "name", times=1)` lets the function fail where the module calls it."""
    monkeypatch.setattr(morpher, "GRANT_S", 0.1)
    monkeypatch.setattr(versions, "INTERVAL_S", 0.1)
    monkeypatch.setattr(failures, "TELL_S", 0.3)

    def into(module: ModuleType, name: str, times: int = 1, error: Exception | None = None) -> Fault:
        fault = Fault(getattr(module, name), times, error or TypeError(f"no number in {name}"))
        monkeypatch.setattr(module, name, fault)
        return fault

    return into


async def told(bus: Bus, kind: str, count: int = 1) -> list[Event]:
    """The events of a kind, when there are so many."""
    found: list[Event] = []
    async with asyncio.timeout(PATIENCE_S), bus.reader(bus.names.events, Event, start="0") as reader:
        while len(found) < count:
            found += [event for _, event in await reader.read() if event.kind == kind]
    return found


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("module", "name", "work"),
    [
        (watcher, "decide", "membership"),
        (versions, "common_version", "schema"),
        (morpher, "envelopes", "morphs"),
        (deployer, "reconcile", "deployments"),
    ],
)
async def test_a_decision_that_fails_is_told_and_made_again_by_the_same_leader(
    bus: Bus, inject: Inject, module: ModuleType, name: str, work: str
) -> None:
    fault = inject(module, name)
    with service_loop.survived() as logged:
        async with running(bus):
            (event,) = await told(bus, "controller_failed")
            before = await who_leads(bus)
            await until(lambda: fault.done > 1)
            assert (await who_leads(bus)).term == before.term
    assert (event.subject, event.numbers) == (work, {"failures": 1})
    assert event.reason.startswith(f"TypeError: no number in {name} (test_failures.py:")
    assert logged == [fault.error] and logged[0].__traceback__


async def test_an_order_that_fails_is_answered_as_failed_and_the_next_is_carried_out(
    bus: Bus, inject: Inject
) -> None:
    inject(deployer, "carry_out")
    async with running(bus):
        statuses = []
        for number in range(2):
            order = RegisterModel(id=f"o{number}", name="m", path="/nowhere")
            entry = await bus.catalogue.order(order)
            answer = await bus.catalogue.await_answer(order.id, entry, PATIENCE_S)
            assert answer
            statuses.append(answer.status)
            if not number:
                assert "failed to carry out this order: TypeError: no number in carry_out" in answer.error
        assert statuses == [500, 400]
        assert await bus.length(bus.names.orders) == 0
        (event,) = await told(bus, "controller_failed")
        assert event.subject == "orders"


async def test_what_fails_after_one_death_does_not_hide_the_next(bus: Bus, inject: Inject) -> None:
    fault = inject(watcher, "reap")
    async with running(bus):
        for worker in ("w0", "w1"):
            await bus.register_worker(card(worker, 5), lease_s=60)
        await told(bus, "worker_joined", 2)
        for worker in ("w0", "w1"):
            await bus.drop_lease(worker, 5)
        left = await told(bus, "worker_left", 2)
        assert sorted(event.subject for event in left) == ["w0", "w1"]
        await until(lambda: fault.done == 1)


async def test_what_fails_at_every_look_is_told_now_and_then_with_the_number_of_times(
    bus: Bus, inject: Inject, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = inject(deployer, "reconcile", times=10**6)
    monkeypatch.setattr(failures, "TELL_S", 1.0)
    with service_loop.survived() as logged:
        async with running(bus):
            first, second = (one.numbers["failures"] for one in await told(bus, "controller_failed", 2))
            assert first == 1 < second <= fault.failed - 1
    assert len(logged) < fault.failed  # a traceback for each event, not for each look


async def test_a_redis_that_cannot_be_used_ends_the_controller(bus: Bus, inject: Inject) -> None:
    fault = inject(deployer, "reconcile", error=RedisProblem("Redis is another's"))
    with pytest.raises(RedisProblem, match="another's"):
        async with running(bus):
            await until(lambda: fault.failed == 1)
            await asyncio.sleep(0.1)
    assert fault.done == 0

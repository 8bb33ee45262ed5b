"""The answer to a renewal, and its absence: a bus that answers as a test tells it to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bus.errors import BusFull, BusUnavailable, RedisPassword
from bus.messages import SCHEMA_VERSION, WorkerCard
from tests.support.bus_samples import card
from worker.service.membership import Membership
from worker.service.tasks import end

LONG_S, SHORT_S = 30.0, 0.2  # leases: of the long one no renewal falls due within a test


class ScriptedBus:
    """`told` has every command that arrived. A command first waits `delay_s`, then raises `trouble`."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.delay_s = 0.0
        self.trouble: Exception | None = None
        self.is_ours = True  # the lease
        self.schema = SCHEMA_VERSION

    def on_restart(self, callback: Callable[[object], None]) -> None:
        self.restart = callback

    async def wait_up(self) -> None:
        pass

    async def refuse_namesake(self, kind: str, name: str, lease_s: float) -> None:
        pass

    async def last_epoch(self, worker: str) -> int:
        return 0

    async def register_worker(self, shown: WorkerCard, lease_s: float) -> None:
        await self._take("register", shown)
        self.is_ours = True

    async def renew_lease(self, worker: str, epoch: int, lease_s: float) -> bool:
        await self._take("renew", lease_s)
        return self.is_ours

    async def update_card(self, shown: WorkerCard) -> bool:
        await self._take("show", shown)
        return self.is_ours

    async def drop_lease(self, worker: str, epoch: int) -> bool:
        await self._take("drop", epoch)
        return True

    async def _take(self, what: str, of: Any) -> None:
        trouble, delay_s = self.trouble, self.delay_s
        await asyncio.sleep(delay_s)
        self.told.append((what, of))
        if trouble:
            raise trouble

    def count(self, what: str) -> int:
        return sum(1 for name, _ in self.told if name == what)

    def shown(self) -> list[str]:
        return [of.state for name, of in self.told if name == "show"]

    async def until(self, what: str, times: int = 1) -> None:
        async with asyncio.timeout(2):
            while self.count(what) < times:
                await asyncio.sleep(0.005)


@pytest.fixture
def bus() -> ScriptedBus:
    return ScriptedBus()


def membership_of(bus: ScriptedBus, lease_s: float, state: Any = "serving") -> Membership:
    return Membership(bus, card("w0", 0, state=state), lease_s)  # type: ignore[arg-type]


@asynccontextmanager
async def renewing(membership: Membership) -> AsyncIterator[None]:
    task = asyncio.create_task(membership.run())
    try:
        yield
    finally:
        await end(task)


async def may_publish(membership: Membership, within_s: float) -> bool:
    try:
        await asyncio.wait_for(membership.may_publish(), within_s)
    except TimeoutError:
        return False
    return True


async def test_a_lease_counts_from_before_it_was_asked_for(bus: ScriptedBus) -> None:
    """Redis may have written it at once, and only its answer was slow."""
    bus.delay_s = 1.5 * SHORT_S
    membership = membership_of(bus, SHORT_S)
    await membership.join()
    assert not await may_publish(membership, 0.05), "the registration's lease has run out"
    async with renewing(membership):
        await bus.until("renew")
        assert not await may_publish(membership, SHORT_S), "the renewed lease has run out"
        bus.delay_s = 0.0
        assert await may_publish(membership, 2.0)


async def test_a_lease_that_was_shortened_and_not_confirmed_counts_as_short(bus: ScriptedBus) -> None:
    membership = membership_of(bus, SHORT_S, state="loading")
    await membership.join()
    async with renewing(membership):
        bus.trouble = BusUnavailable("the answer was lost")
        await membership.update(state="serving")
        await bus.until("renew")
        assert bus.told[-1] == ("renew", SHORT_S)
        await asyncio.sleep(SHORT_S)
        assert not await may_publish(membership, 0.1)


async def test_a_worker_is_fenced_before_anybody_can_learn_of_its_new_epoch(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    membership.on_fenced = lambda epoch: bus.told.append(("fenced", epoch))
    await membership.join()
    first = membership.epoch
    async with renewing(membership):
        bus.is_ours = False
        bus.restart(None)
        await bus.until("register", times=2)
    told = [(what, getattr(of, "epoch", of)) for what, of in bus.told if what in ("register", "fenced")]
    assert membership.epoch > first
    assert told == [("register", first), ("fenced", membership.epoch), ("register", membership.epoch)]


async def test_a_restart_of_redis_is_met_with_a_renewal_at_once(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    await membership.join()
    async with renewing(membership):
        bus.restart(None)
        await bus.until("renew")


async def test_who_waits_to_publish_has_the_lease_renewed_at_once(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    async with renewing(membership):
        assert await may_publish(membership, 2.0)
    assert bus.count("renew") == 1


async def test_a_renewal_that_met_no_redis_is_repeated_as_soon_as_there_is_one(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    await membership.join()
    async with renewing(membership):
        bus.trouble = BusUnavailable("away")
        bus.restart(None)
        await bus.until("renew")
        bus.trouble = None
        await bus.until("renew", times=2)


async def test_a_card_that_changed_while_its_worker_registered_is_shown_later(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    bus.delay_s = 0.1
    joining = asyncio.create_task(membership.join())
    await asyncio.sleep(0.05)
    bus.delay_s, bus.is_ours = 0.0, False
    await membership.update(state="draining")  # refused: there is no lease yet
    await joining
    async with renewing(membership):
        bus.restart(None)
        await bus.until("show", times=2)
    assert bus.shown() == ["draining", "draining"]


async def test_a_card_is_not_overtaken_by_an_older_one(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    await membership.join()
    bus.delay_s = 0.1
    older = asyncio.create_task(membership.update(state="serving"))
    await asyncio.sleep(0.02)
    bus.delay_s = 0.0
    await membership.update(state="draining")
    await older
    assert bus.shown() == ["serving", "draining"]


async def test_a_card_that_was_refused_behind_an_older_one_is_shown_later(bus: ScriptedBus) -> None:
    membership = membership_of(bus, LONG_S)
    await membership.join()
    bus.delay_s = 0.1
    older = asyncio.create_task(membership.update(state="serving"))
    await asyncio.sleep(0.02)
    bus.delay_s, bus.trouble = 0.0, BusFull("no memory")
    await membership.update(state="draining")
    await older
    bus.trouble = None
    async with renewing(membership):
        bus.restart(None)
        await bus.until("show", times=3)
    assert bus.shown() == ["serving", "draining", "draining"]


@pytest.mark.parametrize(
    "trouble", [BusUnavailable("away"), BusFull("no memory"), RedisPassword("it was changed")]
)
async def test_leaving_is_quiet_whatever_redis_says(bus: ScriptedBus, trouble: Exception) -> None:
    """An error here would hide the one that ended the worker; the lease runs out by itself."""
    membership = membership_of(bus, LONG_S)
    await membership.join()
    bus.trouble = trouble
    await membership.leave()
    assert bus.count("drop") == 1

"""One leads: the lease in Redis, the fence before every write, and the term in every entry."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from bus.client import Bus, connect
from bus.codec import encode
from bus.deployments import Answer, ModelCard
from bus.errors import BusFull, Fenced
from bus.leader import _LEAD, Leader, who_leads
from bus.leftovers import remove_worker
from bus.messages import DeadLetter, Event
from bus.settings import RedisSettings
from tests.conftest import settings_of
from tests.support.bus_samples import card
from tests.support.redis_process import RedisProcess

LEASE_S = 0.6


@pytest.fixture
async def other(redis_settings: RedisSettings) -> AsyncIterator[Bus]:
    async with connect(redis_settings, source="other") as started:
        yield started


class Reign:
    """The work of a leader: it counts, and runs until it is cancelled."""

    def __init__(self, leader: Leader) -> None:
        self.leader, self.begun = leader, 0
        self.task = asyncio.ensure_future(leader.lead(self._run))

    async def _run(self) -> None:
        self.begun += 1
        await asyncio.Event().wait()

    async def until_leading(self, times: int = 1) -> None:
        async with asyncio.timeout(5):
            while self.begun < times:
                await asyncio.sleep(0.01)
            await self.leader.wait_held()

    async def die(self) -> None:
        """End without giving the lease up."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


def event(text: str) -> Event:
    return Event(kind="told", source="test", subject="s", reason=text, at_ms=1, numbers={})


async def test_the_next_leads_at_once_after_one_that_leaves_and_a_lease_after_one_that_dies(
    bus: Bus, other: Bus, redis_settings: RedisSettings
) -> None:
    first, second = Leader(bus, "first", LEASE_S), Leader(other, "second", LEASE_S)
    leading = Reign(first)
    await leading.until_leading()
    waiting = Reign(second)
    await asyncio.sleep(2 * LEASE_S)  # renewed in between
    assert (leading.begun, waiting.begun) == (1, 0)
    view = await who_leads(other)
    assert (view.name, view.term) == ("first", first.term)
    assert 0 < view.lease_ms <= 1000 * LEASE_S
    loop = asyncio.get_running_loop()
    await leading.die()
    began_s = loop.time()
    await waiting.until_leading()
    assert loop.time() - began_s < LEASE_S + 0.3
    assert second.term > first.term
    async with connect(redis_settings, source="third") as link:
        third = Reign(Leader(link, "third", LEASE_S))
        await asyncio.sleep(LEASE_S / 3)
        await waiting.die()
        began_s = loop.time()
        await second.leave()
        await third.until_leading()
        assert loop.time() - began_s < LEASE_S * 0.9
        await third.die()


async def test_what_another_leader_made_void_is_not_written_and_the_work_begins_anew(
    bus: Bus, other: Bus
) -> None:
    first, second = Leader(bus, "first", LEASE_S), Leader(other, "second", LEASE_S)
    leading = Reign(first)
    await leading.until_leading()
    token = first.token
    await other.register_worker(card("w0", 5), lease_s=0.01)
    with pytest.MonkeyPatch.context() as patch:  # as a process that is stopped: it asks no more
        patch.setattr(first, "_pause", asyncio.Event().wait)
        await asyncio.sleep(0)
        await bus.unfenced_script("return redis.call('DEL', KEYS[1])", [first.key], [])
        waiting = Reign(second)
        await waiting.until_leading()
        patch.setattr(Leader, "token", token)  # its clock says that all is well
        model = ModelCard(name="m", path="/m", digest="d", num_layers=2, state="registered")
        for write in (
            bus.publish(bus.names.control("w0"), event("late")),
            bus.event("late", "s", "late"),
            bus.catalogue.write(model),
            bus.catalogue.settle("1-1", Answer(id="o", status=200), write=[model]),
            remove_worker(bus, "w0"),
        ):
            with pytest.raises(Fenced, match=f"term {first.term} of first does not lead: .*FENCED"):
                await write
    assert await other.length(other.names.control("w0")) == 0
    assert await other.length(other.names.events) == 0
    assert (await other.catalogue.read()).records == []
    assert len(await other.members()) == 1
    await leading.die()
    await waiting.die()


async def test_a_leader_that_lost_its_lease_to_nobody_goes_on_and_after_another_begins_anew(
    bus: Bus, other: Bus
) -> None:
    first = Leader(bus, "first", LEASE_S)
    leading = Reign(first)
    await leading.until_leading()
    term = first.term
    await other.unfenced_script("return redis.call('DEL', KEYS[1])", [first.key], [])
    with pytest.raises(Fenced):
        await bus.event("late", "s", "late")
    await asyncio.wait_for(bus.wait_up(), 5)
    await bus.event("again", "s", "again")
    assert (leading.begun, first.term > term) == (1, True)
    # Another leads, and leaves before the first looks.
    term = first.term + 1000
    taken = f"{term} another"
    script = "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('DEL', KEYS[2])"
    await other.unfenced_script(script, [bus.names.leader, first.key], [taken])
    await leading.until_leading(2)
    assert first.term > term
    await leading.die()


async def test_readers_refuse_by_name_what_an_earlier_leader_ordered(bus: Bus, other: Bus) -> None:
    leader = Leader(bus, "first", LEASE_S)
    leading = Reign(leader)
    await leading.until_leading()
    stream = bus.names.control("w0")
    async with other.reader(stream, Event, start="0") as reader:
        await bus.publish(stream, event("new"))
        await other.publish(stream, event("a gateway's"))
        script = "return redis.call('XADD', KEYS[1], '*', 'm', ARGV[1], 't', ARGV[2])"
        await other.unfenced_script(script, [stream], [encode(event("old")), leader.term - 1])
        got = [message.reason for _, message in await reader.next_batch()]
        while len(got) < 2:
            got += [message.reason for _, message in await reader.read()]
        await reader.read()
    assert got == ["new", "a gateway's"]
    async with other.reader(other.names.dead_letters, DeadLetter, start="0") as reader:
        ((_, letter),) = await reader.next_batch()
    assert f"term {leader.term - 1}, but the controller of term {leader.term} leads" in letter.reason
    await leading.die()


async def test_a_batch_of_a_leader_is_written_whole_or_not_at_all(bus: Bus, other: Bus) -> None:
    leader = Leader(bus, "first", LEASE_S)
    leading = Reign(leader)
    await leading.until_leading()
    batch = bus.batch()
    batch.publish(bus.names.control("w0"), event("a"))
    batch.publish(bus.names.events, event("b"))
    await batch.send()
    assert (await other.length(bus.names.control("w0")), await other.length(bus.names.events)) == (1, 1)
    await leading.die()


async def test_a_full_redis_refuses_a_leaders_batch_and_keeps_its_lease(
    own_redis: Callable[..., RedisProcess],
) -> None:
    server = own_redis("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    async with connect(settings_of(server.url), source="test") as bus:
        leader = Leader(bus, "first", LEASE_S)
        leading = Reign(leader)
        await leading.until_leading()
        with pytest.raises(BusFull):
            for _ in range(200):
                await bus.publish("filling", event("x" * 100_000))
        await asyncio.sleep(2 * LEASE_S)
        with pytest.raises(BusFull):
            await bus.publish("filling", event("x" * 100_000))
        assert leading.begun == 1
        await leading.die()


async def test_the_script_grants_as_the_plain_rule_says(bus: Bus) -> None:
    keys = [bus.names.leader_lease, bus.names.leader]
    draw = random.Random(7)
    holder, last, term = "", "", 0  # the plain rule
    for _ in range(300):
        what = draw.random()
        if what < 0.2:
            holder = ""
            await bus.unfenced_script("return redis.call('DEL', KEYS[1])", keys, [])
        elif what < 0.25:
            holder = last = ""
            await bus.unfenced_script("return redis.call('DEL', KEYS[1], KEYS[2])", keys, [])
        else:
            name, goes_on = draw.choice("abc"), draw.random() < 0.5
            said, is_mine, left_ms = await bus.unfenced_script(
                _LEAD, keys, [name, 60_000, term, int(goes_on)]
            )
            said_term, said_name = int(said.split()[0]), said.split()[1].decode()
            if holder:
                expected = holder == name
                assert said_term == term
            else:
                expected = not goes_on or last in ("", name)
                if expected:
                    assert said_term > term
                    holder = last = name
                    term = said_term
            assert bool(is_mine) == expected
            assert said_name == (name if expected else holder or last)
            assert left_ms > 0 or not holder


async def test_workers_without_a_leader_are_not_fenced(bus: Bus) -> None:
    await bus.register_worker(card("w0", 5), lease_s=5)
    assert await bus.renew_lease("w0", 5, lease_s=5)

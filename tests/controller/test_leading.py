"""Two controller processes: one leads, the other takes over, and one that wakes up late changes nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.common.service import Process, wait_for
from bus.client import Bus, connect
from bus.leader import LeaderView, who_leads
from bus.settings import RedisSettings
from tests.support.bus_samples import card

LEASE_S = 1.0
TAKEN_OVER_S = LEASE_S + 1.0  # on a calm machine half a second suffices


class Controllers:
    """Processes that the test starts, and what Redis says of them."""

    def __init__(self, redis: RedisSettings, bus: Bus, folder: Path) -> None:
        self.bus, self._folder = bus, folder
        base = {key: value for key, value in os.environ.items() if not key.startswith("INSTAR_")}
        self._env = base | {
            "INSTAR_CONFIG": "",
            "INSTAR_REDIS__URL": redis.url,
            "INSTAR_REDIS__PREFIX": redis.prefix,
            "INSTAR_CONTROLLER__LEASE_S": str(LEASE_S),
            "INSTAR_CONTROLLER__INTERVAL_S": "0.1",
        }
        self.processes: list[Process] = []

    def start(self) -> Process:
        name = f"controller{len(self.processes)}"
        command = [sys.executable, "-m", "controller"]
        process = Process(name, command, self._env, self._folder / f"{name}.log").start()
        self.processes.append(process)
        return process

    async def leads(self, process: Process, within_s: float = 20.0) -> LeaderView:
        """Wait until this process leads."""
        async with asyncio.timeout(within_s):
            while True:
                view = await who_leads(self.bus)
                if view.lease_ms and view.name.split("-")[-2] == str(process.pid):
                    return view
                await asyncio.sleep(0.02)

    async def says(self, process: Process, words: str) -> None:
        """Wait until a process has these words in its log."""
        await asyncio.to_thread(wait_for, words, lambda: words in process.tail(), 20)

    async def terms(self, stream: str) -> list[int]:
        """Return the terms of a stream's entries, 0 for one without."""
        rows: Any = await self.bus.run(lambda client: client.xrange(stream))
        return [int(fields.get(b"t", 0)) for _, fields in rows]


@asynccontextmanager
async def controllers(settings: RedisSettings, folder: Path) -> AsyncIterator[Controllers]:
    async with connect(settings, source="test") as bus:
        there = Controllers(settings, bus, folder)
        try:
            yield there
        except BaseException as problem:
            problem.add_note("\n".join(f"--- {one.name}\n{one.tail()}" for one in there.processes))
            raise
        finally:
            for one in there.processes:
                if one.is_alive:
                    one.signal(signal.SIGCONT)
                one.kill()


async def joined(there: Controllers, worker: str) -> None:
    """A worker joins, and the leader says so in an event."""
    before = await there.bus.length(there.bus.names.events)
    await there.bus.register_worker(card(worker, 5), lease_s=60)
    async with asyncio.timeout(10):
        while await there.bus.length(there.bus.names.events) == before:
            await asyncio.sleep(0.02)


Kill = Callable[[Process], object]


@pytest.mark.parametrize(
    ("end", "within_s"),
    [(Process.kill, TAKEN_OVER_S), (Process.terminate, TAKEN_OVER_S / 2)],
    ids=["kill -9", "a clean exit"],
)
async def test_the_other_takes_over_from_a_leader_that_ends(
    redis_settings: RedisSettings, tmp_path: Path, end: Kill, within_s: float
) -> None:
    async with controllers(redis_settings, tmp_path) as there:
        first = there.start()
        old = await there.leads(first)
        await joined(there, "w0")
        second = there.start()
        await there.says(second, "waits for its turn")
        await asyncio.to_thread(end, first)
        new = await there.leads(second, within_s)
        assert new.term > old.term
        await joined(there, "w1")
        terms = await there.terms(there.bus.names.events)
        assert terms == sorted(terms)
        assert set(terms) == {old.term, new.term}


async def test_a_leader_that_was_stopped_for_longer_than_its_lease_changes_nothing(
    redis_settings: RedisSettings, tmp_path: Path
) -> None:
    async with controllers(redis_settings, tmp_path) as there:
        first = there.start()
        old = await there.leads(first)
        await joined(there, "w0")
        second = there.start()
        await there.says(second, "waits for its turn")
        for stopped, other in ((first, second), (second, first)):  # and back
            stopped.signal(signal.SIGSTOP)
            new = await there.leads(other, TAKEN_OVER_S)
            assert new.term > old.term
            before = (await there.terms(there.bus.names.events)).count(old.term)
            stopped.signal(signal.SIGCONT)
            await there.says(stopped, "it waits")
            assert (await there.terms(there.bus.names.events)).count(old.term) == before
            await joined(there, f"w{new.term}")
            assert (await who_leads(there.bus)).name == new.name
            old = new
        terms = await there.terms(there.bus.names.events)
        assert terms == sorted(terms)

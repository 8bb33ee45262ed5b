"""docker/healthy.py, which compose and Kubernetes ask whether a container works, on a real Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bus.client import Bus
from bus.leader import Leader
from bus.service import run_until
from bus.settings import RedisSettings
from tests.support.bus_samples import card as card_of
from tests.support.health import healthy
from tests.support.metrics_samples import metrics_of

LEASE_S = 30.0


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, redis_settings: RedisSettings) -> None:
    for name, value in {
        "INSTAR_CONFIG": "",
        "INSTAR_REDIS__URL": redis_settings.url,
        "INSTAR_REDIS__PREFIX": redis_settings.prefix,
        "INSTAR_WORKER__ID": "w0",
    }.items():
        monkeypatch.setenv(name, value)


async def reasons(*checks: str) -> dict[str, str]:
    return {check: await asyncio.to_thread(healthy.main, check) for check in checks}


async def test_a_worker_is_healthy_while_it_holds_its_lease_and_serves_once_its_card_says_so(
    bus: Bus,
) -> None:
    assert all((await reasons("worker", "alive", "serving")).values()), "nobody has joined"
    card = card_of(state="loading")
    await bus.register_worker(card, LEASE_S)
    found = await reasons("worker", "alive", "serving")
    assert found == {"worker": "", "alive": "", "serving": "w0 is loading"}
    await bus.update_card(replace(card, state="serving"))
    assert not any((await reasons("worker", "alive", "serving")).values())
    await bus.drop_lease("w0", card.epoch)
    assert all((await reasons("worker", "alive", "serving")).values())


async def test_the_monitor_is_healthy_while_its_metrics_are_fresh(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is empty" in (await reasons("monitor"))["monitor"]
    await bus.publish(bus.names.metrics, metrics_of())
    assert (await reasons("monitor")) == {"monitor": ""}
    monkeypatch.setattr(healthy, "STALE_S", -5.0)
    assert "the monitor is stuck" in (await reasons("monitor"))["monitor"]


async def test_controllers_are_healthy_while_one_of_them_leads(bus: Bus) -> None:
    assert "no controller leads" in (await reasons("controller"))["controller"]
    leader = Leader(bus, "c0", LEASE_S)

    async def look() -> None:
        assert (await reasons("controller")) == {"controller": ""}
        ended.set()
        await asyncio.Event().wait()

    ended = asyncio.Event()
    await run_until(ended, leader.lead(look))
    await leader.leave()
    assert "no controller leads" in (await reasons("controller"))["controller"]


async def test_nothing_is_restarted_because_redis_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTAR_REDIS__URL", "redis://127.0.0.1:1/0")
    found = await reasons("alive", "monitor", "controller", "worker", "serving")
    assert not found["alive"] and not found["monitor"] and not found["controller"]
    assert found["worker"].startswith("Redis: ") and found["serving"].startswith("Redis: ")

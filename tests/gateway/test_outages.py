"""A Redis that restarts, forgets, is full or stays away: no request is lost, and none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from bus.client import BusUnavailable
from bus.policy import Policy
from tests.conftest import settings_of
from tests.support.gateway_harness import ANSWER, BODY, running
from tests.support.gateway_streams import answer, assert_whole, busy, hang_at
from tests.support.redis_process import RedisProcess

pytest_plugins = ["tests.support.gateway_fixtures"]


@pytest.mark.parametrize("append_only", [True, False])
async def test_requests_survive_a_restart_of_redis(
    own_redis: Callable[..., RedisProcess], folder: Path, append_only: bool
) -> None:
    server = own_redis(append_only=append_only)
    async with running(settings_of(server.url), folder) as gate:
        gate.worker.token_s = 0.05
        tasks = [asyncio.create_task(answer(gate)) for _ in range(3)]
        await gate.until("runs", lambda: gate.worker.num_running == 3)
        await asyncio.sleep(0.3)
        server.kill()
        server.start()
        await gate.worker.die()
        await gate.worker.start()
        for task in tasks:
            await assert_whole(gate, task)


async def test_a_flushed_redis_loses_no_request(own_redis: Callable[..., RedisProcess], folder: Path) -> None:
    server = own_redis()
    async with running(settings_of(server.url), folder) as gate:
        task = hang_at(gate, 5)
        await gate.until("a run", busy(gate))
        await asyncio.sleep(0.2)
        with server.client() as client:
            client.flushall()
        gate.worker.stop_at = None
        await assert_whole(gate, task)


async def test_a_policy_that_redis_lost_is_written_again(
    own_redis: Callable[..., RedisProcess], folder: Path
) -> None:
    server = own_redis()
    async with running(settings_of(server.url), folder) as gate, gate.http() as http:
        await http.put("/admin/policy", json={"mode": "manual"})
        await http.put("/admin/policy", json={"windows": 7})
        with server.client() as client:
            client.flushall()
        async with asyncio.timeout(8):
            while (policy := await gate.bus.read_policy()).revision == 0:
                await asyncio.sleep(0.05)
    assert (policy.mode, policy.windows, policy.revision) == ("manual", 7, 1)


async def test_a_policy_whose_last_change_a_failover_lost_is_written_again(
    own_redis: Callable[..., RedisProcess], folder: Path
) -> None:
    server = own_redis(append_only=True)
    async with running(settings_of(server.url), folder) as gate, gate.http() as http:
        await http.put("/admin/policy", json={"windows": 7})
        with server.client() as client:
            before = client.get(gate.bus.names.policy)
            await http.put("/admin/policy", json={"windows": 9})
            client.set(gate.bus.names.policy, before or b"")  # as in a replica that lagged behind
            server.kill()
        server.start()
        policy = Policy()
        async with asyncio.timeout(8):
            while policy.windows != 9:
                with suppress(BusUnavailable):
                    policy = await gate.bus.read_policy()
                await asyncio.sleep(0.05)
        assert policy.revision == 2


async def test_a_full_redis_is_a_clean_refusal(own_redis: Callable[..., RedisProcess], folder: Path) -> None:
    server = own_redis("--maxmemory-policy", "noeviction")
    async with running(settings_of(server.url), folder) as gate:
        with server.client() as client:
            client.config_set("maxmemory", "1")
            async with gate.client() as api:
                with pytest.raises(openai.InternalServerError) as failure:
                    await api.completions.create(**BODY)
            assert (failure.value.status_code, failure.value.code) == (503, "server_overloaded")
            client.config_set("maxmemory", "0")
        assert (await answer(gate))[0] == ANSWER


async def test_with_redis_away_new_requests_wait_a_little_and_then_get_503(
    own_redis: Callable[..., RedisProcess], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("state", "loops"):
        monkeypatch.setattr(f"gateway.{module}.BUS_PATIENCE_S", 1.0)
    server = own_redis()
    async with running(settings_of(server.url), folder) as gate, gate.http() as http:
        await gate.worker.die()
        server.kill()
        waited = await http.post("/v1/completions", json=BODY)
        refused = await http.post("/v1/completions", json=BODY)
        for refusal in (waited, refused):
            assert refusal.status_code == 503 and refusal.headers["retry-after"], refusal.text
            assert refusal.json()["error"]["code"] == "service_unavailable"
        assert waited.elapsed.total_seconds() > 0.5 > refused.elapsed.total_seconds()
        assert (await http.get("/health")).status_code == 200
        assert (await gate.state())["workers"][0]["state"] == "unknown"
        server.start()
        await gate.worker.start()
        await gate.wait_ready()
        served = await http.post("/v1/completions", json=BODY)
        assert served.json()["choices"][0]["text"] == ANSWER

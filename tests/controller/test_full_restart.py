"""Everything is killed, Redis too: what was registered and deployed is there again, and obeys orders."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from bench.common.service import Process
from bus.catalogue import Contents
from bus.client import Bus, connect
from bus.deployments import Answer, Deployment, Intent, ModelCard, RetireModel
from bus.leader import who_leads
from bus.policy import Policy
from bus.settings import RedisSettings
from tests.conftest import settings_of
from tests.support.redis_process import RedisProcess

MODEL = ModelCard(name="m", path="/m", digest="d", num_layers=2, state="profiled")
INTENT = Intent(minimise="latency", max_loss=0.01)
DEPLOYMENT = Deployment(
    id="a1", model="m", intent=Intent(minimise="latency", max_loss=0.01), state="waiting", reason=""
)


def started(settings: RedisSettings, folder: Path) -> Process:
    env = {key: value for key, value in os.environ.items() if not key.startswith("INSTAR_")}
    env |= {"INSTAR_CONFIG": "", "INSTAR_REDIS__URL": settings.url, "INSTAR_REDIS__PREFIX": settings.prefix}
    env |= {"INSTAR_CONTROLLER__LEASE_S": "1"}
    return Process("controller", [sys.executable, "-m", "controller"], env, folder / "log").start()


async def until_leading(bus: Bus, after: int = 0) -> int:
    async with asyncio.timeout(30):
        while (view := await who_leads(bus)).term <= after or not view.lease_ms:
            await asyncio.sleep(0.05)
    return view.term


async def test_models_deployments_intents_and_the_policy_survive_a_restart_of_everything(
    own_redis: Callable[..., RedisProcess], tmp_path: Path
) -> None:
    server = own_redis(append_only=True)
    settings = settings_of(server.url)
    controller = started(settings, tmp_path)
    try:
        async with connect(settings, source="test") as bus:
            term = await until_leading(bus)
            await bus.catalogue.write(MODEL, DEPLOYMENT)
            assert await bus.write_policy(Policy(revision=1, mode="accuracy"))
            await asyncio.sleep(0.5)  # the controller has seen it
        server.kill()
        controller.kill()
        server.start()
        controller.start()
        async with connect(settings, source="test") as bus:
            assert await until_leading(bus, after=term) > term
            there = await bus.catalogue.read()
            assert there.models == {"m": MODEL}
            assert there.deployments["a1"].intent == DEPLOYMENT.intent
            assert (await bus.read_policy()).mode == "accuracy"
            answer = await retired(bus)
            assert answer.status < 300, answer.error
            assert await settled(bus) == Contents({"m": MODEL})
    finally:
        controller.kill()


async def retired(bus: Bus) -> Answer:
    order = RetireModel(id="o1", deployment="a1")
    entry = await bus.catalogue.order(order)
    answer = await bus.catalogue.await_answer(order.id, entry, 10)
    assert answer is not None
    return answer


async def settled(bus: Bus) -> Contents:
    """The catalogue once no deployment serves, waits or loads."""
    async with asyncio.timeout(10):
        while True:
            contents = await bus.catalogue.read()
            if all(one.state == "retired" for one in contents.deployments.values()):
                return Contents(contents.models)
            await asyncio.sleep(0.05)

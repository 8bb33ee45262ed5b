"""Refused deployments, over HTTP with a controller beside the gateway: the answer says what is wrong and
names the numbers, and nothing is half-deployed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.precisions import PRECISIONS
from bus.settings import RedisSettings
from tests.support import tiny_model
from tests.support.deployable_worker import Cluster, cluster_of

# As pydantic words a choice.
_ANY_PRECISION = ", ".join(map(repr, PRECISIONS[:-1])) + f" or {PRECISIONS[-1]!r}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a tiny model of four layers, whose weights nobody reads."""
    folder = tmp_path / "tiny"
    tiny_model.byte_level(folder)
    (folder / "config.json").write_text('{"num_hidden_layers": 4}')
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
async def cluster(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(redis_settings, folder, workers=2) as cluster:
        yield cluster


async def shown(cluster: Cluster, path: str, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return what lies at this path of /admin, once it is so."""
    async with asyncio.timeout(8):
        while True:
            found: dict[str, Any] = (await cluster.http.get(f"/admin/{path}")).json()
            if true(found):
                return found
            await asyncio.sleep(0.02)


def message(answer: httpx.Response) -> str:
    return str(answer.json()["error"]["message"])


async def assert_nothing_is_deployed(cluster: Cluster) -> None:
    assert (await cluster.http.get("/admin/deployments")).json() == {"deployments": []}
    assert not [order for worker in cluster.workers.values() for order in worker.deploys]


async def busy_with(cluster: Cluster, orders: str) -> str:
    """The worker that was given one of these orders."""
    async with asyncio.timeout(8):
        while True:
            for name, worker in cluster.workers.items():
                if getattr(worker, orders):
                    return name
            await asyncio.sleep(0.02)


async def test_a_limit_that_nothing_meets_is_refused_with_the_best_there_is(cluster: Cluster) -> None:
    await cluster.profiled()
    for intent, words in (
        ({"max_latency_s": 1e-6}, "above max_latency_s 1e-06"),
        ({"max_cost": 1.0, "cost": "memory"}, "above max_cost 1"),
        ({"max_loss": 0.0, "precision": "int4"}, "int4"),
    ):
        answer = await cluster.http.post("/admin/deployments", json={"model": "m", "intent": intent})
        assert answer.status_code == 409, answer.text
        assert "no configuration meets the intent; the nearest is tp1 pp1" in message(answer)
        assert words in message(answer)
    await assert_nothing_is_deployed(cluster)


BAD_INTENTS: list[tuple[dict[str, Any], str]] = [
    ({"minimise": "fame"}, "minimise is 'fame'"),
    ({"minimise": "latency", "max_latency_s": 1}, "beside max_latency_s"),
    ({"max_latency_s": 1, "max_cost": 1}, "only one of them"),
    ({"max_latency_s": -1}, "allowed is more than 0"),
    ({"batch_size": 0}, "allowed is 1 to"),
    ({"precision": "int5"}, f"allowed is {_ANY_PRECISION}"),
]


async def test_an_intent_that_is_unknown_or_contradicts_itself_is_refused(cluster: Cluster) -> None:
    await cluster.profiled()
    for intent, words in BAD_INTENTS:
        answer = await cluster.http.post("/admin/deployments", json={"model": "m", "intent": intent})
        assert answer.status_code == 400, answer.text
        assert words in message(answer)
    await assert_nothing_is_deployed(cluster)


async def test_a_model_that_fits_nowhere_waits_with_the_bytes_and_the_plan_says_it_of_each_configuration(
    cluster: Cluster,
) -> None:
    cluster.free_pages = 16
    await cluster.profiled()
    estimates = (await cluster.http.get("/admin/models/m/plan")).json()["estimates"]
    refusals = [one["refusal"] for one in estimates]
    assert all(refusals), refusals
    assert sum("needs " in why and "free" in why for why in refusals) >= 2, refusals
    answer = await cluster.http.post("/admin/deployments", json={"model": "m"})
    assert answer.status_code == 202
    name = answer.json()["id"]
    found = await shown(cluster, f"deployments/{name}", lambda one: "needs " in one["reason"])
    assert found["state"] == "waiting" and "free" in found["reason"]
    cluster.free_pages = 16_384
    assert await shown(cluster, f"deployments/{name}", lambda one: one["state"] == "serving")


async def test_a_worker_that_dies_while_it_measures_is_followed_by_another(cluster: Cluster) -> None:
    for worker in cluster.workers.values():
        worker.measures = None
    await cluster.http.post("/admin/models", json={"name": "m", "path": str(cluster.gate.folder)})
    first = await busy_with(cluster, "measured")
    (other,) = cluster.workers.keys() - {first}
    cluster.workers[other].measures = True
    await cluster.workers[first].die()
    assert await shown(cluster, "models/m", lambda one: one["state"] == "profiled")
    assert cluster.workers[other].measured


async def test_a_worker_that_dies_while_it_loads_is_followed_by_another(cluster: Cluster) -> None:
    await cluster.profiled()
    for worker in cluster.workers.values():
        worker.loads = None
    name = (await cluster.http.post("/admin/deployments", json={"model": "m"})).json()["id"]
    first = await busy_with(cluster, "deploys")
    (other,) = cluster.workers.keys() - {first}
    cluster.workers[other].loads = True
    await cluster.workers[first].die()
    found = await shown(cluster, f"deployments/{name}", lambda one: one["state"] != "loading")
    assert found["reason"] == f"{first} died while it loaded m; it is tried again"
    found = await shown(cluster, f"deployments/{name}", lambda one: one["state"] == "serving")
    assert found["instance"] == f"m@{other}"


async def test_a_checkpoint_that_changed_on_disk_is_neither_planned_nor_deployed_until_it_is_added_again(
    cluster: Cluster,
) -> None:
    http, folder = cluster.http, cluster.gate.folder
    await cluster.profiled()
    os.utime(folder / "model.safetensors", ns=(1, 1))
    for answer in (
        await http.get("/admin/models/m/plan"),
        await http.post("/admin/deployments", json={"model": "m"}),
    ):
        assert answer.status_code == 409
        assert "is not the one that was registered as m" in message(answer)
        assert "remove m and add it again" in message(answer)
    await assert_nothing_is_deployed(cluster)
    assert (await http.delete("/admin/models/m")).status_code == 200
    await cluster.profiled()
    assert (await cluster.serving())["state"] == "serving"


async def test_a_folder_that_is_gone_is_not_deployed(cluster: Cluster) -> None:
    await cluster.profiled()
    (cluster.gate.folder / "config.json").unlink()
    answer = await cluster.http.post("/admin/deployments", json={"model": "m"})
    assert answer.status_code == 409
    assert "cannot be read any more: no config.json in" in message(answer)
    await assert_nothing_is_deployed(cluster)


BAD_CONFIGS = [
    (None, "no config.json"),
    ("{", "cannot be read as JSON"),
    ("[]", "holds a list, not an object"),
    ('{"num_hidden_layers": 0}', "num_hidden_layers = 0; it must be 1 or more"),
]


async def test_a_folder_that_is_no_model_is_not_registered(cluster: Cluster, tmp_path: Path) -> None:
    for config, words in BAD_CONFIGS:
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        answer = await cluster.http.post("/admin/models", json={"name": "n", "path": str(tmp_path)})
        assert answer.status_code == 400
        assert words in message(answer)
    assert (await cluster.http.get("/admin/models")).json() == {"models": []}

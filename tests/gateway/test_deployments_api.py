"""/admin/models and /admin/deployments, from HTTP to workers and back, with a controller beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bus.settings import RedisSettings
from gateway.operations import answers as orders
from tests.support import tiny_model
from tests.support.deployable_worker import KV_BLOCKS, Cluster, cluster_of, controlling, profile
from tests.support.known_truths import BLOCK_BYTES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model of four layers, without weights; for reading."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.byte_level(folder)
    (folder / "config.json").write_text('{"num_hidden_layers": 4, "max_position_embeddings": 1024}')
    return folder


@pytest.fixture
async def cluster(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Cluster]:
    async with cluster_of(redis_settings, folder) as cluster:
        yield cluster


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


async def until(cluster: Cluster, deployment: str, state: str) -> dict[str, object]:
    async with asyncio.timeout(8):
        while True:
            found: dict[str, object] = (await cluster.http.get(f"/admin/deployments/{deployment}")).json()
            if found["state"] == state:
                return found
            await asyncio.sleep(0.05)


async def test_a_model_is_registered_measured_planned_deployed_served_and_retired(cluster: Cluster) -> None:
    http, gate = cluster.http, cluster.gate
    answer = await http.post("/admin/models?wait=true", json={"name": "m", "path": str(gate.folder)})
    assert answer.status_code == 201, answer.text
    assert answer.json()["state"] == "profiled"
    (shown,) = (await http.get("/admin/models")).json()["models"]
    assert (shown["name"], shown["profiles"][0]["device"], shown["context"]) == ("m", "cpu", 1024)
    assert "full" in shown["profiles"][0]["precisions"]

    planned = (await http.get("/admin/models/m/plan", params={"minimise": "latency"})).json()
    assert planned["intent"]["minimise"] == "latency"
    assert planned["estimates"][0]["configuration"] == {
        "tp": 1,
        "pp": 1,
        "precision": "full",
        "kv_dtype": "full",
    }
    assert planned["estimates"][0]["refusal"] == ""

    found = await cluster.serving(intent={"max_latency_s": 10})
    assert (found["instance"], found["intent"]["max_latency_s"]) == ("m@w0", 10.0)
    (order,) = cluster.workers["w0"].deploys
    assert (order.path, order.instance, order.blocks > 0) == (str(gate.folder), "m@w0", True)
    await gate.wait_ready()
    said = await gate.client().completions.create(model="m", prompt="fox", max_tokens=4)
    assert said.usage.completion_tokens == 4
    state = await gate.state()
    assert [one["id"] for one in state["deployments"]] == [found["id"]]
    assert [one["name"] for one in state["models"]] == ["m"]
    async with asyncio.timeout(5):
        while (kv := (await http.get(f"/admin/deployments/{found['id']}")).json()["kv"]) is None:
            await asyncio.sleep(0.05)
    assert kv == {"blocks": KV_BLOCKS, "tokens": 16 * KV_BLOCKS, "bytes": 4 * BLOCK_BYTES * KV_BLOCKS}

    gone = await http.delete(f"/admin/deployments/{found['id']}?wait=true")
    assert (gone.status_code, gone.json()["state"]) == (200, "retired")
    assert [one.instance for one in cluster.workers["w0"].retires] == ["m@w0"]
    assert (await http.delete("/admin/models/m")).status_code == 200
    assert (await http.get("/admin/models")).json() == {"models": []}


async def test_a_model_that_is_removed_while_it_is_measured_leaves_nothing(cluster: Cluster) -> None:
    worker, http = cluster.workers["w0"], cluster.http
    worker.measures = None
    await http.post("/admin/models", json={"name": "m", "path": str(cluster.gate.folder)})
    async with asyncio.timeout(5):
        while not worker.measured:
            await asyncio.sleep(0.02)
    (measure,) = worker.measured
    removed = await http.delete("/admin/models/m")
    assert (removed.status_code, removed.json()["state"]) == (200, "profiling")
    await worker.bus.catalogue.write(profile("m", measure.digest))  # it was faster than the order
    async with asyncio.timeout(5):
        while worker.given_up != [measure.id] or (await worker.bus.catalogue.read()).records:
            await asyncio.sleep(0.02)


async def test_an_intent_may_be_one_word(cluster: Cluster) -> None:
    await cluster.profiled()
    found = await cluster.serving(intent="memory")
    assert found["intent"]["minimise"] == "memory"


async def test_what_is_wrong_with_an_order_is_named_with_what_is_allowed(cluster: Cluster) -> None:
    http, folder = cluster.http, str(cluster.gate.folder)
    await cluster.profiled()
    cases = [
        ("/admin/models", {"path": folder, "name": "m"}, 409, "a model 'm' is registered already"),
        ("/admin/models", {"path": "/nowhere"}, 400, "path: there is no folder /nowhere"),
        ("/admin/models", {"path": "/" + "x" * 300}, 400, "cannot be opened: File name too long"),
        ("/admin/models", {"path": "here"}, 400, "path is 'here'; it must begin with /"),
        ("/admin/models", {"pth": folder}, 400, "unknown field 'pth'; did you mean 'path'?"),
        ("/admin/deployments", {"model": "n"}, 404, "no model 'n' is registered; there are: m"),
        ("/admin/deployments", {"model": "m", "intent": "costs"}, 400, "did you mean 'cost'?"),
        ("/admin/deployments", {"model": "m", "intent": 3}, 400, "it must be an object, or one of latency"),
        (
            "/admin/deployments",
            {"model": "m", "intent": {"max_latencys": 1}},
            400,
            "unknown field 'intent.max_latencys'; did you mean 'max_latency_s'?",
        ),
        (
            "/admin/deployments",
            {"model": "m", "intent": {"max_latency_s": "soon"}},
            400,
            "intent.max_latency_s is 'soon'; it must be a number",
        ),
        (
            "/admin/deployments",
            {"model": "m", "intent": {"max_latency_s": 1, "max_cost": 1}},
            400,
            "only one of them",
        ),
        (
            "/admin/deployments",
            {"model": "m", "intent": {"max_latency_s": 1e-9}},
            409,
            "no configuration meets",
        ),
    ]
    for path, body, status, words in cases:
        answer = await http.post(path, json=body)
        assert answer.status_code == status, answer.text
        assert words in answer.json()["error"]["message"]
    assert (await http.get("/admin/deployments")).json() == {"deployments": []}
    too_long = (
        "intent: prompt_tokens 5000 and output_tokens 64 are 5064 tokens, and the context of m has 1024; "
        "ask for 1024 or fewer of both together"
    )
    answer = await http.get("/admin/models/m/plan", params={"prompt_tokens": 5000})
    assert (refusal(answer)[0], refusal(answer)[2]) == (400, too_long)
    answer = await http.post("/admin/deployments", json={"model": "m", "intent": {"prompt_tokens": 5000}})
    assert (refusal(answer)[0], refusal(answer)[2]) == (400, too_long)
    answer = await http.get("/admin/models/m/plan", params={"minimise": "speed"})
    assert refusal(answer)[0] == 400
    assert refusal(await http.get("/admin/models/mm")) == (
        404,
        "model_not_found",
        "no model 'mm' is registered; did you mean 'm'?",
    )
    assert refusal(await http.delete("/admin/deployments/zz"))[:2] == (404, "deployment_not_found")


async def test_a_model_that_is_not_measured_is_not_planned_yet(cluster: Cluster) -> None:
    cluster.workers["w0"].measures = None
    await cluster.http.post("/admin/models", json={"name": "m", "path": str(cluster.gate.folder)})
    status, code, message = refusal(await cluster.http.get("/admin/models/m/plan"))
    assert (status, code) == (409, "conflict")
    assert message.startswith("m is not measured yet")


async def test_a_model_that_cannot_be_measured_says_why(cluster: Cluster) -> None:
    cluster.workers["w0"].measures = False
    body = {"name": "m", "path": str(cluster.gate.folder)}
    answer = await cluster.http.post("/admin/models?wait=true", json=body)
    assert answer.json()["state"] == "failed"
    assert answer.json()["reason"] == "given up after 3 attempts: w0: the test says no"
    assert len(cluster.workers["w0"].measured) == 3


async def test_requests_for_a_model_that_is_being_deployed_are_told_to_come_again(cluster: Cluster) -> None:
    await cluster.profiled()
    cluster.workers["w0"].loads = None
    found = (await cluster.http.post("/admin/deployments", json={"model": "m"})).json()
    await until(cluster, found["id"], "loading")
    async with asyncio.timeout(5):
        while True:
            answer = await cluster.http.post("/v1/completions", json={"model": "m", "prompt": "a"})
            if "is being deployed: loading" in answer.text:
                break
            await asyncio.sleep(0.05)
    assert answer.status_code == 503


async def test_a_death_places_the_deployment_on_another_worker(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with cluster_of(redis_settings, folder, workers=2) as cluster:
        await cluster.profiled()
        found = await cluster.serving()
        first = str(found["instance"]).partition("@")[2]
        await cluster.workers[first].die()
        other = "w1" if first == "w0" else "w0"
        async with asyncio.timeout(8):
            while not cluster.workers[other].deploys:
                await asyncio.sleep(0.02)
        again = await until(cluster, str(found["id"]), "serving")
        assert again["instance"] == f"m@{other}"


async def test_a_controller_that_starts_again_goes_on_where_the_other_was(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with cluster_of(redis_settings, folder, controller=False) as cluster:
        async with controlling(redis_settings):
            await cluster.profiled()
            cluster.workers["w0"].loads = None
            found = (await cluster.http.post("/admin/deployments", json={"model": "m"})).json()
            await until(cluster, found["id"], "loading")
        (order,) = cluster.workers["w0"].deploys
        async with controlling(redis_settings):
            await asyncio.sleep(0.5)
            assert cluster.workers["w0"].deploys == [order]
            await cluster.workers["w0"]._load(order, True)
            await until(cluster, found["id"], "serving")


async def test_without_a_controller_an_order_is_refused_and_withdrawn(
    redis_settings: RedisSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ANSWER_S", 0.3)
    async with cluster_of(redis_settings, folder, controller=False) as cluster:
        body = {"name": "m", "path": str(folder)}
        status, code, message = refusal(await cluster.http.post("/admin/models", json=body))
        assert (status, code) == (503, "service_unavailable")
        assert "the controller did not take the order" in message and "nothing was changed" in message
        async with controlling(redis_settings):
            await asyncio.sleep(0.3)
            assert (await cluster.http.get("/admin/models")).json() == {"models": []}


async def test_a_question_is_answered_with_what_would_be_weighed_and_nothing_is_done(
    cluster: Cluster,
) -> None:
    await cluster.profiled()
    await cluster.serving()
    http = cluster.http
    query: dict[str, str | int] = {"model": "m", "requests": 500, "prompt_tokens": 200, "output_tokens": 10}
    calm = (await http.get("/admin/plan")).json()
    assert calm == {"note": "", "plans": []}
    (plan,) = (await http.get("/admin/plan", params=query)).json()["plans"]
    assert plan["subject"] == "m@w0" and "requests wait for" in plan["need"]
    assert [one["lever"] for one in plan["options"] if one["is_taken"]] == ["queue"]
    assert any(one["lever"] == "more" and one["refusal"] for one in plan["options"])
    (long,) = (await http.get("/admin/plan", params=query | {"prompt_tokens": 10**6})).json()["plans"]
    assert long["need"] == "500 requests of up to 1000010 tokens wait that no instance holds"
    state = (await http.get("/admin/state")).json()
    assert state["morphs"] == [] or {one["kind"] for one in state["morphs"]} == {"deploy"}


async def test_a_question_about_nothing_that_serves_is_refused(cluster: Cluster) -> None:
    async with asyncio.timeout(8):
        while (answer := await cluster.http.get("/admin/plan", params={"model": "x"})).status_code == 409:
            assert "no metrics yet" in answer.text
            await asyncio.sleep(0.05)
    status, code, message = refusal(answer)
    assert (status, code) == (404, "model_not_found") and message == "no instance of 'x' serves"
    for name, value in (("requests", -1), ("requests", 10_001), ("prompt_tokens", 0), ("colour", 1)):
        status, code, message = refusal(await cluster.http.get("/admin/plan", params={name: value}))
        assert status == 400 and name in message, message

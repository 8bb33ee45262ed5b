"""Tensor parallelism by hand: /admin/instances/transform, and what clients and operators see of groups."""

from __future__ import annotations

import asyncio
import uuid
from base64 import b64encode
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from bus.morphs import Transform
from bus.settings import RedisSettings
from tests.support.fake_worker import FakeWorker
from tests.support.gateway_harness import ANSWER, BODY, Gate, metrics_of, running

pytest_plugins = ["tests.support.gateway_fixtures"]

ORDER = {"workers": ["w1", "w0"], "tp": 2}
TRANSFORM = "/admin/instances/transform"


@pytest.fixture
async def pair(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Gate]:
    """Two workers, of which each is an instance."""
    async with running(redis_settings, folder, workers=2) as gate:
        yield gate


@pytest.fixture
async def http(pair: Gate) -> AsyncIterator[httpx.AsyncClient]:
    async with pair.http() as http:
        yield http


async def instances(gate: Gate, count: int) -> list[dict[str, Any]]:
    """Return the instances as soon as there are so many."""
    for _ in range(200):
        found: list[dict[str, Any]] = (await gate.state())["instances"]
        if len(found) == count:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"there are {[one['id'] for one in found]}")


async def join(gate: Gate, *group: str) -> None:
    """The workers' cards say that they are one group now, and the one that leads reports it."""
    members = {worker.id: worker for worker in gate.workers if worker.id in group}
    for worker in members.values():
        await worker.join(*group)
    leader, epochs = members[group[0]], {name: worker.epoch for name, worker in members.items()}
    command = Transform(
        id=uuid.uuid4().hex,
        epoch=leader.epoch,
        instance=leader.instance,
        workers=list(group),
        epochs=epochs,
        tp=len(group),
    )
    await leader.report(command, "applied")


async def test_an_order_goes_to_the_worker_that_leads(pair: Gate, http: httpx.AsyncClient) -> None:
    w0, w1 = pair.workers
    body = ORDER | {"layers_per_step": 2, "wait_s": 1.5}
    answer = await http.post(TRANSFORM, params={"wait": "true"}, json=body)
    morph = answer.json()
    assert (answer.status_code, morph["state"], morph["kind"]) == (200, "applied", "transform")
    assert (morph["target"], morph["worker"], morph["workers"]) == ("demo@w1", "w1", ["w1", "w0"])
    assert morph["decided"] == "ordered by hand: tp 2 on w1, w0"
    (command,) = w1.morphs
    assert w0.morphs == [] and command == Transform(
        id=morph["id"],
        epoch=w1.epoch,
        instance="demo@w1",
        workers=["w1", "w0"],
        epochs={"w0": w0.epoch, "w1": w1.epoch},
        tp=2,
        layers_per_step=2,
        wait_s=1.5,
    )


async def regroup(gate: Gate, command: Transform) -> None:
    """Change the cards as real workers do at the end of a transform."""
    by_id = {worker.id: worker for worker in gate.workers}
    num_groups = len(command.workers) // command.tp
    for group in (command.workers[start::num_groups] for start in range(num_groups)):
        for name in group:
            await by_id[name].join(*group)


@pytest.fixture
async def four(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Gate]:
    """w0 and w1 in a group, w2 and w3 alone."""
    async with running(redis_settings, folder, workers=4) as gate:
        for worker in gate.workers:
            worker.regroup = lambda command: regroup(gate, command)
        await join(gate, "w0", "w1")
        await instances(gate, 3)
        yield gate


async def test_workers_that_are_not_named_are_chosen(pair: Gate, http: httpx.AsyncClient) -> None:
    answer = await http.post(TRANSFORM, params={"wait": "true"}, json={"tp": 2, "instance": "demo@w1"})
    assert (answer.status_code, answer.json()["workers"]) == (200, ["w0", "w1"])
    answer = await http.post(TRANSFORM, json=ORDER | {"instance": "demo@w1"})
    assert answer.status_code == 400 and "both workers and instance are given" in answer.text
    answer = await http.post(TRANSFORM, json={"tp": 4})
    assert answer.status_code == 400 and "of one host" in answer.text


async def test_a_transform_takes_as_many_steps_as_its_target_needs(four: Gate) -> None:
    body = {"workers": ["w0", "w1", "w2", "w3"], "tp": 4, "layers_per_step": 2}
    async with four.http() as http:
        answer = await http.post(TRANSFORM, params={"wait": "true"}, json=body)
        morph = answer.json()
        assert (answer.status_code, morph["state"], morph["kind"]) == (200, "applied", "transform"), morph
        assert (morph["target"], sorted(morph["workers"])) == ("demo@w0", ["w0", "w1", "w2", "w3"])
        assert morph["decided"] == (
            "ordered by hand: tp 4 on w0, w1, w2, w3, in steps: tp 2 on w2, w3; tp 4 on w0, w2, w1, w3"
        )
        assert morph["numbers"] == {"steps": 2, "steps_done": 2}
        (group,) = (await four.state())["instances"]
        assert (group["workers"], group["tp"]) == (["w0", "w2", "w1", "w3"], 4)
        first, second = [(await http.get(f"/admin/morphs/{step}")).json() for step in morph["steps"]]
        assert first["decided"] == f"step 1 of 2 of morph {morph['id']}: tp 2 on w2, w3"
        assert [one["state"] for one in (first, second)] == ["applied", "applied"]
        (command,) = four.workers[0].morphs
        assert isinstance(command, Transform) and (command.id, command.layers_per_step) == (second["id"], 2)
        assert (
            'instar_morphs_total{kind="transform",outcome="applied"} 3.0' in (await http.get("/metrics")).text
        )


async def test_a_part_of_a_group_becomes_a_group_with_others(four: Gate) -> None:
    async with four.http() as http:
        morph = (await http.post(f"{TRANSFORM}?wait=true", json={"workers": ["w1", "w2"], "tp": 2})).json()
        assert (morph["state"], len(morph["steps"])) == ("applied", 2)
    found = await instances(four, 3)
    assert [one["workers"] for one in found] == [["w0"], ["w1", "w2"], ["w3"]]


async def test_steps_end_with_the_first_that_is_not_applied(four: Gate) -> None:
    four.workers[0].outcome = "deferred"
    body = {"workers": ["w0", "w1", "w2", "w3"], "tp": 4}
    async with four.http() as http:
        morph = (await http.post(f"{TRANSFORM}?wait=true", json=body)).json()
    assert (morph["state"], morph["numbers"]) == ("deferred", {"steps": 2, "steps_done": 1})
    assert morph["reason"] == (
        "step 2 of 2: tp 4 on w0, w2, w1, w3: the test says deferred; the steps before it stay"
    )


async def test_a_transform_of_several_steps_can_be_given_up(four: Gate) -> None:
    for worker in four.workers:
        worker.morph_gate.clear()
    body = {"workers": ["w0", "w1", "w2", "w3"], "tp": 4}
    async with four.http() as http:
        answer = await http.post(TRANSFORM, json=body)
        morph = answer.json()
        assert (answer.status_code, morph["reason"]) == (202, "step 1 of 2: tp 2 on w2, w3")
        await four.until("the first step", lambda: four.workers[2].morphs)
        found = (await http.delete(f"/admin/morphs/{morph['id']}?wait=true")).json()
    assert found["state"] == "failed" and found["numbers"]["steps_done"] == 0
    assert four.workers[2].cancelled_morphs == [morph["steps"][0]]
    assert not four.workers[0].morphs


async def test_what_is_under_way_is_told_layer_by_layer(pair: Gate, http: httpx.AsyncClient) -> None:
    worker = pair.workers[1]
    worker.morph_gate.clear()
    answer = await http.post(TRANSFORM, json=ORDER)
    assert (answer.status_code, answer.json()["state"]) == (202, "running")
    await pair.until("the order", lambda: worker.morphs)
    for done, degrees in ((0, [1, 1]), (1, [1, 2]), (2, [2, 2])):
        numbers = {"layers_done": done, "layers": 2, "tp_before": 1, "tp_after": 2}
        await worker.report(worker.morphs[0], "running", **numbers)
        for _ in range(100):
            found = (await http.get(f"/admin/morphs/{answer.json()['id']}")).json()
            if found["numbers"] == numbers:
                break
            await asyncio.sleep(0.02)
        assert (found["numbers"], found["state"]) == (numbers, "running")
        # of each that takes part, not of the leader alone
        assert [one["layer_tp"] for one in (await pair.state())["instances"]] == [degrees, degrees]
    worker.morph_gate.set()
    assert (await http.get(f"/admin/morphs/{found['id']}?wait=true")).json()["state"] == "applied"


async def test_a_transform_can_be_given_up(pair: Gate, http: httpx.AsyncClient) -> None:
    worker = pair.workers[1]
    worker.morph_gate.clear()
    morph = (await http.post(TRANSFORM, json=ORDER)).json()
    await pair.until("the order", lambda: worker.morphs)
    answer = await http.delete(f"/admin/morphs/{morph['id']}?wait=true")
    assert (answer.status_code, answer.json()["state"]) == (200, "failed")
    assert worker.cancelled_morphs == [morph["id"]]


async def test_a_worker_that_leads_and_dies_fails_its_transform(pair: Gate, http: httpx.AsyncClient) -> None:
    worker = pair.workers[1]
    worker.outcome = None
    morph = (await http.post(TRANSFORM, json=ORDER)).json()
    await worker.die()
    await pair.bus.event("worker_lost", "w1", "test", epoch=worker.epoch)
    found = (await http.get(f"/admin/morphs/{morph['id']}?wait=true")).json()
    assert found["state"] == "failed" and "died before it answered" in found["reason"]


async def test_a_wrong_order_is_refused_and_nothing_is_ordered(pair: Gate, http: httpx.AsyncClient) -> None:
    for body, status, code in (
        ({"workers": ["w0", "w9"], "tp": 2}, 404, "worker_not_found"),
        ({"workers": ["w0"], "tp": 2}, 400, "invalid_value"),
        ({"workers": ["w0", "w1"], "tp": 3}, 400, "invalid_value"),
        ({"workers": ["w0", "w1"]}, 400, "missing_parameter"),
    ):
        answer = await http.post(TRANSFORM, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert (await http.get(TRANSFORM)).status_code == 405
    await pair.workers[1].bus.update_card(pair.workers[1].card("draining"))
    for _ in range(200):
        answer = await http.post(TRANSFORM, json=ORDER | {"tp": 3})
        if answer.status_code == 409:
            break
        await asyncio.sleep(0.02)
    assert answer.json()["error"]["code"] == "worker_draining"
    assert not any(worker.morphs for worker in pair.workers) and (await pair.state())["morphs"] == []


async def test_a_group_is_one_instance_with_its_workers_in_the_order_of_their_shards(pair: Gate) -> None:
    await join(pair, "w1", "w0")
    (group,) = await instances(pair, 1)
    assert (group["id"], group["tp"], group["workers"]) == ("demo@w1", 2, ["w1", "w0"])
    assert (group["layer_tp"], group["degrees"], group["kv_heads"]) == ([2, 2], [1, 2, 4], 8)
    assert [worker["id"] for worker in (await pair.state())["workers"]] == ["w0", "w1"]


async def measured(gate: Gate, *workers: FakeWorker) -> None:
    """The monitor tells of each: one request runs, 16 of 64 blocks are in use."""
    pictures = [metrics_of(worker, running=1, waiting=2, kv_used=16) for worker in workers]
    all_workers = [one for picture in pictures for one in picture.workers]
    all_instances = [one for picture in pictures for one in picture.instances]
    both = replace(pictures[0], workers=all_workers, instances=all_instances)
    await gate.bus.publish(gate.bus.names.metrics, both)


async def test_a_groups_requests_are_those_of_all_and_its_cache_is_one(
    pair: Gate, http: httpx.AsyncClient
) -> None:
    w0, w1 = pair.workers
    await join(pair, "w1", "w0")
    await instances(pair, 1)
    await measured(pair, w1)
    for _ in range(100):
        (group,) = (await pair.state())["instances"]
        if group["kv"]["used"] is not None:
            break
        await asyncio.sleep(0.02)
    assert (group["kv"]["used"], group["running"]) == (16, None)  # w0 did not tell: absent is not zero
    await measured(pair, w0, w1)
    for _ in range(100):
        (group,) = (await pair.state())["instances"]
        if group["running"] is not None:
            break
        await asyncio.sleep(0.02)
    assert (group["running"], group["waiting"], group["recomputed_tokens"]) == (2, 4, 0)
    assert group["kv"] == {"blocks": 64, "used": 16, "block_tokens": 16, "precision": "full", "loss": None}
    text = (await http.get("/metrics")).text
    for worker in ("w0", "w1"):
        assert f'instar_num_requests_running{{engine="demo@{worker}",model_name="demo"}} 1.0' in text
        assert f'instar_recomputed_tokens_total{{engine="demo@{worker}",model_name="demo"}} 0.0' in text
    assert 'instar_tensor_parallel_size{engine="demo@w1",model_name="demo"} 2.0' in text
    assert 'instar_kv_blocks{engine="demo@w1",model_name="demo"} 64.0' in text
    assert 'instar_kv_blocks{engine="demo@w0"' not in text
    reported = (await http.get("/admin/state")).json()["metrics"]["instances"]
    assert len(reported) == 2 and not any("prefix_digests" in one["last"] for one in reported)


async def test_the_key_of_a_workers_link_is_shown_to_nobody(pair: Gate, http: httpx.AsyncClient) -> None:
    shown = (await http.get("/admin/state")).text
    key = pair.worker.card().link_key
    assert key and not any(written in shown for written in (key.decode(), b64encode(key).decode()))


# --------------------------------------------------------------------------- requests of members


@pytest.mark.parametrize("leader", ["w0", "w1"])
async def test_a_stream_goes_on_untouched_at_whatever_place_its_worker_has_in_a_group(
    pair: Gate, leader: str
) -> None:
    """Through joining and parting: no replay, no cancel, every token once."""
    for worker in pair.workers:
        worker.stop_at = 4
    async with pair.client() as client:
        streams = [await client.completions.create(**BODY, stream=True) for _ in range(2)]
        await pair.until("one each", lambda: all(worker.num_running == 1 for worker in pair.workers))
        texts = [asyncio.create_task(text_of(stream)) for stream in streams]
        await join(pair, leader, "w1" if leader == "w0" else "w0")
        await instances(pair, 1)
        for worker in pair.workers:
            worker.stop_at = 8  # of 12
        await asyncio.sleep(0.2)  # tokens of both came from within the group
        await join(pair, "w0")
        await join(pair, "w1")
        await instances(pair, 2)
        for worker in pair.workers:
            worker.stop_at = None
        assert not any(text.done() for text in texts)
        assert await asyncio.gather(*texts) == [ANSWER, ANSWER]
    for worker in pair.workers:
        assert [submit.attempt for submit in worker.submits] == [1] and worker.cancelled == set()


async def text_of(stream: Any) -> str:
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])


async def test_new_requests_go_to_all_members(pair: Gate) -> None:
    await join(pair, "w1", "w0")
    await instances(pair, 1)
    async with pair.client() as client:
        answers = await asyncio.gather(*(client.completions.create(**BODY) for _ in range(4)))
    assert {answer.choices[0].text for answer in answers} == {ANSWER}
    assert [len(worker.submits) for worker in pair.workers] == [2, 2]


async def test_requests_of_a_member_that_dies_are_replayed_and_those_of_the_others_are_not(
    pair: Gate,
) -> None:
    w0, w1 = pair.workers
    for worker in pair.workers:
        worker.stop_at = 4
    async with pair.client() as client:
        streams = [await client.completions.create(**BODY, stream=True) for _ in range(2)]
        await pair.until("one each", lambda: w0.num_running == w1.num_running == 1)
        texts = [asyncio.create_task(text_of(stream)) for stream in streams]
        await join(pair, "w1", "w0")
        await instances(pair, 1)
        await w0.die()
        await w1.join("w1")
        w1.stop_at = None
        await pair.bus.event("worker_lost", "w0", "test", epoch=w0.epoch)
        assert await asyncio.gather(*texts) == [ANSWER, ANSWER]
    assert [submit.attempt for submit in w1.submits] == [1, 2]

"""Morphs by hand: /admin/instances/{id}/swap and /resize, /admin/morphs/{id}, /admin/policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from bus.messages import Event, LayerShape
from bus.morphs import ConvertCache, MorphReport, Resize, Swap
from bus.policy import Policy
from bus.settings import RedisSettings
from tests.support.gateway_harness import Gate, metrics_of, running

pytest_plugins = ["tests.support.gateway_fixtures"]

INSTANCE = "/admin/instances/demo@w0"


@pytest.fixture
async def http(gate: Gate) -> AsyncIterator[httpx.AsyncClient]:
    async with gate.http() as http:
        yield http


def refusal(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def ended(http: httpx.AsyncClient, morph: dict[str, Any]) -> dict[str, Any]:
    answer = await http.get(f"/admin/morphs/{morph['id']}", params={"wait": "true"})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_a_swap_is_accepted_at_once_and_told_when_it_is_applied(
    gate: Gate, http: httpx.AsyncClient
) -> None:
    gate.worker.morph_gate.clear()
    gate.worker.numbers = {"pages": 3}
    answer = await http.post(f"{INSTANCE}/swap", json={"layers": [1, 0, 1], "precision": "int4"})
    assert answer.status_code == 202
    morph = answer.json()
    assert {"id", "kind", "target", "state", "reason", "numbers", "started", "ended"} <= set(morph)
    assert (morph["kind"], morph["target"], morph["state"]) == ("swap", "demo@w0", "running")
    await gate.until("the order", lambda: gate.worker.morphs)
    assert (await gate.state())["morphs"][-1]["id"] == morph["id"]
    gate.worker.morph_gate.set()
    morph = await ended(http, morph)
    assert (morph["state"], morph["reason"], morph["numbers"]) == (
        "applied",
        "the test says applied",
        {"pages": 3},
    )
    assert morph["ended"] >= morph["started"] > 1e9 and "layers 0, 1 to int4" in morph["decided"]
    (swap,) = gate.worker.morphs
    assert isinstance(swap, Swap) and swap.layers == [0, 1] and swap.parts == ["attention", "ffn"]
    assert gate.worker.shape.layers[1] == LayerShape(attention="int4", ffn="int4")


async def test_an_order_that_waits_is_answered_with_its_end(gate: Gate, http: httpx.AsyncClient) -> None:
    body = {"count": 1, "precision": "int8", "parts": ["ffn"], "wait_s": 1.5}
    answer = await http.post(f"{INSTANCE}/swap", params={"wait": "true"}, json=body)
    assert (answer.status_code, answer.json()["state"]) == (200, "applied")
    (swap,) = gate.worker.morphs
    assert isinstance(swap, Swap) and (swap.count, swap.parts, swap.wait_s) == (1, ["ffn"], 1.5)
    answer = await http.post(f"{INSTANCE}/resize", params={"wait": "true"}, json={"blocks": 80})
    assert (answer.status_code, answer.json()["kind"]) == (200, "resize")
    assert gate.worker.shape.blocks == 80


async def test_a_kv_cache_is_ordered_into_8_bits_and_no_others(http: httpx.AsyncClient, gate: Gate) -> None:
    answer = await http.post(f"{INSTANCE}/kv", params={"wait": "true"}, json={"kv_dtype": "int8"})
    assert (answer.status_code, answer.json()["kind"], answer.json()["state"]) == (200, "kv", "applied")
    assert "KV cache in int8" in answer.json()["decided"]
    (command,) = gate.worker.morphs
    assert isinstance(command, ConvertCache) and command.kv_dtype == "int8"
    status, parameter, message = refusal(await http.post(f"{INSTANCE}/kv", json={"kv_dtype": "int4"}))
    assert (status, parameter) == (400, "kv_dtype") and "'full' or 'int8'" in message


async def test_the_state_shows_what_was_applied_when_the_answer_comes(
    gate: Gate, http: httpx.AsyncClient
) -> None:
    """Also while the monitor still publishes what the worker told it before."""
    gate.worker.reports_shape = True
    before = metrics_of(gate.worker)
    gate.worker.shape.layers = list(gate.worker.shape.layers)

    async def monitor_tells(at_ms: int) -> None:
        one = replace(before.workers[0], at_ms=at_ms)
        told = replace(before, at_ms=at_ms, workers=[one])
        await gate.bus.publish(gate.bus.names.metrics, told)
        for _ in range(100):
            if (await gate.state())["metrics"].get("at_ms") == at_ms:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the metrics did not arrive")

    async def shown() -> tuple[list[str], int]:
        (instance,) = (await gate.state())["instances"]
        return [layer["ffn"] for layer in instance["layers"]], instance["kv"]["blocks"]

    await monitor_tells(1)
    assert await shown() == (["full", "full"], 64)
    await http.post(f"{INSTANCE}/swap?wait=true", json={"layers": [0, 1], "precision": "int4"})
    assert await shown() == (["int4", "int4"], 64)
    await http.post(f"{INSTANCE}/resize?wait=true", json={"blocks": 80})
    assert await shown() == (["int4", "int4"], 80)
    await monitor_tells(2)
    assert await shown() == (["int4", "int4"], 80)
    await monitor_tells(time.time_ns() // 1_000_000 + 1000)  # a report after the morphs
    assert await shown() == (["full", "full"], 64)


async def test_a_worker_that_cannot_now_says_so_with_its_numbers(gate: Gate, http: httpx.AsyncClient) -> None:
    numbers = {"blocks": 8, "blocks_used": 9}
    gate.worker.outcome, gate.worker.numbers = "deferred", dict(numbers)
    answer = await http.post(f"{INSTANCE}/resize", params={"wait": "true"}, json={"blocks": 8})
    assert answer.status_code == 200
    assert (answer.json()["state"], answer.json()["numbers"]) == ("deferred", numbers)


async def test_a_running_morph_can_be_cancelled_once(gate: Gate, http: httpx.AsyncClient) -> None:
    gate.worker.morph_gate.clear()
    morph = (await http.post(f"{INSTANCE}/swap", json={"count": 2, "precision": "int3"})).json()
    await gate.until("the order", lambda: gate.worker.morphs)
    answer = await http.delete(f"/admin/morphs/{morph['id']}", params={"wait": "true"})
    assert (answer.status_code, answer.json()["state"]) == (200, "failed")
    assert gate.worker.cancelled_morphs == [morph["id"]]
    again = await http.delete(f"/admin/morphs/{morph['id']}")
    assert again.status_code == 409 and again.json()["error"]["code"] == "morph_ended"


async def test_a_morph_whose_worker_died_has_failed(gate: Gate, http: httpx.AsyncClient) -> None:
    gate.worker.outcome = None
    morph = (await http.post(f"{INSTANCE}/swap", json={"count": 2, "precision": "int3"})).json()
    await gate.worker.die()
    await gate.bus.event("worker_lost", "w0", "test", epoch=gate.worker.epoch)
    morph = await ended(http, morph)
    assert morph["state"] == "failed" and "died before it answered" in morph["reason"]


async def test_a_wrong_order_is_refused_and_nothing_is_ordered(gate: Gate, http: httpx.AsyncClient) -> None:
    missing = await http.post("/admin/instances/demo@w9/swap", json={"count": 1, "precision": "int4"})
    assert refusal(missing) == (404, "instance", "no instance 'demo@w9'; did you mean 'demo@w0'?")
    wrong = await http.post(f"{INSTANCE}/resize", json={"blocks": 0})
    assert refusal(wrong)[:2] == (400, "blocks")
    unclear = await http.post(f"{INSTANCE}/resize?wait=maybe", json={"blocks": 80})
    assert refusal(unclear) == (400, "wait", "wait is 'maybe'; it must be true or false")
    assert gate.worker.morphs == [] and (await gate.state())["morphs"] == []


async def test_an_unknown_morph_is_not_found(gate: Gate, http: httpx.AsyncClient) -> None:
    for answer in (await http.get("/admin/morphs/nope"), await http.delete("/admin/morphs/nope")):
        assert refusal(answer) == (404, "morph", "no morph 'nope'; the latest are: none")


async def test_a_gateway_knows_the_morphs_that_others_ordered_and_those_before_it(
    redis_settings: RedisSettings, folder: Any
) -> None:
    async with running(redis_settings, folder) as gate, gate.http() as http:
        morph = (await http.post(f"{INSTANCE}/resize?wait=true", json={"blocks": 70})).json()
        async with running(redis_settings, folder, workers=0, id="another") as other:
            await other.until("the poll", lambda: True)
            for _ in range(100):
                if known := (await other.state())["morphs"]:
                    break
                await asyncio.sleep(0.02)
            assert [(one["id"], one["state"]) for one in known] == [(morph["id"], "applied")]
            assert "ordered by hand: 70 KV blocks" in known[0]["decided"]
            later = (await http.post(f"{INSTANCE}/resize?wait=true", json={"blocks": 71})).json()
            async with other.http() as other_http:
                for _ in range(100):
                    answer = await other_http.get(f"/admin/morphs/{later['id']}")
                    if answer.status_code == 200 and answer.json()["state"] == "applied":
                        break
                    await asyncio.sleep(0.02)
                assert answer.json()["state"] == "applied"


async def test_an_order_and_its_outcome_are_events(gate: Gate, http: httpx.AsyncClient) -> None:
    async with gate.bus.reader(gate.bus.names.events, Event, MorphReport) as reader:
        await reader.open()
        morph = (await http.post(f"{INSTANCE}/resize?wait=true", json={"blocks": 70})).json()
        told: list[Any] = []
        while not (told and isinstance(told[-1], MorphReport) and told[-1].state == "applied"):
            told += [message for _, message in await asyncio.wait_for(reader.next_batch(), 5)]
    assert (told[0].kind, told[0].morph_id, told[0].subject) == ("morph_decided", morph["id"], "demo@w0")
    async with http.stream("GET", "/admin/events") as answer:
        morphs = 0
        async with asyncio.timeout(5):
            async for line in answer.aiter_lines():
                morphs += line == "event: morph"
                if morphs == 2:
                    break


async def test_morphs_are_counted_and_timed(gate: Gate, http: httpx.AsyncClient) -> None:
    await http.post(f"{INSTANCE}/swap?wait=true", json={"count": 1, "precision": "int4"})
    gate.worker.outcome = "deferred"
    await http.post(f"{INSTANCE}/resize?wait=true", json={"blocks": 900})
    text = (await http.get("/metrics")).text
    assert 'instar_morphs_total{kind="swap",outcome="applied"} 1.0' in text
    assert 'instar_morphs_total{kind="resize",outcome="deferred"} 1.0' in text
    assert 'instar_morph_seconds_count{kind="swap"} 1.0' in text


# --------------------------------------------------------------------------- policy


async def test_the_policy_is_changed_field_by_field(gate: Gate, http: httpx.AsyncClient) -> None:
    before = (await http.get("/admin/policy")).json()
    assert before["revision"] == 0 and before["mode"] == "default"
    answer = await http.put("/admin/policy", json={"mode": "performance", "windows": 5})
    assert answer.status_code == 200
    assert answer.json() == before | {"mode": "performance", "windows": 5, "revision": 1}
    answer = await http.put("/admin/policy", json={"mode": "manual", "revision": 1})
    assert await gate.bus.read_policy() == Policy(mode="manual", windows=5, revision=2)
    assert (await gate.state())["policy"] == answer.json()


async def test_the_fields_of_the_policy_are_described(http: httpx.AsyncClient) -> None:
    told = (await http.get("/admin/policy/fields")).json()
    policy = (await http.get("/admin/policy")).json()
    assert {one["name"] for one in told} == policy.keys() - {"revision"}
    assert {one["name"]: one["default"] for one in told}.items() <= policy.items()


async def test_a_policy_written_elsewhere_is_shown(gate: Gate) -> None:
    assert await gate.bus.write_policy(Policy(revision=1, mode="accuracy"))
    await gate.bus.event("policy_changed", "policy", "test")
    for _ in range(100):
        if (await gate.state())["policy"]["mode"] == "accuracy":
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the policy was not read again")


async def test_a_wrong_policy_is_refused_and_the_old_one_holds(gate: Gate, http: httpx.AsyncClient) -> None:
    answer = await http.put("/admin/policy", json={"kv_usage_high": 0.4})
    assert refusal(answer)[:2] == (400, "kv_usage_high")
    answer = await http.put("/admin/policy", json={"mode": "manual", "revision": 7})
    assert refusal(answer) == (409, "revision", "revision is 7; the policy is at 0; read it again")
    assert (await http.get("/admin/policy")).json()["revision"] == 0


async def test_of_two_writers_at_once_both_changes_hold(gate: Gate, http: httpx.AsyncClient) -> None:
    bodies: list[dict[str, Any]] = [{"windows": 7}, {"cooldown_s": 9}, {"mode": "accuracy"}]
    await asyncio.gather(*(http.put("/admin/policy", json=body) for body in bodies))
    policy = await gate.bus.read_policy()
    assert (policy.windows, policy.cooldown_s, policy.mode, policy.revision) == (7, 9.0, "accuracy", 3)


async def test_the_commands_carry_the_epoch_they_were_meant_for(gate: Gate, http: httpx.AsyncClient) -> None:
    await http.post(f"{INSTANCE}/resize?wait=true", json={"blocks": 70})
    (command,) = gate.worker.morphs
    assert isinstance(command, Resize) and command.epoch == gate.worker.epoch

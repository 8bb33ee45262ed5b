"""The admin API and /metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bus.client import connect
from bus.leader import Leader
from bus.settings import RedisSettings
from tests.support.gateway_harness import Gate, metrics_of, running

pytest_plugins = ["tests.support.gateway_fixtures"]

BODY = {"model": "demo", "prompt": "fox", "max_tokens": 3}


@pytest.fixture
async def gate(redis_settings: RedisSettings, folder: Path) -> AsyncIterator[Gate]:
    async with running(redis_settings, folder, metrics_compat="vllm") as gate:
        yield gate


async def measured(gate: Gate) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples of /metrics by name."""
    async with gate.http() as http:
        text = (await http.get("/metrics")).text
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def report(gate: Gate) -> None:
    await gate.bus.publish(gate.bus.names.metrics, metrics_of(gate.worker, running=2, waiting=1, kv_used=16))
    while not (await gate.state())["workers"][0]["pages"]:
        await asyncio.sleep(0.02)


async def test_the_state_has_the_shapes_others_rely_on(gate: Gate) -> None:
    state = await gate.state()
    assert {"workers", "instances", "metrics", "policy", "deployments", "morphs"} <= set(state)
    worker, instance = state["workers"][0], state["instances"][0]
    assert {"id", "host", "device", "epoch", "state", "pages", "page_bytes", "busy"} <= set(worker)
    wanted = {"id", "model", "workers", "tp", "pp", "state", "running", "waiting", "layers", "kv"}
    assert wanted <= set(instance)
    assert set(instance["kv"]) == {"blocks", "used", "block_tokens", "precision", "loss"}
    assert worker["pages"] is None and instance["running"] is None  # nothing was reported: absent is not 0
    await report(gate)
    state = await gate.state()
    worker, instance = state["workers"][0], state["instances"][0]
    assert worker["pages"] == {"budget": 100, "weights": 60, "kv": 30, "free": 10} and worker["busy"] == 0.5
    assert instance["kv"] == {"blocks": 64, "used": 16, "block_tokens": 16, "precision": "full", "loss": None}
    assert (instance["running"], instance["waiting"]) == (2, 1)
    assert (
        instance["layers"] == [{"attention": "full", "ffn": "full"}] * 2 and not instance["layers_below_full"]
    )
    assert state["metrics"]["instances"][0]["kv_usage"] == 0.25


async def test_events_are_streamed_the_recent_ones_first(gate: Gate) -> None:
    await gate.bus.event("worker_joined", "w7", "before")
    await asyncio.sleep(0.2)
    async with gate.http() as http, http.stream("GET", "/admin/events") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.aiter_lines()
        await gate.bus.event("morphed", "w8", "after", seconds=1.5)
        found: list[dict[str, object]] = []
        async for line in lines:
            if line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
            if found and found[-1]["subject"] == "w8":
                break
    assert "w7" in [event["subject"] for event in found]
    assert found[-1]["kind"] == "morphed" and found[-1]["numbers"] == {"seconds": 1.5}


async def test_a_drain_order_reaches_its_worker(gate: Gate) -> None:
    async with gate.http() as http:
        answer = await http.post("/admin/workers/w0/drain?force=true")
        assert answer.status_code == 202 and answer.json()["epoch"] == gate.worker.epoch
        await gate.until("the order", lambda: gate.worker.drained)
        missing = await http.post("/admin/workers/w00/drain")
        stranger = await http.post("/admin/workers/gpu-box/drain")
    assert missing.status_code == stranger.status_code == 404
    assert missing.json()["error"]["message"] == "no worker 'w00'; did you mean 'w0'?"
    assert stranger.json()["error"]["message"] == "no worker 'gpu-box'; there are: w0"


async def test_the_last_worker_of_a_model_is_drained_only_by_force(gate: Gate) -> None:
    """Then requests wait for another worker."""
    async with gate.http() as http:
        refused = await http.post("/admin/workers/w0/drain")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["param"]) == (409, "last_worker", "worker")
        assert error["message"].startswith(
            "w0 is the last worker that serves demo: after it has left, requests"
        )
        assert "?force=true (instar drain w0 --force)" in error["message"]
        assert not gate.worker.drained
        assert (await http.post("/admin/workers/w0/drain?force=true")).status_code == 202
        await gate.until("the order", lambda: gate.worker.drained)
        await gate.worker.leave()
        waiting = asyncio.create_task(http.post("/v1/completions", json=BODY))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await gate.add_worker("w1")
        assert (await waiting).status_code == 200
        await gate.add_worker("w2")
        for _ in range(200):
            if len((await gate.state())["workers"]) == 2:
                break
            await asyncio.sleep(0.02)
        assert (await http.post("/admin/workers/w1/drain")).status_code == 202


async def test_the_prefix_cache_is_told_under_both_names(gate: Gate) -> None:
    metrics = metrics_of(gate.worker, running=1)
    (one,) = metrics.instances
    last = replace(one.last, prefix_queries=160, prefix_hits=96)
    metrics = replace(metrics, instances=[replace(one, last=last)])
    await gate.bus.publish(gate.bus.names.metrics, metrics)
    while "vllm:prefix_cache_queries_total" not in (found := await measured(gate)):
        await asyncio.sleep(0.02)
    for name, value in (("queries", 160.0), ("hits", 96.0)):
        [(labels, theirs)] = found[f"vllm:prefix_cache_{name}_total"]
        [(ours, own)] = found[f"instar_prefix_cache_{name}_total"]
        assert (theirs, own) == (value, value) and labels["model_name"] == ours["model_name"] == "demo"


async def test_metrics_count_what_clients_got(gate: Gate) -> None:
    async with gate.client() as client:
        for _ in range(2):
            await client.completions.create(**BODY)
        async with gate.http() as http:
            await http.post("/v1/completions", json=BODY | {"n": 0})
    found = await measured(gate)
    label = {"model_name": "demo"}
    assert found["instar_request_success_total"] == [(label | {"finished_reason": "length"}, 2.0)]
    assert found["instar_generation_tokens_total"] == [(label, 6.0)]
    assert found["instar_time_to_first_token_seconds_count"] == [(label, 2.0)]
    assert found["instar_inter_token_latency_seconds_count"] == [(label, 4.0)]
    assert found["instar_e2e_request_latency_seconds_count"] == [(label, 2.0)]
    assert found["instar_request_queue_time_seconds_count"] == [(label, 2.0)]
    assert ({"reason": "invalid_value"}, 1.0) in found["instar_admission_rejections_total"]
    bounds = [labels["le"] for labels, _ in found["instar_time_to_first_token_seconds_bucket"]]
    assert bounds[:3] == ["0.001", "0.005", "0.01"] and bounds[-2:] == ["2560.0", "+Inf"]


async def test_gauges_of_instances_are_absent_until_reported_and_routers_find_them(gate: Gate) -> None:
    before = await measured(gate)
    assert "instar_kv_cache_usage_perc" not in before and "instar_num_requests_running" not in before
    await report(gate)
    found = await measured(gate)
    label = {"model_name": "demo", "engine": "demo@w0"}
    for prefix in ("instar_", "vllm:"):
        assert found[f"{prefix}num_requests_running"] == [(label, 2.0)]
        assert found[f"{prefix}num_requests_waiting"] == [(label, 1.0)]
        assert found[f"{prefix}kv_cache_usage_perc"] == [(label, 0.25)]
    assert found["instar_kv_blocks"] == [(label, 64.0)]
    assert found["instar_num_preemptions_total"] == [(label, 3.0)]
    assert found["vllm:cache_config_info"][0][0]["num_gpu_blocks"] == "64"
    assert "process_resident_memory_bytes" in found


async def test_state_and_metrics_show_which_controller_leads(
    gate: Gate, redis_settings: RedisSettings
) -> None:
    assert (await gate.state())["controller"] == {
        "name": "",
        "term": 0,
        "leads": False,
        "failure": None,
    }

    async def shown(leads: bool) -> dict[str, object]:
        async with asyncio.timeout(10):
            while (found := (await gate.state())["controller"])["leads"] != leads:
                await asyncio.sleep(0.05)
        return dict(found)

    async with connect(redis_settings, source="controller") as link:
        leader = Leader(link, "first", lease_s=0.5)
        leading = asyncio.ensure_future(leader.lead(asyncio.Event().wait))
        assert await shown(leads=True) == {
            "name": "first",
            "term": leader.term,
            "leads": True,
            "failure": None,
        }
        found = await measured(gate)
        assert found["instar_controller_leads"] == [({"controller": "first"}, 1.0)]
        assert found["instar_controller_term"] == [({}, float(leader.term))]
        leading.cancel()
    assert (await shown(leads=False))["leads"] is False

"""The gateway's life: before it has a model, while it drains, and as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from bench.common.service import free_port, wait_for
from bus.settings import RedisSettings
from tests.support.gateway_harness import ANSWER, BODY, running
from tests.support.gateway_streams import answer
from tests.support.paths import ROOT

pytest_plugins = ["tests.support.gateway_fixtures"]


async def test_a_model_that_is_loading_and_one_that_never_was(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, workers=0) as gate, gate.http() as http:
        none = await http.post("/v1/completions", json=BODY)
        assert none.status_code == 503 and none.headers["retry-after"]
        worker = await gate.add_worker(state="loading")
        while not (await gate.state())["workers"]:
            await asyncio.sleep(0.02)
        loading = await http.post("/v1/completions", json=BODY)
        assert loading.status_code == 503 and "loading" in loading.json()["error"]["message"]
        assert (await http.get("/ready")).status_code == 503
        await gate.bus.update_card(worker.card())
        await gate.bus.event("worker_joined", "w0", "loaded")
        await gate.wait_ready()
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_a_tokenizer_that_cannot_warm_up_does_not_end_the_gateway(
    redis_settings: RedisSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ImportError("no jinja2")

    monkeypatch.setattr("gateway.text.template.warm_up", fail)
    async with running(redis_settings, folder) as gate:
        await asyncio.sleep(0.1)
        assert (await answer(gate))[0] == ANSWER


async def test_while_draining_new_requests_get_503_and_streams_end(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder) as gate, gate.http() as http:
        gate.worker.stop_at = 3
        task = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
        await gate.until("a run", lambda: gate.worker.num_running)
        gate.stop.set()
        await asyncio.sleep(0.1)
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and answer.headers["retry-after"]
        error = answer.json()["error"]
        told = "this gateway is shutting down; ask another one, or this one when it is back"
        assert (error["code"], error["message"]) == ("service_unavailable", told)
        assert (await http.get("/ready")).status_code == 503
        assert (await http.get("/health")).status_code == 200
        gate.worker.stop_at = None
        assert (await task).text.endswith("data: [DONE]\n\n") and '"error"' not in task.result().text
        assert gate.task is not None
        await asyncio.wait_for(asyncio.shield(gate.task), 5)


async def test_streams_that_outlast_the_drain_are_told(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, drain_timeout_s=0.2) as gate, gate.http() as http:
        gate.worker.stop_at = 3
        task = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": True}))
        await gate.until("a run", lambda: gate.worker.num_running)
        await asyncio.sleep(0.1)
        gate.stop.set()
        text = (await task).text
        assert '"code":"service_unavailable"' in text and text.endswith("data: [DONE]\n\n")
        await gate.until("the cancellation", lambda: gate.worker.cancelled)


def gateway_process(redis: RedisSettings, tmp_path: Path, **env: str) -> subprocess.Popen[str]:
    (tmp_path / "instar.toml").touch()
    base = {name: value for name, value in os.environ.items() if not name.startswith("INSTAR_")}
    ours = {
        "INSTAR_CONFIG": str(tmp_path / "instar.toml"),
        "INSTAR_REDIS__URL": redis.url,
        "INSTAR_REDIS__PREFIX": redis.prefix,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "gateway"], env=base | ours | env, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )


def test_a_port_in_use_is_one_clear_line(redis_settings: RedisSettings, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = gateway_process(redis_settings, tmp_path, INSTAR_GATEWAY__PORT=port)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 2
    assert len(told.strip().splitlines()) == 1 and port in told and "in use" in told, told


def test_an_open_door_without_keys_is_refused(redis_settings: RedisSettings, tmp_path: Path) -> None:
    process = gateway_process(redis_settings, tmp_path, INSTAR_GATEWAY__HOST="0.0.0.0")
    _, told = process.communicate(timeout=30)
    assert process.returncode == 2 and "api_keys" in told and "127.0.0.1" in told


def test_sigterm_ends_the_process_with_status_0(redis_settings: RedisSettings, tmp_path: Path) -> None:
    port = free_port()
    process = gateway_process(redis_settings, tmp_path, INSTAR_GATEWAY__PORT=str(port))
    try:
        wait_for("the gateway", lambda: _is_up(port), 20)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert f"listening on http://127.0.0.1:{port}" in told and "Traceback" not in told


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_second_gateway_of_the_same_name_is_refused_and_without_a_name_each_has_its_own(
    redis_settings: RedisSettings, tmp_path: Path
) -> None:
    base = {key: value for key, value in os.environ.items() if not key.startswith("INSTAR_")}
    base |= {"INSTAR_CONFIG": "", "INSTAR_REDIS__URL": redis_settings.url}
    base |= {"INSTAR_REDIS__PREFIX": redis_settings.prefix}
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str = "") -> tuple[subprocess.Popen[bytes], str]:
        port = free_port()
        env = base | {"INSTAR_GATEWAY__PORT": str(port), "INSTAR_GATEWAY__ID": name}
        command = [sys.executable, "-m", "gateway"]
        process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE)
        started.append(process)
        return process, f"http://127.0.0.1:{port}"

    def answers(url: str) -> str:
        try:
            return str(httpx.get(f"{url}/admin/state", timeout=5).json()["gateway"]["id"])
        except httpx.HTTPError:
            return ""

    try:
        (_, first), (_, second), (_, third) = start("one"), start(), start()
        wait_for("the first", lambda: answers(first) == "one")
        refused, _ = start("one")
        _, said = refused.communicate(timeout=30)
        assert refused.returncode == 2
        assert b"another gateway is called 'one' and lives" in said
        assert b"INSTAR_GATEWAY__ID" in said
        wait_for("the others", lambda: answers(second) and answers(third))
        assert len({answers(first), answers(second), answers(third)}) == 3
    finally:
        for process in started:
            process.kill()
            process.communicate()

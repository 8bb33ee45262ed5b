"""What keeps one client, or a thousand, from spoiling it for the rest."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import openai
import pytest

from bus.settings import RedisSettings
from gateway.http.connection import Link
from gateway.http.sse import EventStream
from tests.conftest import settings_of
from tests.gateway_harness import ANSWER, BODY, running
from tests.redis_process import RedisProcess
from tests.service import ROOT, free_port, wait_for

pytest_plugins = ["tests.gateway_fixtures"]


async def test_a_burst_over_the_queue_is_refused_quickly_and_the_rest_is_served(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, max_queue=8) as gate:
        gate.worker.gate.clear()
        limits = httpx.Limits(max_connections=100)
        async with gate.http(limits=limits) as http:
            refused: list[float] = []

            async def one() -> httpx.Response:
                start = time.perf_counter()
                answer = await http.post("/v1/completions", json=BODY)
                if answer.status_code == 503:
                    refused.append(time.perf_counter() - start)
                return answer

            tasks = [asyncio.create_task(one()) for _ in range(80)]
            await gate.until("the refusals", lambda: len(refused) == 72)
            await gate.until("the accepted ones", lambda: gate.worker.num_running == 8)
            gate.worker.gate.set()
            answers = await asyncio.gather(*tasks)
        accepted = [answer for answer in answers if answer.status_code == 200]
        assert len(accepted) == 8 and all(a.json()["choices"][0]["text"] == ANSWER for a in accepted)
        for answer in answers:
            if answer.status_code == 503:
                assert answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["code"] == "server_overloaded"
        await gate.settled()


async def test_requests_in_flight_are_bounded_too(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, max_inflight=2) as gate, gate.http() as http:
        gate.worker.stop_at = 2
        tasks = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(2)]
        await gate.until("both", lambda: gate.worker.num_running == 2)
        await asyncio.sleep(0.1)
        answer = await http.post("/v1/completions", json=BODY)
        assert answer.status_code == 503 and "max_inflight is 2" in answer.text
        assert (await http.post("/v1/completions", json=BODY | {"n": 3})).status_code == 503
        gate.worker.stop_at = None
        assert {task.result().status_code for task in (await asyncio.wait(tasks))[0]} == {200}


async def test_a_key_over_its_rate_gets_429_with_the_headers_of_its_limit(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, rate_limit_rpm=2, api_keys=["a", "b"]) as gate:
        async with gate.http(headers={"authorization": "Bearer a"}) as http:
            answers = [await http.post("/v1/completions", json=BODY) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        async with gate.client(api_key="b") as client:
            await client.completions.create(**BODY)
        async with gate.client(api_key="a") as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(**BODY)


async def test_a_deadline_that_passes_in_the_queue_is_504_and_cancels(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, queue_timeout_s=0.4) as gate:
        gate.worker.gate.clear()
        for stream in (False, True):
            async with gate.http() as http:
                answer = await http.post("/v1/completions", json=BODY | {"stream": stream})
            assert answer.status_code == 504, answer.text
            assert answer.json()["error"]["code"] == "deadline_exceeded"
            assert answer.json()["error"]["type"] == "timeout"
        await gate.until("the cancellations", lambda: len(gate.worker.cancelled) == 2)


async def test_a_slow_reader_is_cut_off_and_the_others_do_not_notice(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, stream_buffer_tokens=16) as gate:
        gate.worker.max_model_len = 1_000_000
        await gate.bus.update_card(gate.worker.card())
        await gate.bus.event("worker_joined", "w0", "longer")
        tokens = gate.ids("fox") * 20_000
        gate.worker.tokens_per_step = 50
        gate.worker.reply = lambda submit: tokens if submit.sampling.logprobs else gate.ids(ANSWER)
        slow = socket.create_connection(("127.0.0.1", gate.settings.gateway.port))
        body = json.dumps(BODY | {"max_tokens": 20_000, "stream": True, "logprobs": 20}).encode()
        while (await gate.state())["instances"][0]["max_model_len"] < 1000:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(
            slow.sendall,
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body),
        )
        await gate.until("the slow stream", lambda: gate.worker.num_running == 1)
        async with gate.client() as client:
            while not gate.worker.cancelled:
                start = time.perf_counter()
                answer = await client.completions.create(**BODY)
                assert answer.choices[0].text == ANSWER
                assert time.perf_counter() - start < 2.0
        slow.setblocking(True)
        slow.settimeout(5)
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            piece = await asyncio.to_thread(slow.recv, 1 << 20)
            assert piece, "the stream was closed without an end"
            received = (received + piece)[-4000:]
        slow.close()
        assert b'"code":"slow_reader"' in received and b"data: [DONE]" in received
        await gate.settled()


async def test_connections_that_send_nothing_are_closed_and_make_room(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, header_timeout_s=1.0, max_connections=50) as gate:
        port = gate.settings.gateway.port
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(120)]
        idle[-1][1].write(b"POST /v1/completions HTTP/1.1\r\nhost:")
        async with gate.client() as client:
            assert (await client.completions.create(**BODY)).choices[0].text == ANSWER
        start = time.monotonic()
        await asyncio.wait_for(
            asyncio.gather(*(reader.read() for reader, _ in idle), return_exceptions=True), 5
        )
        assert time.monotonic() - start < 3
        for _, writer in idle:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_when_all_connections_work_a_further_one_is_refused(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, max_connections=3) as gate, gate.http() as http:
        gate.worker.gate.clear()
        tasks = [asyncio.create_task(http.post("/v1/completions", json=BODY)) for _ in range(3)]
        await gate.until("all", lambda: gate.worker.num_running == 3)
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.settings.gateway.port)
        assert (await reader.read()).startswith(b"HTTP/1.1 503")
        writer.close()
        gate.worker.gate.set()
        await asyncio.gather(*tasks)


async def test_a_body_that_does_not_come_is_given_up(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, header_timeout_s=0.3) as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.settings.gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408") and b"body_timeout" in answer
        await gate.settled()


async def test_a_body_that_drips_is_given_up_too(redis_settings: RedisSettings, folder: Path) -> None:
    async with running(redis_settings, folder, header_timeout_s=0.4) as gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.settings.gateway.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = asyncio.create_task(reader.read())
        for _ in range(12):
            await asyncio.sleep(0.1)
            writer.write(b" ")
        assert answer.done() and (await answer).startswith(b"HTTP/1.1 408")
        writer.close()
        await gate.settled()


async def test_a_request_in_the_pipeline_is_not_timed_by_the_answer_before_it(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, header_timeout_s=0.4) as gate:
        gate.worker.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", gate.settings.gateway.port)
        body = json.dumps(BODY).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + head + body[:5])
        assert b"200" in await reader.readuntil(b'"ok"}')
        writer.write(body[5:])
        await asyncio.sleep(0.8)
        gate.worker.gate.set()
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
        writer.close()


async def test_the_rest_of_a_stream_is_waited_for_until_the_socket_took_it_or_the_client_left() -> None:
    transport = Mock()
    for leaves in (True, False):
        link = Link(transport)
        stream = EventStream(link, 100)
        stream.open()
        link.is_paused = True
        stream.push(b"x")
        drained = asyncio.create_task(stream.drained(5))
        await asyncio.sleep(0)
        assert not drained.done()
        link.is_lost, link.is_paused = leaves, leaves
        (stream.on_lost if leaves else link.on_writable)()
        assert await asyncio.wait_for(drained, 1) is not leaves
    link.is_paused = True  # all is written, the socket's buffer is full
    assert await stream.drained(0.01) is False


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
        assert answer.json()["error"]["code"] == "service_unavailable"
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


async def test_with_redis_away_new_requests_wait_a_little_and_then_get_503(
    redis_settings: RedisSettings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("state", "loops"):
        monkeypatch.setattr(f"gateway.{module}.BUS_PATIENCE_S", 1.0)
    with RedisProcess(folder) as server:
        async with running(settings_of(server.url), folder) as gate, gate.http() as http:
            await gate.worker.die()
            server.kill()
            waited = await http.post("/v1/completions", json=BODY)
            refused = await http.post("/v1/completions", json=BODY)
            for answer in (waited, refused):
                assert answer.status_code == 503 and answer.headers["retry-after"], answer.text
                assert answer.json()["error"]["code"] == "service_unavailable"
            assert waited.elapsed.total_seconds() > 0.5 > refused.elapsed.total_seconds()
            assert (await http.get("/health")).status_code == 200
            assert (await gate.state())["workers"][0]["state"] == "unknown"
            server.start()
            await gate.worker.start()
            await gate.wait_ready()
            served = await http.post("/v1/completions", json=BODY)
            assert served.json()["choices"][0]["text"] == ANSWER


# --------------------------------------------------------------------------- the process


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


def test_the_gateway_imports_no_torch(tmp_path: Path) -> None:
    loads = "import sys, gateway.service, gateway.text.tokenizer as t"
    code = f"{loads}; t.warm_up(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def _is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False

"""What one call may take of Redis and of the gateway's memory, measured at the real thing."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

from bus.codec import decode
from bus.messages import StepOutput, Submit
from bus.settings import RedisSettings
from tests.support.gateway_harness import BODY, Gate, running
from tests.support.redis_process import RedisProcess
from worker.service.parcels import parts_of

pytest_plugins = ["tests.support.gateway_fixtures"]


def stop_reading(gate: Gate) -> None:
    """Let what is sent to the worker stay in Redis."""
    gate.worker._tasks[1].cancel()


async def test_a_prompt_is_in_redis_once_for_all_choices(
    redis_settings: RedisSettings, redis_server: RedisProcess, folder: Path
) -> None:
    async with running(redis_settings, folder) as gate, gate.http() as http:
        stop_reading(gate)
        prompt = [900 + i % 90 for i in range(400)]  # 3 bytes each
        stream = gate.bus.names.requests(gate.worker.instance)

        async def num_bytes(n: int) -> int:
            asked = asyncio.create_task(
                http.post("/v1/completions", json=BODY | {"prompt": prompt, "max_tokens": 4, "n": n})
            )
            with redis_server.client() as client:
                await gate.until("the entry", lambda: client.xlen(stream))
                ((_, fields),) = client.xrange(stream)
                client.delete(stream)
            assert [one.prompt_token_ids for one in decode(fields[b"m"], Submit).each()] == [prompt] * n
            asked.cancel()
            await asyncio.wait([asked])
            return len(fields[b"m"])

        one, many = await num_bytes(1), await num_bytes(128)
        assert one < 2000 and many < one + 127 * 120, "128 prompts would be 154 kB"


SCORING = BODY | {
    "prompt": [100 + i % 100 for i in range(400)],
    "echo": True,
    "logprobs": 20,
    "max_tokens": 1,
}


async def test_what_a_call_can_come_to_is_known_before_it_runs(
    redis_settings: RedisSettings, folder: Path
) -> None:
    """The attack: scores of a prompt, times n, and scored answers that nobody limits."""
    async with running(redis_settings, folder, max_call_mb=2) as gate, gate.http() as http:
        for asked in (SCORING | {"n": 2}, BODY | {"n": 100, "logprobs": 5}):
            answer = await http.post("/v1/completions", json=asked)
            assert answer.status_code == 400 and "gateway.max_call_mb" in answer.text
        assert not gate.worker.submits
        assert (await http.post("/v1/completions", json=SCORING)).status_code == 200
        chat = {"model": "demo", "messages": [{"role": "user", "content": "fox"}]}
        scored = chat | {"logprobs": True, "top_logprobs": 20}
        assert (await http.post("/v1/chat/completions", json=scored)).status_code == 200
        assert gate.worker.submits[-1].sampling.max_tokens == 2**20 // 9280, "its default fits"
        await gate.settled()


async def test_the_memory_of_all_calls_is_bounded_and_comes_back(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, max_call_mb=2, max_inflight_mb=4) as gate, gate.http() as http:
        gate.worker.gate.clear()
        asked = [asyncio.create_task(http.post("/v1/completions", json=SCORING)) for _ in range(8)]
        await gate.until("the refusals", lambda: sum(task.done() for task in asked) == 5)
        await gate.until("the others", lambda: gate.worker.num_running == 3)
        gate.worker.gate.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [503] * 5
        assert all("gateway.max_inflight_mb is 4" in one.text for one in answers if one.status_code == 503)
        await gate.settled()
        assert (await http.post("/v1/completions", json=SCORING)).status_code == 200


async def test_an_answer_that_outgrows_the_memory_ends_and_the_others_do_not(
    redis_settings: RedisSettings, folder: Path
) -> None:
    scored = BODY | {"prompt": [901], "logprobs": 20, "max_tokens": 450, "ignore_eos": True}
    async with running(redis_settings, folder, max_call_mb=2, max_inflight_mb=2) as gate, gate.http() as http:
        gate.worker.reply = lambda submit: [901] * 450  # 1.3 MB each in the end
        gate.worker.stop_at = 200
        asked = [asyncio.create_task(http.post("/v1/completions", json=scored)) for _ in range(2)]
        await gate.until("both", lambda: gate.worker.num_running == 2)
        gate.worker.stop_at = None
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200, 503]
        assert any("gateway.max_inflight_mb is 2" in answer.text for answer in answers)
        await gate.settled()


async def test_a_client_that_reads_nothing_of_its_scores_is_cut_off_by_their_size(
    redis_settings: RedisSettings, folder: Path
) -> None:
    """The attack: each event has hundreds of scored tokens, so that a count of events bounds nothing."""

    def in_parts(step: StepOutput) -> list[StepOutput]:
        return [replace(step, deltas=[part]) for delta in step.deltas for part in parts_of(delta, 40_000)]

    async with running(redis_settings, folder, max_call_mb=1) as gate:
        gate.worker.mangle = in_parts
        body = json.dumps(SCORING | {"stream": True, "n": 64}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gate.settings.gateway.port))
            await asyncio.to_thread(client.sendall, head + body)
            async with gate.client() as bystander:
                await bystander.completions.create(**BODY)
            await gate.until("its requests", lambda: len(gate.worker.submits) > 64)
            await gate.until("their ends", lambda: gate.worker.num_running == 0, 20)
            client.settimeout(5)
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received = received[-1000:] + await asyncio.to_thread(client.recv, 1 << 20)
            assert b"slow_reader" in received and b"1 MiB (gateway.max_call_mb)" in received
        await gate.settled()

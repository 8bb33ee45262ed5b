"""The limits that keep one client, or a thousand, from spoiling it for the rest."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bus.settings import RedisSettings
from tests.support.gateway_harness import ANSWER, BODY, running

pytest_plugins = ["tests.support.gateway_fixtures"]


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
    async with running(redis_settings, folder, rate_limit_rpm=2, api_keys=["first-key", "other-key"]) as gate:
        async with gate.http(headers={"authorization": "Bearer first-key"}) as http:
            answers = [await http.post("/v1/completions", json=BODY) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30
        assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
        async with gate.client(api_key="other-key") as client:
            await client.completions.create(**BODY)
        async with gate.client(api_key="first-key") as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(**BODY)


async def test_a_key_that_fills_the_queue_makes_room_for_another(
    redis_settings: RedisSettings, folder: Path
) -> None:
    keys = ["heavy-key", "light-key"]
    async with running(redis_settings, folder, max_queue=8, api_keys=keys) as gate:
        gate.worker.gate.clear()
        heavy, light = ({"authorization": f"Bearer {key}"} for key in keys)
        async with gate.http(limits=httpx.Limits(max_connections=100)) as http:
            asked = [
                asyncio.create_task(http.post("/v1/completions", json=BODY, headers=heavy)) for _ in range(40)
            ]
            await gate.until("the refusals", lambda: sum(task.done() for task in asked) == 32)
            await gate.until("a full queue", lambda: gate.worker.num_running == 8)
            asked.append(asyncio.create_task(http.post("/v1/completions", json=BODY, headers=light)))
            await gate.until("the accepted ones", lambda: sum(task.done() for task in asked) == 33)
            await gate.until("its cancellation", lambda: len(gate.worker.cancelled) == 1)
            gate.worker.gate.set()
            answers = await asyncio.gather(*asked)
        assert answers.pop().status_code == 200
        assert sorted(answer.status_code for answer in answers) == [200] * 7 + [503] * 33
        assert sum("took this one's place" in answer.text for answer in answers) == 1
        await gate.settled()


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


async def test_each_of_two_gateways_counts_the_calls_of_a_key_for_itself(
    redis_settings: RedisSettings, folder: Path
) -> None:
    """docs/keys.md says so, and why."""
    limits: dict[str, Any] = {"rate_limit_rpm": 1, "api_keys": ["first-key"]}
    async with (
        running(redis_settings, folder, **limits) as one,
        running(redis_settings, folder, workers=0, **limits) as other,
    ):
        await other.wait_ready()
        assert one.settings.gateway.port != other.settings.gateway.port
        for gate in (one, other):
            async with gate.http(headers={"authorization": "Bearer first-key"}) as http:
                answers = [await http.post("/v1/completions", json=BODY) for _ in range(2)]
            assert [answer.status_code for answer in answers] == [200, 429]

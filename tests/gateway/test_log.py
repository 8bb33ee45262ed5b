"""The log line of a request at its end, and the SLO counters."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from bus.logs import JsonLines, extras
from bus.settings import SloSettings
from gateway.delivery.endings import SloCounter
from gateway.delivery.request import RequestState
from gateway.errors import worker_lost
from gateway.openai.request_log import RequestLog
from gateway.stats import GatewayStats, ModelStats
from tests.support.gateway_core import Core
from tests.support.gateway_harness import BODY, Gate

pytest_plugins = ["tests.support.gateway_fixtures"]

SLO = SloSettings(ttft_s=2.0, tpot_s=0.1)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "gateway"):
        yield caplog


async def ended(gate: Gate, log: pytest.LogCaptureFixture, num: int = 1) -> list[dict[str, Any]]:
    def found() -> list[logging.LogRecord]:
        return [record for record in log.records if record.getMessage() == "request ended"]

    await gate.until(f"{num} lines", lambda: len(found()) >= num)
    assert len(found()) == num
    return [extras(record) for record in found()]


async def test_a_request_has_one_line_with_what_it_was_and_none_of_its_text(
    gate: Gate, log: pytest.LogCaptureFixture
) -> None:
    async with gate.http() as http:
        headers = {"x-request-id": "mine-1"}
        body = BODY | {"prompt": "SECRET fox", "max_tokens": 6, "stream": True}
        answer = await http.post("/v1/completions", json=body, headers=headers)
    (line,) = await ended(gate, log)
    assert (line["request_id"], line["path"], line["status"]) == ("mine-1", "/v1/completions", 200)
    assert (line["model"], line["finish"], line["output_tokens"], line["attempts"]) == (
        "demo",
        "length",
        6,
        1,
    )
    assert line["prompt_tokens"] == len(gate.worker.submits[0].prompt_token_ids)
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["seconds"] and line["tpot_s"] >= 0
    assert line["precision"] == json.loads(answer.text.split("data: ")[-2])["system_fingerprint"]
    assert gate.worker.submits[0].request_id.startswith(line["id"])
    assert gate.worker.submits[0].trace_id == "mine-1"
    assert "SECRET" not in str(line) and "jumps" not in str([extras(one) for one in log.records])


async def test_every_other_request_has_a_line_too(gate: Gate, log: pytest.LogCaptureFixture) -> None:
    async with gate.http() as http:
        for method, path in [
            ("GET", "/v1/models"),
            ("POST", "/v1/moderations"),
            ("PUT", "/v1/completions"),
            ("GET", "/nothing%0athere"),
            ("GET", "/admin/morphs/none"),
            ("GET", "/health"),  # a probe: at debug only
        ]:
            await http.request(method, path, headers={"x-request-id": f"mine{path}"})
    lines = await ended(gate, log, 5)
    assert [(one["method"], one["path"], one["status"], one.get("error")) for one in lines] == [
        ("GET", "/v1/models", 200, None),
        ("POST", "/v1/moderations", 404, "not_found"),
        ("PUT", "/v1/completions", 405, "method_not_allowed"),
        ("GET", "/nothing%0Athere", 404, "not_found"),
        ("GET", "/admin/morphs/none", 404, "morph_not_found"),
    ]
    assert lines[0]["request_id"] == "mine/v1/models" and all(one["seconds"] >= 0 for one in lines)


async def test_several_choices_are_one_line(gate: Gate, log: pytest.LogCaptureFixture) -> None:
    async with gate.http() as http:
        await http.post("/v1/completions", json=BODY | {"n": 3, "max_tokens": 4})
    (line,) = await ended(gate, log)
    assert (line["output_tokens"], line["finish"]) == (12, "length")


async def test_refusals_and_clients_that_left_have_their_line(
    gate: Gate, log: pytest.LogCaptureFixture
) -> None:
    gate.worker.token_s, gate.worker.stop_at = 0.01, 2
    async with gate.http() as http:
        await http.post("/v1/completions", json=BODY | {"n": 0})
        await http.post("/v1/completions", json=BODY | {"prompt": [1] * 5000})
        for stream in (False, True):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    async with http.stream("POST", "/v1/completions", json=BODY | {"stream": stream}):
                        await asyncio.sleep(1)
    told = await ended(gate, log, 4)
    assert [(one["status"], one.get("error")) for one in told[:2]] == [
        (400, "invalid_value"),
        (400, "context_length_exceeded"),
    ]
    assert "model" not in told[0] and "finish" not in told[1]
    assert [(one["status"], one["finish"]) for one in told[2:]] == [(499, "abort"), (200, "abort")]


def test_a_line_is_json_where_that_is_asked_for(log: pytest.LogCaptureFixture) -> None:
    one = RequestLog("mine", "POST", "/v1/completions", 0.0)
    one.refused(worker_lost("w0 died"))
    one.write()
    told = json.loads(JsonLines("gateway").format(log.records[-1]))
    expected = {"message": "request ended", "level": "info", "request_id": "mine", "status": 503}
    assert expected.items() <= told.items() and told["error"] == "worker_lost"


# ------------------------------------------------------------------------------------- SLOs


def state(first: float = 0.0, last: float = 0.0, num_tokens: int = 0) -> RequestState:
    """A request that came at 100 s, with its first and last token so many seconds later."""
    core = Core()
    core.now = 100.0
    one = core.state("r")
    one.received = [7] * num_tokens
    if num_tokens:
        one.first_token, one.last_token = 100.0 + first, 100.0 + last
    return one


@pytest.mark.parametrize(
    ("one", "how", "counted"),
    [
        (state(2.0, 3.0, 11), "length", (1, 0, 0, 1)),  # exactly at both limits
        (state(2.1, 2.2, 11), "stop", (1, 1, 0, 0)),
        (state(0.1, 2.2, 11), "stop", (1, 0, 1, 0)),
        (state(2.1, 9.2, 11), "stop", (1, 1, 1, 0)),
        (state(0.1, 0.1, 1), "length", (1, 0, 0, 1)),  # one token has no time between tokens
        (state(), "deadline_exceeded", (1, 1, 1, 0)),
        (state(0.1, 0.2, 5), "worker_lost", (1, 1, 1, 0)),
        (state(0.1, 0.2, 5), "abort", (0, 0, 0, 0)),  # nobody knows what it would have got
        (state(2.1, 2.2, 5), "abort", (1, 1, 0, 0)),
    ],
)
def test_requests_are_judged_by_what_they_got(one: RequestState, how: str, counted: tuple[int, ...]) -> None:
    stats = GatewayStats()
    SloCounter(SLO, stats, clock=lambda: 101.0).count(one, how)
    assert numbers(stats.models["m"]) == counted


def test_a_client_that_left_after_waiting_too_long_counts() -> None:
    stats = GatewayStats()
    SloCounter(SLO, stats, clock=lambda: 103.0).count(state(), "abort")
    assert numbers(stats.models["m"]) == (1, 1, 0, 0)


def numbers(stats: ModelStats) -> tuple[int, ...]:
    return stats.slo_requests, stats.slo_ttft_violations, stats.slo_tpot_violations, stats.requests_within_slo


async def test_metrics_tell_how_many_were_served_in_time(gate: Gate) -> None:
    async with gate.http() as http:
        await http.post("/v1/completions", json=BODY | {"max_tokens": 3})
        text = (await http.get("/metrics")).text
    for line in (
        'instar_slo_requests_total{model_name="demo"} 1.0',
        'instar_slo_ttft_violations_total{model_name="demo"} 0.0',
        'instar_slo_tpot_violations_total{model_name="demo"} 0.0',
        'instar_requests_within_slo_total{model_name="demo"} 1.0',
    ):
        assert line in text.splitlines()

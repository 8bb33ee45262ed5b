"""OpenTelemetry traces: what a collector gets of a call, and that one which is away harms nobody."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from bench.common.service import free_port
from bus.messages import StepOutput
from bus.settings import RedisSettings, SettingsError, TracingSettings
from gateway.delivery.journey import Journey
from gateway.delivery.request import InstanceAddress
from gateway.tracing import tracer_of
from gateway.tracing.spans import phases
from tests.support.gateway_core import Core
from tests.support.gateway_harness import BODY, Gate, running
from tests.support.otlp_collector import Collector, collecting

pytest_plugins = ["tests.support.gateway_fixtures"]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, INTERNAL = 2, 1  # of OTLP's kinds


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture
def traced(
    redis_settings: RedisSettings, folder: Path, collector: Collector
) -> AbstractAsyncContextManager[Gate]:
    """A gateway; the collector has all its spans once it has left."""
    return running(redis_settings, folder, tracing=TracingSettings(endpoint=collector.url))


async def ask(gate: Gate, flags: str = "", **body: Any) -> int:
    """`flags`: of a traceparent that is sent; "": none is."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-{flags}"} if flags else {}
    async with gate.http() as http:
        answer = await http.post("/v1/completions", json=BODY | body, headers=headers)
        return answer.status_code


async def test_a_call_is_one_trace_of_what_it_waited_for(
    traced: AbstractAsyncContextManager[Gate], collector: Collector
) -> None:
    async with traced as gate:
        gate.worker.token_s = 0.01
        await ask(gate, "01", prompt="SECRET fox", max_tokens=5, stream=True)
        answered = time.time()
        async with gate.http() as http:
            told = (await http.get("/metrics")).text
    root = collector.root()
    assert (root.trace, root.parent, root.kind, root.is_error) == (TRACE, PARENT, SERVER, False)
    assert root.name == "POST /v1/completions"
    expected = {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": f"{TRACE}-{PARENT}",
        "gen_ai.request.model": "demo",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": len(gate.worker.submits[0].prompt_token_ids),
        "gen_ai.usage.output_tokens": 5,
        "instar.attempts": 1,
    }
    assert expected.items() <= root.facts.items()
    queue, prefill, decode = (collector.named(name)[0] for name in ("queue", "prefill", "decode"))
    for child in (queue, prefill, decode):
        assert (child.trace, child.parent, child.kind) == (TRACE, root.id, INTERNAL)
        assert (child.facts["instar.worker"], child.facts["instar.instance"]) == ("w0", "demo@w0")
    assert root.start <= queue.start <= queue.end == prefill.start <= prefill.end == decode.start
    assert decode.start + 0.03 < decode.end <= root.end <= answered + 0.5
    first = root.facts["gen_ai.latency.time_to_first_token"]
    assert first == pytest.approx(decode.start - root.start, abs=1e-6)
    assert decode.facts["instar.fingerprint"] == "fp-full-tp1"
    assert collector.resource["service.name"] == "instar"
    assert b"SECRET" not in collector.raw and b"fox" not in collector.raw and b"quick" not in collector.raw
    assert "instar_trace_spans_made_total 4.0" in told


async def test_who_sends_a_traceparent_decides_and_else_the_setting(
    redis_settings: RedisSettings, folder: Path, collector: Collector
) -> None:
    tracing = TracingSettings(endpoint=collector.url, sample=0.0)
    async with running(redis_settings, folder, tracing=tracing) as gate:
        await ask(gate, max_tokens=1)
        await ask(gate, "00", max_tokens=1)
        assert gate.worker.submits and collector.spans == []
        await ask(gate, "01", max_tokens=1)
    assert collector.root().trace == TRACE


async def test_refusals_and_failures_are_marked_and_told_by_their_code(
    redis_settings: RedisSettings, folder: Path, collector: Collector
) -> None:
    tracing = TracingSettings(endpoint=collector.url)
    async with running(redis_settings, folder, tracing=tracing, replay=False) as gate:
        assert await ask(gate, min_p="SECRET") == 400
        gate.worker.stop_at = 2
        asking = asyncio.create_task(ask(gate, "01", stream=True))
        await gate.until("two tokens", lambda: gate.worker.num_running)
        await asyncio.sleep(0.05)
        await gate.bus.event("worker_lost", "w0", "test", epoch=gate.worker.epoch)
        assert await asking == 200
    refused, failed = collector.named("POST /v1/completions")
    assert (refused.facts["error.type"], refused.facts["http.response.status_code"]) == ("invalid_value", 400)
    assert not refused.is_error and not refused.message and b"SECRET" not in collector.raw
    assert failed.is_error and failed.facts["error.type"] == "worker_lost"
    (decode,) = collector.named("decode")
    assert decode.is_error and decode.facts["error.type"] == "worker_lost"


async def test_a_second_attempt_has_spans_of_its_own(
    traced: AbstractAsyncContextManager[Gate], collector: Collector
) -> None:
    async with traced as gate:
        steps: list[StepOutput] = []

        def lose_one(step: StepOutput) -> list[StepOutput]:
            steps.append(step)
            return [] if len(steps) == 4 else [step]

        gate.worker.mangle = lose_one
        gate.worker.token_s = 0.02
        assert await ask(gate, max_tokens=6) == 200
    root = collector.root()
    assert root.facts["instar.attempts"] == 2 and not root.is_error
    ((name, event),) = root.events
    assert (name, event["instar.reason"], event["instar.attempt"]) == ("replay", "gap", 1)
    first, second = collector.named("decode")
    assert (first.facts["instar.attempt"], second.facts["instar.attempt"]) == (1, 2)
    assert first.facts["instar.void"] == "gap" and "instar.void" not in second.facts
    made = [one.facts["gen_ai.usage.output_tokens"] for one in (first, second)]
    assert sum(made) == 6 and root.facts["gen_ai.usage.output_tokens"] == 6
    assert collector.named("prefill")[1].facts["gen_ai.usage.input_tokens"] > made[0]
    assert first.end <= collector.named("queue")[1].start


async def test_a_workers_death_shows_as_a_second_attempt_elsewhere(
    redis_settings: RedisSettings, folder: Path, collector: Collector
) -> None:
    tracing = TracingSettings(endpoint=collector.url)
    async with running(redis_settings, folder, workers=2, tracing=tracing) as gate:
        for worker in gate.workers:
            worker.stop_at = 2
        asking = asyncio.create_task(ask(gate, max_tokens=4))
        await gate.until("it to run", lambda: any(worker.num_running for worker in gate.workers))
        await asyncio.sleep(0.1)
        (doomed,) = (worker for worker in gate.workers if worker.num_running)
        await doomed.die()
        for worker in gate.workers:
            worker.stop_at = None
        await gate.bus.event("worker_lost", doomed.id, "test", epoch=doomed.epoch)
        assert await asking == 200
    ((name, event),) = collector.root().events
    assert (name, event["instar.reason"], event["instar.worker"]) == ("replay", "worker_lost", doomed.id)
    first, second = collector.named("decode")
    assert first.facts["instar.worker"] == doomed.id != second.facts["instar.worker"]
    assert not first.is_error and not collector.root().is_error  # the client got all of it


async def test_a_morph_and_the_shape_that_it_made_are_events(
    traced: AbstractAsyncContextManager[Gate], collector: Collector
) -> None:
    async with traced as gate, gate.http() as http:
        await http.post("/admin/instances/demo@w0/resize?wait=true", json={"blocks": 70})  # before the call
        gate.worker.stop_at, gate.worker.numbers = 2, {"boundary_seconds": 0.25}
        asking = asyncio.create_task(ask(gate, max_tokens=4))
        await gate.until("it to run", lambda: gate.worker.num_running)
        await asyncio.sleep(0.1)
        order = {"count": 1, "precision": "int4"}
        morph = (await http.post("/admin/instances/demo@w0/swap?wait=true", json=order)).json()
        gate.worker.fingerprint, gate.worker.stop_at = "fp-int4-tp1", None
        assert await asking == 200
    ((name, event),) = collector.root().events
    assert (name, event["instar.morph.id"], event["instar.morph.kind"]) == ("morph", morph["id"], "swap")
    assert (event["instar.morph.outcome"], event["instar.morph.pause_seconds"]) == ("applied", 0.25)
    (decode,) = collector.named("decode")
    ((name, event),) = decode.events
    expected = {"instar.fingerprint": "fp-int4-tp1", "instar.layers_below_full": 1, "instar.first_token": 2}
    assert name == "shape" and event == expected


def test_the_wait_is_over_when_the_first_step_begins_and_not_when_it_tells() -> None:
    core = Core()
    core.worker()
    core.poll()
    state = core.state("a")
    state.journey = Journey(core.now)
    core.delivery.submit(state)
    core.sent(state, begun=False)
    core.now += 1.0
    core.step_s = 0.25  # the prompt was short: the step that admitted it made a token, too
    core.deliver(state, [1])
    queue, prefill, decode = phases(state, core.now + 1.0)
    assert queue.end - queue.start == pytest.approx(0.75)
    assert prefill.end - prefill.start == pytest.approx(0.25) and decode.start == core.now
    assert state.began == queue.end


def test_of_many_attempts_the_first_and_the_last_are_kept() -> None:
    journey = Journey(0.0)
    for number in range(1, 100):
        journey.sent(InstanceAddress("m@w0", "w0", 1), number, 1, float(number))
        journey.void("precision_floor", number + 0.5)
    journey.sent(InstanceAddress("m@w0", "w0", 1), 100, 1, 100.0)
    numbers = [attempt.number for attempt in journey.attempts]
    assert len(numbers) == 8 and numbers[:4] == [1, 2, 3, 4] and numbers[-1] == 100


# ------------------------------------------------------------------------------------- harm


@pytest.mark.parametrize("is_hanging", [False, True], ids=["nobody listens", "it hangs"])
async def test_a_collector_that_is_away_costs_spans_and_one_line(
    redis_settings: RedisSettings,
    folder: Path,
    collector: Collector,
    caplog: pytest.LogCaptureFixture,
    is_hanging: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.tracing.tracer.SEND_MS", 50.0)
    monkeypatch.setattr("gateway.tracing.tracer.CLOSE_S", 0.3)
    monkeypatch.setattr("gateway.tracing.tracer.TIMEOUT_S", 0.2)  # no second try
    collector.is_hanging.set()
    url = collector.url if is_hanging else f"http://127.0.0.1:{free_port()}"
    async with running(redis_settings, folder, tracing=TracingSettings(endpoint=url)) as gate:
        for _ in range(3):
            assert await ask(gate, max_tokens=2) == 200
            await asyncio.sleep(0.1)
        left = time.monotonic()
    assert time.monotonic() - left < 2.0
    assert collector.spans == []
    (line,) = [one for one in caplog.records if "do not reach" in one.getMessage()]
    assert line.levelno == logging.WARNING and url in line.getMessage()
    assert not [one for one in caplog.records if one.name.startswith("opentelemetry")]


def test_without_an_endpoint_nothing_of_it_is_needed() -> None:
    assert Core().gateway.tracer is None
    absent = "dict.fromkeys(('opentelemetry.sdk', 'opentelemetry.exporter'))"
    code = f"import sys; sys.modules.update({absent}); import gateway.app, gateway.service"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("gateway.tracing.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    gateway = Core().gateway
    with pytest.raises(SettingsError, match=r"pip install 'instar\[otel\]'"):
        tracer_of(TracingSettings(endpoint="http://127.0.0.1:4318"), "g", gateway.morphs, gateway.cluster)


def test_an_endpoint_is_an_address_and_its_path_is_kept() -> None:
    assert TracingSettings(endpoint="http://h:4318").url == "http://h:4318/v1/traces"
    assert TracingSettings(endpoint="https://h/otlp/v1/traces").url == "https://h/otlp/v1/traces"
    with pytest.raises(ValueError, match="is not a URL like"):
        TracingSettings(endpoint="localhost:4318")

"""A real worker with KV blocks to spare and too many prompts for its time says why it does nothing."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bench.common.service import LEASE_S, Service, wait_for
from bus.messages import Event
from bus.names import Names
from instar.cli import main
from tests.support.paths import DEMO_MODEL

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.slow,
]

FAST = {"MONITOR__INTERVAL_S": "0.1", "WORKER__TELEMETRY_S": "0.1", "WORKER__LEASE_S": str(4 * LEASE_S)}
NUM_PROMPTS, PROMPT_TOKENS = 16, 800  # 800 of about 1,800 KV blocks


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(range(16, 1000), k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]


def complete(service: Service, prompt: list[int]) -> int:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    return httpx.post(f"{service.url()}/v1/completions", json=body, timeout=60).status_code


def withheld(service: Service) -> list[Event]:
    told = service.messages(Names().events, Event)
    return [one for one in told if one.kind == "relief_withheld"]


def test_a_queue_that_morphs_would_not_help_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    with Service(settings=FAST) as service, service.explained():
        service.set_policy(ttft_slo_s=0.2)  # 0.1 s of prompts is a late first token
        assert complete(service, [16, 17, 18]) == 200
        with ThreadPoolExecutor(NUM_PROMPTS) as pool:
            statuses = list(pool.map(lambda prompt: complete(service, prompt), prompts()))
        assert statuses == [200] * NUM_PROMPTS
        wait_for("the event", lambda: withheld(service))
        (event,) = withheld(service)
        assert event.subject == "demo@w0"
        assert event.reason.startswith("requests wait for compute, not for KV blocks: ")
        assert event.numbers["kv_needed"] <= event.numbers["kv_blocks"]
        shown = wait_for("the state", lambda: service.state()["instances"][0]["withheld"])
        assert shown == {"reason": event.reason, "at": event.at_ms / 1000}
        assert service.state()["morphs"] == []
        assert main(["status", "--url", service.url()]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "demo@w0: no morph, " in out and "requests wait for compute, not for KV blocks" in out

"""Two API keys at one worker, as their clients see it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from bench.common.service import Service, wait_for
from tests.service.test_worker_process import DEMO

pytestmark = pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built")

LIGHT, HEAVY = "a-key-with-little-load", "a-key-with-much-load"
SETTINGS = {
    "GATEWAY__API_KEYS": f'["{LIGHT}", "{HEAVY}"]',
    "WORKER__MAX_NUM_SEQS": "8",
    "WORKER__MAX_NUM_BATCHED_TOKENS": "64",
    "WORKER__TELEMETRY_S": "0.1",
    "MONITOR__INTERVAL_S": "0.1",
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(settings=SETTINGS) as running:
        yield running


def complete(service: Service, key: str, max_tokens: int) -> int:
    """Return the number of tokens of an answer."""
    body = {"model": "demo", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True}
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{service.url()}/v1/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def counts(service: Service) -> tuple[Any, Any]:
    """Return how many requests run and how many wait."""
    (instance,) = service.state()["instances"]
    return instance["running"], instance["waiting"]


@pytest.mark.slow
def test_a_light_key_is_served_while_all_that_a_heavy_key_runs_goes_on(service: Service) -> None:
    """Alone the heavy key gets every row. Beside the other it leaves one, which takes its request at once."""
    with ThreadPoolExecutor(16) as pool:
        heavy = [pool.submit(complete, service, HEAVY, 200) for _ in range(16)]
        wait_for("eight of eight rows to be taken", lambda: counts(service) == (8, 8))
        assert {one.result() for one in heavy} == {200}
        assert complete(service, LIGHT, 4) == 4
        heavy = [pool.submit(complete, service, HEAVY, 500) for _ in range(16)]
        wait_for("seven of eight rows to be taken", lambda: counts(service) == (7, 9))
        assert complete(service, LIGHT, 4) == 4
        assert not any(one.done() for one in heavy), "without a free row it waits until one of them ends"
        assert {one.result() for one in heavy} == {500}

"""Real workers serve an activation-ordered GPTQ checkpoint alone, become one instance, and part again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.common.service import LEASE_S, Service
from tests.faults.load import LONG_STREAM, Stream
from tests.support.paths import DEMO_MODEL
from tests.support.ready_models import Ready

pytestmark = [
    pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.timeout(300),  # kernels may be compiled first
]

PROMPTS = ("def read_lines(path):\n    ", "class Queue:\n    def __init__(self")
SETTINGS = {"MONITOR__INTERVAL_S": "0.1", "WORKER__TELEMETRY_S": "0.1", "WORKER__LEASE_S": str(4 * LEASE_S)}


@pytest.fixture(scope="module")
def ready() -> Ready:
    return Ready(DEMO_MODEL, group=64, is_ordered=True)


@pytest.fixture(scope="module")
def service(ready: Ready, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = ready.write(tmp_path_factory.mktemp("ready") / "demo")
    with Service(num_workers=2, model=folder, settings=SETTINGS) as service:
        service.set_policy(mode="manual")
        yield service


def texts(service: Service, max_tokens: int) -> list[str]:
    request = LONG_STREAM | {"max_tokens": max_tokens}
    streams = [Stream(service, request, prompt=prompt).start() for prompt in PROMPTS]
    found = [stream.finished() for stream in streams]
    assert [one.error for one in found] == [None] * len(PROMPTS)
    return [one.text for one in found]


def post(service: Service, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(service.url() + path, params={"wait": "true"}, json=body, timeout=60)


def test_streams_go_on_with_the_same_text_through_a_change_of_degree(service: Service) -> None:
    with service.explained():
        expected = texts(service, 200)
        request = LONG_STREAM | {"max_tokens": 200}
        streams = [Stream(service, request, prompt=prompt).start() for prompt in PROMPTS]
        for stream in streams:
            stream.wait_chunks(5)
        for tp in (2, 1):
            body = {"workers": ["w0", "w1"], "tp": tp}
            assert post(service, "/admin/instances/transform", body).json()["state"] == "applied"
        assert [stream.finished().text for stream in streams] == expected
        assert service.metric("instar_recomputed_tokens_total") == 0


def test_the_same_text_as_its_dense_twin(service: Service, ready: Ready, tmp_path: Path) -> None:
    with Service(
        model=ready.write_twin(tmp_path / "demo"), settings=SETTINGS | {"WORKER__VARIANTS": "[]"}
    ) as twin:
        assert texts(twin, 24) == texts(service, 24)


def test_the_shape_and_the_refusals_say_which_precision_there_is(service: Service) -> None:
    with service.explained():
        instance = service.state()["instances"][0]
        assert instance["variants"] == ["int4"]
        assert {layer[part] for layer in instance["layers"] for part in ("attention", "ffn")} == {"int4"}
        refused = post(service, f"/admin/instances/{instance['id']}/swap", {"count": 1, "precision": "full"})
        assert refused.status_code == 400 and "its layers can be: int4" in refused.text
        body = {"model": "demo", "prompt": "x", "min_precision": "full"}
        answer = post(service, "/v1/completions", body)
        assert answer.status_code == 400 and "are in 'int4' alone" in answer.json()["error"]["message"]

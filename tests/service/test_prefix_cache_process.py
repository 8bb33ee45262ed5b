"""The prefix cache in the real service, as a client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.common.service import Service
from tests.service.test_worker_process import DEMO

pytestmark = pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built")

BEGINNING = "The harbour master wrote down every ship that came in before the storm. " * 12


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(num_workers=1) as running:
        yield running


def complete(service: Service, prompt: str, **more: Any) -> tuple[str, int]:
    """Return the text and the cached tokens."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0, "seed": 1} | more
    answer = httpx.post(f"{service.url(0)}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    found = answer.json()
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_known_beginning_is_found_and_the_text_is_the_same(service: Service) -> None:
    prompt = BEGINNING + "At dawn"
    first, none = complete(service, prompt)
    again, cached = complete(service, prompt)
    salted, apart = complete(service, prompt, cache_salt="another tenant")
    assert first == again == salted
    assert none == 0 and apart == 0 and cached > 100
    turn, with_answer = complete(service, prompt + first + " Then")
    assert with_answer >= cached and turn
    metrics = httpx.get(f"{service.url(0)}/metrics", timeout=10).text
    assert "instar_prefix_cache_queries_total" in metrics and "instar_prefix_cache_hits_total" in metrics


def test_a_salt_that_is_too_long_is_refused_by_name(service: Service) -> None:
    body = {"model": "demo", "prompt": "x", "cache_salt": "s" * 257}
    answer = httpx.post(f"{service.url(0)}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"

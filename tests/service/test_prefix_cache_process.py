"""The prefix cache in the real service, as a client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench.common.service import LEASE_S, Service
from tests.faults.load import LONG_STREAM, Stream
from tests.faults.morphs import NUM_LAYERS
from tests.faults.transforms import Shapes
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_salt_that_is_too_long_is_refused_by_name(service: Service) -> None:
    body = {"model": "demo", "prompt": "x", "cache_salt": "s" * 257}
    answer = httpx.post(f"{service.url(0)}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"


MORPHED = {
    "MONITOR__INTERVAL_S": "0.1",
    "WORKER__TELEMETRY_S": "0.1",
    "WORKER__LEASE_S": str(4 * LEASE_S),
    "WORKER__VARIANTS": '["int4"]',
    "WORKER__QUANTIZATION": "rtn",
}
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "top_p": 0.95, "seed": 11})


def texts(service: Service, prompt: str) -> tuple[list[str], int]:
    """Return the greedy and the seeded text of a prompt, and the fewest cached tokens of both."""
    found = [complete(service, prompt, **sampling) for sampling in SAMPLINGS]
    return [text for text, _ in found], min(cached for _, cached in found)


@pytest.mark.slow
def test_the_text_stays_the_same_through_swaps_resizes_transforms_and_a_death() -> None:
    prompts = [BEGINNING + end for end in ("At dawn", "By night", "In the end")]
    without = {"WORKER__PREFIX_CACHE": "false"}
    with Service(settings=MORPHED | without) as plain:
        right = {prompt: texts(plain, prompt) for prompt in prompts}
        long = Stream(plain, LONG_STREAM, prompt=prompts[0]).start().finished().text
    assert all(cached == 0 for _, cached in right.values())
    with Service(num_workers=2, settings=MORPHED) as service, service.explained():
        service.set_policy(mode="manual")
        shapes = Shapes(service)

        def check(least_cached: int = 100) -> None:
            """Ask for all prompts twice; the second time their beginnings must have been found."""
            for prompt in prompts * 2:
                text, cached = texts(service, prompt)
                assert text == right[prompt][0]
            assert cached >= least_cached

        check()
        for worker in ("w0", "w1"):
            hand = shapes.hand(worker)
            assert hand.resize(hand.look()["kv"]["blocks"] // 2)["state"] == "applied"
        check()
        for worker in ("w0", "w1"):
            assert shapes.hand(worker).swap("int4", count=NUM_LAYERS)["state"] == "applied"
        low = "Once, " + BEGINNING + "At dawn"
        assert complete(service, low)[1] == 0 and complete(service, low)[1] > 100
        for worker in ("w0", "w1"):
            assert shapes.hand(worker).swap("full", count=NUM_LAYERS)["state"] == "applied"
        assert complete(service, low)[1] == 0, "blocks of int4 serve nobody in full precision"
        check()
        shapes.apply(2, "w0", "w1")
        check()
        shapes.apply(1, "w0", "w1")
        check()
        streams = [Stream(service, LONG_STREAM, prompt=prompts[0]).start().wait_chunks(5) for _ in range(4)]
        busy = [one["id"].partition("@")[2] for one in service.state()["instances"] if one["running"]]
        service.processes[(busy or ["w0"])[0]].kill()
        assert {stream.finished().error for stream in streams} == {None}
        assert {stream.text for stream in streams} == {long}
        check()

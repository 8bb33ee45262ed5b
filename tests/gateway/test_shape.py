"""Morphs by hand of the real service while a stream runs: what they may change, and what never."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from bench.common.service import Service, wait_for

pytestmark = pytest.mark.slow

INSTANCE = "/admin/instances/demo@w0"
BODY = {"model": "demo", "prompt": "def add(a, b):\n", "max_tokens": 300, "temperature": 0, "logprobs": 0}
BODY |= {"ignore_eos": True, "return_precision": True}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service() as service:
        put(service, "/admin/policy", mode="manual")
        yield service


def post(service: Service, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(service.url() + path, json=body, timeout=60)
    return dict(answer.json())


def put(service: Service, path: str, **body: Any) -> None:
    assert httpx.put(service.url() + path, json=body, timeout=20).status_code == 200


def swap(service: Service, precision: str, **which: Any) -> dict[str, Any]:
    return post(service, f"{INSTANCE}/swap?wait=true", precision=precision, **which)


class Stream(threading.Thread):
    """A completion that runs beside the test. `choice`, once joined: tokens and the spans they came in."""

    def __init__(self, service: Service, **more: Any) -> None:
        super().__init__(daemon=True)
        self._service, self._body = service, BODY | more
        self.choice: dict[str, Any] = {}
        self.start()
        wait_for("the stream to run", lambda: service.blocks_used() > 0, within_s=20)

    def run(self) -> None:
        self.choice = post(self._service, "/v1/completions", **self._body)["choices"][0]

    def tokens(self) -> list[str]:
        self.join(60)
        return list(self.choice["logprobs"]["tokens"])


@pytest.fixture(scope="module")
def oracle(service: Service) -> list[str]:
    """At full precision, with nothing going on."""
    return list(post(service, "/v1/completions", **BODY)["choices"][0]["logprobs"]["tokens"])


def test_a_stream_across_resizes_is_the_same_to_the_token(service: Service, oracle: list[str]) -> None:
    stream = Stream(service)
    before = service.state()["instances"][0]["kv"]["blocks"]
    for blocks in (before // 2, before // 4, before):
        morph = post(service, f"{INSTANCE}/resize?wait=true", blocks=blocks)
        assert morph["state"] == "applied", morph
    assert stream.tokens() == oracle
    assert [span["layers_below_full"] for span in stream.choice["precision"]] == [0]


def test_a_stream_across_swaps_is_the_same_until_the_first_and_says_where_that_was(
    service: Service, oracle: list[str]
) -> None:
    stream = Stream(service, max_tokens=1500)
    assert swap(service, "int4", count=2)["state"] == "applied"
    assert swap(service, "int8", layers=[7], parts=["ffn"])["state"] == "applied"
    morph = swap(service, "full", count=8)
    assert morph["state"] == "applied" and morph["numbers"]["halves_applied"] == 5
    tokens, spans = stream.tokens(), stream.choice["precision"]
    assert spans[0]["layers_below_full"] == 0 and spans[-1]["end"] == len(tokens) == 1500
    assert max(span["layers_below_full"] for span in spans) >= 2
    assert all(last["end"] == span["start"] for last, span in pairwise(spans))
    same = min(spans[0]["end"], len(oracle))
    assert tokens[:same] == oracle[:same]
    assert post(service, "/v1/completions", **BODY)["choices"][0]["logprobs"]["tokens"] == oracle


def test_a_request_with_a_floor_holds_swaps_back_and_waits_for_its_precision(
    service: Service, oracle: list[str]
) -> None:
    stream = Stream(service, min_precision="full")
    held = swap(service, "int4", count=1)
    assert held["state"] == "deferred" and held["numbers"]["requests_holding"] == 1
    assert stream.tokens() == oracle
    assert swap(service, "int4", count=1)["state"] == "applied"
    refused = post(service, "/v1/completions", **BODY, min_precision="full", min_precision_wait=False)
    assert refused["error"]["code"] == "precision_unavailable"
    answers: list[dict[str, Any]] = []

    def ask() -> None:
        answers.append(post(service, "/v1/completions", **BODY, max_loss=0.01))  # all of int4 loses more

    waiting = threading.Thread(target=ask, daemon=True)
    waiting.start()
    waiting.join(1.0)
    assert answers == []
    assert swap(service, "full", count=1)["state"] == "applied"
    waiting.join(30)
    assert answers[0]["choices"][0]["logprobs"]["tokens"] == oracle


def test_what_a_worker_can_never_do_is_refused_with_its_limits(service: Service) -> None:
    (instance,) = service.state()["instances"]
    for blocks, limit in ((1, "min_blocks"), (999_999_999, "max_blocks")):
        error = post(service, f"{INSTANCE}/resize?wait=true", blocks=blocks)["error"]
        assert error["param"] == "blocks" and f"{instance[limit]} KV blocks" in error["message"], error
    assert service.state()["instances"][0]["kv"]["blocks"] == instance["kv"]["blocks"]
    morph = post(service, f"{INSTANCE}/resize?wait=true", blocks=instance["max_blocks"])
    assert morph["state"] == "deferred" and morph["numbers"]["max_blocks"] >= instance["kv"]["blocks"], morph


def test_the_state_shows_what_was_applied_when_the_answer_comes(service: Service) -> None:
    (before,) = service.state()["instances"]
    for precision, below in (("int4", 4), ("full", 0), ("int8", 4), ("full", 0)):
        assert swap(service, precision, count=4)["state"] == "applied"
        assert service.state()["instances"][0]["layers_below_full"] == below
    again = swap(service, "full", layers=[0])
    assert (again["state"], again["reason"]) == ("applied", "already at full; nothing changed")
    blocks = before["kv"]["blocks"]
    for wanted in (blocks // 2, blocks // 4, blocks):
        morph = post(service, f"{INSTANCE}/resize?wait=true", blocks=wanted)
        assert service.state()["instances"][0]["kv"]["blocks"] == morph["numbers"]["blocks_after"]

"""Structured output in the real service, as a client sees it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from bench.common.service import Service, wait_for
from tests.service.test_worker_process import DEMO
from tests.support.schemas import TREE, random_schema

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.timeout(300),  # kernels may be compiled first
]

WHERE = r"(SELECT|DELETE) [a-z]{1,8}( WHERE [a-z]{1,4}=[0-9]{1,3})?"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with Service(num_workers=2, settings={"WORKER__DTYPE": "float32"}) as running:
        yield running


def complete(service: Service, **asked: Any) -> dict[str, Any]:
    body = {"model": "demo", "prompt": "x = ", "max_tokens": 200, "seed": 3} | asked
    answer = httpx.post(f"{service.url(0)}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_answer_that_is_not_cut_keeps_its_schema(service: Service) -> None:
    num_whole = 0
    for schema in [TREE, *(random_schema(random.Random(100 + seed)) for seed in range(40))]:
        (choice,) = complete(service, guided_json=schema)["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)
            num_whole += 1
    assert num_whole >= 36


def test_the_client_library_parses_streamed_answers_with_logprobs(service: Service) -> None:
    schema = {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 999}, "on": {"type": "boolean"}},
        "required": ["id", "on"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    with openai.OpenAI(base_url=f"{service.url(0)}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "give me one"}],
            response_format=form,
            logprobs=True,
            stream=True,
            n=2,
            max_completion_tokens=200,
            seed=5,
        )
        texts, scored, ends = ["", ""], ["", ""], {}
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                for token in (choice.logprobs and choice.logprobs.content) or []:
                    scored[choice.index] += token.token
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
    assert ends == {0: "stop", 1: "stop"} and texts == scored
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def test_a_stop_string_cuts_and_a_choice_ends_at_once(service: Service) -> None:
    (choice,) = complete(service, guided_regex="ab{30}", stop=["bbb"])["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == "a"
    found = complete(service, guided_choice=["yes", "no"], n=4, stop=None)
    assert {one["text"] for one in found["choices"]} <= {"yes", "no"}
    assert {one["finish_reason"] for one in found["choices"]} == {"stop"}


def busy_worker(service: Service) -> str | None:
    """The worker that runs something, as last reported."""
    return next((one["workers"][0] for one in service.state()["instances"] if one["running"]), None)


def test_the_death_of_a_worker_in_the_middle_does_not_show(service: Service) -> None:
    form = f"({WHERE}; ){{20}}"
    asked = {"guided_regex": form, "max_tokens": 900}
    right = complete(service, **asked)["choices"][0]
    assert right["finish_reason"] == "stop" and re.fullmatch(form, right["text"])
    wait_for("reports of its end", lambda: busy_worker(service) is None)
    before = service.metric("instar_request_replays_total")
    body = {"model": "demo", "prompt": "x = ", "seed": 3, "stream": True} | asked
    text, victim, ends = "", "", list[str]()
    with service.explained():
        with httpx.stream("POST", f"{service.url(0)}/v1/completions", json=body, timeout=90) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                ends += [choice["finish_reason"]] if choice["finish_reason"] else []
                if not victim and len(text) > 40:
                    victim = wait_for("a busy worker", lambda: busy_worker(service), every_s=0.01)
                    service.processes[victim].kill()
        assert victim and service.metric("instar_request_replays_total") == before + 1
        assert text == right["text"] and ends == ["stop"]
    service.processes[victim].start()
    service.wait_ready()

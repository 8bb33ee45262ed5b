"""instructor: typed answers by tools, by a schema and by JSON."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pytest

from tests.clients.forms import MAX_TOKENS, MODEL, QUESTION, AnyObject, Light

pytestmark = pytest.mark.clients

ASKED: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": MAX_TOKENS,
    "seed": 5,
}


def client_of(base_url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=base_url, api_key="none"), mode=mode)


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_an_answer_is_of_its_type(base_url: str, mode: str) -> None:
    client = client_of(base_url, instructor.Mode[mode])
    found, answer = client.chat.completions.create_with_completion(
        **ASKED, response_model=Light, max_retries=1
    )
    assert isinstance(found, Light) and answer.usage.completion_tokens > 0


def test_any_json_is_an_object(base_url: str) -> None:
    client = client_of(base_url, instructor.Mode.JSON)
    found = client.chat.completions.create(**ASKED, response_model=AnyObject, max_retries=20)
    assert isinstance(found, AnyObject)


def test_an_answer_is_filled_while_it_is_streamed(base_url: str) -> None:
    client = client_of(base_url, instructor.Mode.TOOLS)
    states = list(client.chat.completions.create_partial(**ASKED, response_model=Light))
    assert len(states) > 1 and states[-1].room in ("kitchen", "hall") and states[-1].level is not None

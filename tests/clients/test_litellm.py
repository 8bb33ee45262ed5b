"""litellm: calls through its two names for servers of this kind, and its own messages sent back."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.forms import MAX_TOKENS, MODEL, QUESTION, Light, Weather

pytestmark = pytest.mark.clients

USER: Any = {"role": "user", "content": QUESTION}
TOOL: Any = {
    "type": "function",
    "function": {"name": "Weather", "description": "x", "parameters": Weather.model_json_schema()},
}


@pytest.fixture(params=["openai", "hosted_vllm"])
def asked(base_url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of every call; each provider adds fields of its own."""
    return {"model": f"{request.param}/{MODEL}", "api_base": base_url, "api_key": "none", "seed": 5}


def test_a_stream_has_the_text_of_the_whole_answer(asked: dict[str, Any]) -> None:
    asked |= {"messages": [USER], "temperature": 0, "max_tokens": 16}
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == whole.choices[0].message.content and said
    rebuilt = litellm.stream_chunk_builder(chunks, messages=[USER])
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_its_own_message_is_taken_back(asked: dict[str, Any]) -> None:
    said = litellm.completion(**asked, messages=[USER], max_tokens=8).choices[0].message
    for form in (said, said.model_dump(), said.json()):
        more = [USER, form, {"role": "user", "content": "And in Oslo?"}]
        assert litellm.completion(**asked, messages=more, max_tokens=8).choices[0].message.content


def test_its_own_call_and_the_result_are_taken_back(asked: dict[str, Any]) -> None:
    asked |= {"tools": [TOOL], "max_tokens": MAX_TOKENS}
    said = litellm.completion(**asked, messages=[USER], tool_choice="required").choices[0].message
    call = said.tool_calls[0]
    # Of a schema, the second provider's name leaves out additionalProperties.
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    results = [{"role": "tool", "tool_call_id": one.id, "content": "31 degrees"} for one in said.tool_calls]
    again = litellm.completion(**asked, messages=[USER, said, *results], tool_choice="none")
    assert again.choices[0].message.content


def test_an_answer_keeps_a_schema(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, messages=[USER], max_tokens=MAX_TOKENS, response_format=Light)
    Light.model_validate_json(answer.choices[0].message.content)


def test_embeddings_and_completions(asked: dict[str, Any]) -> None:
    del asked["seed"]
    found = litellm.embedding(**asked, input=["def f():", "import os"])
    assert [len(one["embedding"]) for one in found.data] == [256, 256]
    asked["model"] = f"text-completion-openai/{MODEL}"
    assert litellm.text_completion(**asked, prompt="def add(a, b):\n", max_tokens=8).choices[0].text


def test_a_refusal_has_the_type_of_the_library(asked: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=[USER], temperature=9)

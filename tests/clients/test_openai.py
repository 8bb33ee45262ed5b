"""The openai package: every call that it has for what is served here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.clients.forms import MAX_TOKENS, MODEL, QUESTION, SHORT, Light, Weather

pytestmark = pytest.mark.clients

MESSAGES: Any = [{"role": "user", "content": QUESTION}]
TYPES: dict[str, type[BaseModel]] = {"Light": Light, "Weather": Weather}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": one.__name__, "description": one.__doc__, "parameters": one.model_json_schema()},
    }
    for one in TYPES.values()
]


@pytest.fixture(scope="module")
def client(service_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_and_described(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "instar"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert said == whole.choices[0].message.content and said
    assert chunks[-1].choices == [] and chunks[-1].usage and whole.usage
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_the_helper_for_streams_gathers_the_whole_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=SHORT) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == said


def test_choices_have_log_probabilities_of_their_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, seed=1, max_tokens=12, logprobs=True, top_logprobs=4
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content
        assert "".join(token.token for token in choice.logprobs.content) == choice.message.content
        for token in choice.logprobs.content:
            likeliest = [one.logprob for one in token.top_logprobs]
            assert len(likeliest) == 4 and likeliest == sorted(likeliest, reverse=True)
            assert token.logprob <= likeliest[0] <= 0


def test_completions_echo_and_choose_the_best_of_several(client: openai.OpenAI) -> None:
    prompt = "def add(a, b):\n"
    scored = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
    (choice,) = scored.choices
    assert choice.text == prompt and choice.logprobs and choice.logprobs.token_logprobs
    assert choice.logprobs.token_logprobs[0] is None
    assert all(one < 0 for one in choice.logprobs.token_logprobs[1:])
    best = client.completions.create(model=MODEL, prompt=[prompt, "x = "], best_of=3, seed=2, max_tokens=8)
    assert [one.index for one in best.choices] == [0, 1] and best.usage
    assert best.usage.completion_tokens > 16


@pytest.mark.parametrize("name", ["Light", "Weather"])
def test_a_tool_that_is_named_is_called_and_its_result_is_taken(client: openai.OpenAI, name: str) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    asked: Any = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": MAX_TOKENS, "seed": 5}
    said = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
    assert said.finish_reason == "tool_calls" and said.message.content is None
    (call,) = said.message.tool_calls or []
    assert call.type == "function" and call.function.name == name
    TYPES[name].model_validate_json(call.function.arguments)
    more: Any = [
        *MESSAGES,
        said.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "31 degrees"},
    ]
    again = client.chat.completions.create(**asked | {"messages": more}, tool_choice="none")
    assert again.choices[0].message.tool_calls is None and again.choices[0].message.content


def test_a_call_that_is_required_comes_in_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
        seed=3,
        stream=True,
    )
    name, arguments, ends = "", "", list[str]()
    for chunk in stream:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert ends == ["tool_calls"]
    TYPES[name].model_validate_json(arguments)


def test_tools_that_may_be_called_leave_the_answer_free(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="auto", max_tokens=16
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_the_helper_of_tools_parses_the_arguments(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Light)],
        tool_choice="required",
        max_tokens=MAX_TOKENS,
        seed=3,
    )
    calls = answer.choices[0].message.tool_calls or []
    assert calls and all(isinstance(call.function.parsed_arguments, Light) for call in calls)


def test_an_answer_keeps_a_schema(client: openai.OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "light", "schema": Light.model_json_schema(), "strict": True},
    }
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format=form, max_tokens=MAX_TOKENS
    )
    Light.model_validate_json(answer.choices[0].message.content or "")
    parsed = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Light, max_tokens=MAX_TOKENS
    )
    assert isinstance(parsed.choices[0].message.parsed, Light)


def test_a_json_object_is_one(client: openai.OpenAI) -> None:
    for seed in range(20):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format={"type": "json_object"},
            max_tokens=MAX_TOKENS,
            seed=seed,
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
            return
    pytest.fail("none of 20 objects ended")


def test_embeddings_have_length_one_in_both_encodings(client: openai.OpenAI) -> None:
    texts = ["def f():", "import os", "def f():"]
    in_base64 = client.embeddings.create(model=MODEL, input=texts)  # the client's default
    as_numbers = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    for one, other in zip(in_base64.data, as_numbers.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert math.fsum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-5)
    assert in_base64.data[0].embedding == pytest.approx(in_base64.data[2].embedding, abs=1e-5)


def test_responses_are_the_chat_under_other_names(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=16)
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16)
    assert response.output_text == chat.choices[0].message.content
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == response.output_text
    more: Any = [*MESSAGES, *response.output, {"role": "user", "content": "And in Oslo?"}]
    again = client.responses.create(model=MODEL, input=more, temperature=0, max_output_tokens=16)
    assert again.status in ("completed", "incomplete")


def test_responses_are_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=MODEL, input=QUESTION, text_format=Light, max_output_tokens=MAX_TOKENS
    )
    assert isinstance(parsed.output_parsed, Light)


def test_responses_call_tools_and_take_their_results(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema()}
    asked: Any = {"model": MODEL, "tools": [tool], "max_output_tokens": MAX_TOKENS}
    asked |= {"parallel_tool_calls": False, "extra_body": SHORT | {"seed": 5}}
    said = client.responses.create(input=QUESTION, tool_choice="required", **asked)
    call = said.output[0]
    assert said.status == "completed" and call.type == "function_call" and call.name == "Weather"
    Weather.model_validate_json(call.arguments)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "31 degrees"}
    more: Any = [{"role": "user", "content": QUESTION}, *said.output, result]
    assert client.responses.create(input=more, tool_choice="none", **asked).output_text
    with client.responses.stream(input=QUESTION, tool_choice="required", **asked) as stream:
        kinds = [event.type for event in stream]
        (streamed,) = [one for one in stream.get_final_response().output if one.type == "function_call"]
    assert "response.function_call_arguments.delta" in kinds
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)


def test_errors_have_the_types_of_the_library(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)

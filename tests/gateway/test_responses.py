"""/v1/responses through the openai package and over raw HTTP, beside the chat that it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bus.settings import RedisSettings
from gateway.openai.answer_types import ErrorAnswer, ResponseAnswer, ResponseEvent
from tests.support import tiny_model
from tests.support.gateway_harness import ANSWER, Gate, running

MODEL = "demo"
PATH = "/v1/responses"
OPENING = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
CLOSING = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]

pytest_plugins = ["tests.support.gateway_fixtures"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    return shared_gate.as_new()


async def streamed(gate: Gate, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each under its own name, numbered and of the described type."""
    async with gate.http() as http:
        answer = await http.post(PATH, json={"model": MODEL, "input": "fox", "stream": True} | body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for lines in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        ResponseEvent.model_validate_json(data.removeprefix("data: "), strict=True)
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(gate: Gate) -> str:
    ids = gate.worker.submits[-1].prompt_token_ids
    text: str = gate.tokenizer._rust.decode(ids, skip_special_tokens=False)
    return text


# --------------------------------------------------------------------------- whole answers


async def test_the_openai_client_gets_a_response(gate: Gate) -> None:
    async with gate.client() as client:
        answer = await client.responses.create(
            model=MODEL, input="the fox", instructions="be brief", metadata={"a": "b"}, store=False
        )
    assert (answer.output_text, answer.status, answer.model) == (ANSWER, "completed", MODEL)
    assert answer.id.startswith("resp_") and answer.output[0].id.startswith("msg_")
    assert (answer.instructions, answer.metadata, answer.store) == ("be brief", {"a": "b"}, False)
    submit = gate.worker.submits[0]
    assert prompt_of(gate) == f"{tiny_model.BOS}[system]be brief\n[user]the fox\n[assistant]"
    usage = answer.usage
    assert usage.input_tokens == len(submit.prompt_token_ids)
    assert usage.output_tokens == len(gate.ids(ANSWER)) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == usage.output_tokens_details.reasoning_tokens == 0


async def test_it_is_the_same_request_as_that_of_a_chat(gate: Gate) -> None:
    both = {"model": MODEL, "temperature": 0.5, "top_p": 0.9, "seed": 7, "top_k": 4, "stop": ["zzz"]}
    said = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "the fox"}]
    async with gate.http() as http:
        chat = await http.post("/v1/chat/completions", json=both | {"messages": said, "max_tokens": 30})
        response = await http.post(PATH, json=both | {"input": said, "max_output_tokens": 30})
    assert (chat.status_code, response.status_code) == (200, 200)
    first, second = gate.worker.submits
    assert first.prompt_token_ids == second.prompt_token_ids
    assert first.sampling == second.sampling


async def test_an_answer_is_taken_back_as_input(gate: Gate) -> None:
    async with gate.client() as client:
        first = await client.responses.create(model=MODEL, input="fox")
        turns: Any = [
            {"role": "user", "content": [{"type": "input_text", "text": "fox"}]},
            *first.output,
            {"type": "message", "role": "user", "content": "more"},
        ]
        second = await client.responses.create(model=MODEL, input=turns)
    assert second.output_text == ANSWER
    assert prompt_of(gate) == f"{tiny_model.BOS}[user]fox\n[assistant]{ANSWER}\n[user]more\n[assistant]"


async def test_an_answer_that_is_cut_is_incomplete(gate: Gate) -> None:
    body = {"model": MODEL, "input": "fox", "max_output_tokens": 3}
    async with gate.http() as http:
        answer = (await http.post(PATH, json=body)).json()
    ResponseAnswer.model_validate(answer, strict=True)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    (message,) = answer["output"]
    assert message["status"] == "incomplete"
    assert message["content"][0]["text"] == gate.tokenizer.vocabulary.text_of(gate.ids(ANSWER)[:3])
    assert answer["usage"]["output_tokens"] == 3


async def test_log_probabilities_come_if_they_are_asked_for(gate: Gate) -> None:
    asked: list[dict[str, Any]] = [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}]
    async with gate.http() as http:
        for fields, num_top in zip(asked, (2, 0), strict=True):
            answer = (await http.post(PATH, json={"model": MODEL, "input": "fox"} | fields)).json()
            ResponseAnswer.model_validate(answer, strict=True)
            scored = answer["output"][0]["content"][0]["logprobs"]
            assert b"".join(bytes(one["bytes"]) for one in scored).decode() == ANSWER
            assert {len(one["top_logprobs"]) for one in scored} == {num_top}
            last = (await streamed(gate, **fields))[-1]["response"]
            assert last["output"][0]["content"][0]["logprobs"] == scored
        plain = (await http.post(PATH, json={"model": MODEL, "input": "fox"})).json()
    assert plain["output"][0]["content"][0]["logprobs"] == []


async def test_the_precision_of_every_token_is_reported_if_asked_for(gate: Gate) -> None:
    body = {"model": MODEL, "input": "fox", "return_precision": True}
    async with gate.http() as http:
        whole = (await http.post(PATH, json=body)).json()
    last = (await streamed(gate, return_precision=True))[-1]["response"]
    for answer in (whole, last):
        ResponseAnswer.model_validate(answer, strict=True)
        assert answer["system_fingerprint"] == "fp-full-tp1"
        assert [(one["start"], one["end"]) for one in answer["precision"]] == [(0, len(gate.ids(ANSWER)) + 1)]


# --------------------------------------------------------------------------- streams


async def test_a_stream_has_openais_events_in_order(gate: Gate) -> None:
    events = await streamed(gate)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == OPENING and kinds[-4:] == [*CLOSING, "response.completed"]
    deltas = events[4:-4]
    assert {event["type"] for event in deltas} == {"response.output_text.delta"} and len(deltas) > 3
    assert "".join(event["delta"] for event in deltas) == ANSWER == events[-4]["text"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["usage"] is None
    ended = events[-1]["response"]
    assert ended["output"] == [events[-2]["item"]] and ended["output"][0]["content"] == [events[-3]["part"]]
    assert {event["response"]["id"] for event in (*events[:2], events[-1])} == {ended["id"]}
    assert {event["item_id"] for event in deltas} == {ended["output"][0]["id"]}
    async with gate.http() as http:
        whole = (await http.post(PATH, json={"model": MODEL, "input": "fox"})).json()
    changing = {"id": "", "created_at": 0, "output": []}
    assert ended | changing == whole | changing
    assert whole["output"][0]["content"] == ended["output"][0]["content"]


async def test_a_stream_that_is_cut_ends_with_incomplete(gate: Gate) -> None:
    events = await streamed(gate, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


async def test_a_stop_string_ends_a_stream_as_completed(gate: Gate) -> None:
    events = await streamed(gate, stop="over")
    assert events[-1]["type"] == "response.completed"
    assert events[-4]["text"] == ANSWER[: ANSWER.find("over")]


async def test_the_openai_client_reads_both_kinds_of_stream(gate: Gate) -> None:
    async with gate.client() as client:
        stream = await client.responses.create(model=MODEL, input="fox", stream=True)
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == ANSWER
        async with client.responses.stream(model=MODEL, input="fox") as events:
            snapshots = [one.snapshot async for one in events if one.type == "response.output_text.delta"]
            final = await events.get_final_response()
    assert snapshots[-1] == ANSWER == final.output_text
    assert final.usage.output_tokens == len(gate.ids(ANSWER)) + 1


async def test_a_failure_in_the_middle_is_an_error_and_a_failed_response(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, replay=False) as gate:
        gate.worker.stop_at = 2
        async with gate.client() as client:
            stream = await client.responses.create(model=MODEL, input="fox", stream=True)
            events = []
            async for event in stream:
                events.append(event)
                if sum(one.type == "response.output_text.delta" for one in events) == 2:
                    await gate.worker.die()
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == "worker_lost"
    failed = events[-1].response
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.error.message == events[-2].message
    text = gate.tokenizer.vocabulary.text_of(gate.ids(ANSWER)[:2])
    assert (failed.output[0].status, failed.output_text) == ("incomplete", text)


# --------------------------------------------------------------------------- refusals


def keeping(schema: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"input": ""}, "input", "empty"),
    ({"input": []}, "input", "empty"),
    ({"input": 5}, "input", "input is 5"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'user'"),
    ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
    (
        {"input": [{"type": "web_search_call", "id": "1"}]},
        "input[0]",
        "its type is 'web_search_call'; 'message', 'function_call' and 'function_call_output' are supported",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_text'",
    ),
    ({"input": [{"role": "assistant", "content": "x"}]}, "input", "the user begins"),
    ({"input": "fox " * 700}, "input", "512"),
    ({"store": True}, "store", "no answer is stored; leave it out or send false"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
    ({"background": True}, "background", "leave it out or send false"),
    ({"truncation": "auto"}, "truncation", "'disabled'"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "'json_object'"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format", "need each other"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format", "need each other"),
    ({"text": keeping({"type": "integer", "minimum": 3, "maximum": 2})}, "text.format.schema", "minimum"),
    ({"response_format": {"type": "json_object"}}, "response_format", "here it is text.format"),
    ({"tools": [{"type": "function", "name": "f"}]}, "tools", "does not tell the model of tools"),
    ({"reasoning": {"effort": "high"}}, "reasoning", "not supported"),
    ({"include": ["everything"]}, "include[0]", "message.output_text.logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens", "1"),
    ({"max_output_tokens": 600}, "input", "600"),  # beside it the context is too short
    ({"top_logprobs": 21}, "top_logprobs", "20"),
    ({"temperature": 2.5}, "temperature", "allowed is 0 to 2"),
    ({"stream_options": {"include_usage": True}}, "stream_options.include_usage", "not supported"),
    ({"max_tokens": 5}, "max_tokens", "here it is max_output_tokens"),
    ({"messages": []}, "messages", "/v1/chat/completions"),
    ({"n": 2}, "n", "unknown parameter 'n'"),
    ({"zzz": 1}, "zzz", "unknown parameter 'zzz'"),
]


async def test_bad_fields_are_refused_by_the_name_that_they_have_here(gate: Gate) -> None:
    async with gate.http() as http:
        for change, param, text in BAD:
            answer = await http.post(PATH, json={"model": MODEL, "input": "fox"} | change)
            assert answer.status_code == 400, (change, answer.text)
            error = ErrorAnswer.model_validate(answer.json()).error
            assert error.param == param, (change, error)
            assert text in error.message, error
        missing = await http.post(PATH, json={"model": MODEL})
        assert missing.json()["error"]["param"] == "input"
    assert gate.worker.submits == []


async def test_the_form_of_the_text_is_that_of_a_chat_and_is_repeated(gate: Gate) -> None:
    schema = {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"]}
    for text, sent in ((keeping(schema), schema), ({"format": {"type": "json_object"}}, {"type": "object"})):
        async with gate.http() as http:
            answer = await http.post(PATH, json={"model": MODEL, "input": "fox", "text": text})
        assert answer.status_code == 200, answer.text
        grammar = gate.worker.submits[-1].sampling.grammar
        assert grammar and grammar.kind == "json_schema" and json.loads(grammar.text) == sent
        ResponseAnswer.model_validate(answer.json(), strict=True)
        assert text["format"].items() <= answer.json()["text"]["format"].items()
    assert grammar and not grammar.is_lenient


async def test_values_that_say_the_default_are_taken(gate: Gate) -> None:
    body = {
        "model": MODEL,
        "input": "fox",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "instructions": None,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "a",
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": "b",
        "service_tier": "auto",
        "store": False,
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "c",
    }
    async with gate.http() as http:
        answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    ResponseAnswer.model_validate(answer.json(), strict=True)

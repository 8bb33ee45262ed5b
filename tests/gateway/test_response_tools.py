"""Tools at /v1/responses: the same request as a chat's, and calls as items of the output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bus.settings import RedisSettings
from gateway.openai.answer_types import ErrorAnswer, ResponseAnswer, ResponseEvent
from tests.gateway.test_tools import ADD as CHAT_ADD
from tests.gateway.test_tools import CALL, LIST, told
from tests.gateway.test_tools import NOW as CHAT_NOW
from tests.support import tool_models
from tests.support.gateway_harness import Gate, running

pytest_plugins = ["tests.support.gateway_fixtures"]
pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD, NOW = ({"type": "function"} | one["function"] for one in (CHAT_ADD, CHAT_NOW))
PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "demo", "input": "fox"}
SAID = "I add.\n" + CALL + CALL.replace("1", "23")


@pytest.fixture(scope="module")
def folder(tools_folder: Path) -> Path:
    """The folder of the model that `gate` serves."""
    return tools_folder


@pytest.fixture
def gate(shared_gate: Gate) -> Gate:
    return shared_gate.as_new()


async def whole(gate: Gate, **body: Any) -> dict[str, Any]:
    """Return an answer, which has the described type."""
    async with gate.http() as http:
        answer = await http.post(PATH, json=ASKED | body)
    assert answer.status_code == 200, answer.text
    ResponseAnswer.model_validate_json(answer.text, strict=True)
    found: dict[str, Any] = answer.json()
    return found


async def streamed(gate: Gate, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, numbered and of the described type."""
    async with gate.http() as http:
        answer = await http.post(PATH, json=ASKED | body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    for line in lines:
        ResponseEvent.model_validate_json(line, strict=True)
    events = [json.loads(line) for line in lines]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item | {"id": "", "call_id": ""} for item in output]


async def test_it_is_the_same_request_as_that_of_a_chat(gate: Gate) -> None:
    both = {"model": "demo", "seed": 7, "parallel_tool_calls": False}
    named = {"type": "function", "function": {"name": "now"}}
    chat = both | {"messages": [{"role": "user", "content": "fox"}], "tools": [CHAT_ADD, CHAT_NOW]}
    response = both | {"input": "fox", "tools": [ADD, NOW]}
    async with gate.http() as http:
        await http.post("/v1/chat/completions", json=chat | {"tool_choice": named, "max_tokens": 30})
        choice = {"type": "function", "name": "now"}
        await http.post(PATH, json=response | {"tool_choice": choice, "max_output_tokens": 30})
    first, second = gate.worker.submits
    assert first.prompt_token_ids == second.prompt_token_ids and first.sampling == second.sampling
    assert first.sampling.grammar is not None


async def test_calls_are_items_after_the_message(gate: Gate) -> None:
    gate.worker.reply = gate.says(SAID)
    answer = await whole(gate, tools=[ADD, NOW])
    message, first, second = answer["output"]
    assert message["content"][0]["text"] == "I add." and answer["status"] == "completed"
    assert [one["arguments"] for one in (first, second)] == ['{"a": 1}', '{"a": 23}']
    assert {one["name"] for one in (first, second)} == {"add"}
    assert first["call_id"].startswith("call_") and first["id"].startswith("fc_")
    assert len({one[key] for one in (first, second) for key in ("id", "call_id")}) == 4
    assert answer["tools"] == [
        {"description": None, "parameters": None, "strict": None} | one for one in (ADD, NOW)
    ]
    gate.worker.reply = gate.says(CALL)
    (only,) = (await whole(gate, tools=[ADD], tool_choice="auto"))["output"]
    assert only["type"] == "function_call"


async def test_a_forced_call_has_no_message(gate: Gate) -> None:
    gate.worker.reply = gate.says(LIST)
    answer = await whole(gate, tools=[ADD, NOW], tool_choice="required")
    assert [(one["name"], one["arguments"]) for one in answer["output"]] == [
        ("add", '{"a": 1}'),
        ("now", "{}"),
    ]
    assert answer["tool_choice"] == "required"


async def test_a_stream_ends_each_item_before_the_next_begins(gate: Gate) -> None:
    gate.worker.reply = gate.says(SAID)
    events = await streamed(gate, tools=[ADD])
    of_items = [event for event in events if event["type"].startswith("response.output_item")]
    assert [(event["output_index"], event["type"].rpartition(".")[2]) for event in of_items] == [
        (index, kind) for index in range(3) for kind in ("added", "done")
    ]
    for index, arguments in ((1, '{"a": 1}'), (2, '{"a": 23}')):
        own = [event for event in events if event.get("output_index") == index]
        pieces = [one["delta"] for one in own if one["type"] == "response.function_call_arguments.delta"]
        assert "".join(pieces) == arguments and len(pieces) > 2
        (done,) = [one for one in own if one["type"] == "response.function_call_arguments.done"]
        assert (done["name"], done["arguments"]) == ("add", arguments)
        assert own[0]["item"]["arguments"] == "" and own[0]["item"]["status"] == "in_progress"
    last = events[-1]
    assert last["type"] == "response.completed"
    assert [event["item"] for event in of_items[1::2]] == last["response"]["output"]
    assert without_ids(last["response"]["output"]) == without_ids((await whole(gate, tools=[ADD]))["output"])


async def test_text_after_a_call_is_another_message(gate: Gate) -> None:
    gate.worker.reply = gate.says("one " + CALL + " two")
    for answer in (await whole(gate, tools=[ADD]), (await streamed(gate, tools=[ADD]))[-1]["response"]):
        kinds = [item["type"] for item in answer["output"]]
        assert kinds == ["message", "function_call", "message"]
        assert len({item["id"] for item in answer["output"]}) == 3


async def test_log_probabilities_are_those_of_the_message(gate: Gate) -> None:
    gate.worker.reply = gate.says(SAID)
    asked = {"tools": [ADD], "top_logprobs": 1}
    answer = await whole(gate, **asked)
    scored = answer["output"][0]["content"][0]["logprobs"]
    assert b"".join(bytes(one["bytes"]) for one in scored).decode().startswith("I add.")
    last = (await streamed(gate, **asked))[-1]["response"]
    assert last["output"][0]["content"][0]["logprobs"] == scored


async def test_an_answer_that_is_cut_has_what_was_written_of_its_call(gate: Gate) -> None:
    gate.worker.reply = gate.says(CALL)
    cut = {"tools": [ADD], "max_output_tokens": len(gate.ids(CALL[: CALL.index("1")]))}
    for answer in (await whole(gate, **cut), (await streamed(gate, **cut))[-1]["response"]):
        assert answer["status"] == "incomplete"
        (call,) = answer["output"]
        assert call["status"] == "incomplete" and call["arguments"].startswith('{"a":')


async def test_an_answer_without_text_has_an_empty_message(gate: Gate) -> None:
    gate.worker.reply = gate.says("")
    for answer in (await whole(gate, tools=[ADD]), (await streamed(gate, tools=[ADD]))[-1]["response"]):
        (message,) = answer["output"]
        assert message["content"][0]["text"] == ""


async def test_a_failure_in_the_middle_of_a_call_has_it_so_far(
    redis_settings: RedisSettings, folder: Path
) -> None:
    async with running(redis_settings, folder, replay=False) as gate:
        gate.worker.reply = gate.says(SAID)
        ids, text_of = gate.ids(SAID), gate.tokenizer.vocabulary.spelled.text_of
        gate.worker.stop_at = next(k for k in range(len(ids)) if '{"a"' in text_of(ids[:k]))
        async with gate.client() as client:
            stream = await client.responses.create(model="demo", input="fox", tools=[ADD], stream=True)
            events, arguments, is_dead = [], "", False
            async for event in stream:
                events.append(event)
                arguments += event.delta if event.type == "response.function_call_arguments.delta" else ""
                if arguments.startswith('{"a"') and not is_dead:
                    is_dead = True
                    await gate.worker.die()
    failed = events[-1].response
    assert failed.status == "failed"
    message, call = failed.output
    assert (message.status, call.status, call.arguments) == ("completed", "incomplete", arguments)


async def test_calls_and_their_results_go_to_the_template(gate: Gate) -> None:
    gate.worker.reply = gate.says(SAID)
    async with gate.client() as client:
        first = await client.responses.create(**ASKED, tools=[ADD])
        calls = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "1"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "23"}],
            },
        ]
        said: Any = [{"role": "user", "content": "fox"}, *first.output, *results, *calls[:1], results[0]]
        await client.responses.create(**ASKED | {"input": said}, tools=[ADD], tool_choice="none")
    one = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    assert told(gate).endswith(
        f"[user]fox\n[assistant]I add.{one}{one.replace('1', '23')}\n"
        f"[tool{calls[0].call_id}]1\n[tool{calls[1].call_id}]23\n"
        f"[assistant]{one}\n[tool{calls[0].call_id}]1\n[assistant]"
    )


async def test_thoughts_are_part_of_the_text(redis_settings: RedisSettings, tmp_path: Path) -> None:
    folder = tool_models.write(tmp_path / "m", tool_models.THINKING)
    async with running(redis_settings, folder) as gate:
        gate.worker.reply = gate.says("so\n</think>\n\nYes." + CALL)
        message, call = (await whole(gate, tools=[ADD]))["output"]
        text = message["content"][0]["text"]
        assert text.startswith("so") and text.endswith("Yes.") and call["name"] == "add"


CALLED = {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"}
USER = {"role": "user", "content": "fox"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "add"}, "tools", "must be an array"),
    ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"tools": [CHAT_ADD]}, "tools[0].name", "missing"),
    ({"tools": [ADD, NOW, ADD]}, "tools", "two tools have the name 'add'"),
    ({"tools": [ADD | {"parameters": {"type": "string"}}]}, "tools[0].parameters", "object"),
    (
        {
            "tools": [
                ADD | {"parameters": {"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}}
            ],
            "tool_choice": "required",
        },
        "tools[0].parameters",
        "can be forced",
    ),
    ({"tool_choice": "required"}, "tool_choice", "send tools"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "rm"}},
        "tool_choice.name",
        "the tools are add",
    ),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, "tool_choice.type", "'function'"),
    ({"tools": [ADD], "text": {"format": {"type": "json_object"}}}, "tools", "leave out the form"),
    ({"input": [USER, CALLED | {"arguments": "1"}]}, "input[1].arguments", "JSON object"),
    ({"input": [USER, CALLED | {"call_id": ""}]}, "input[1].call_id", "empty string"),
    (
        {"input": [USER, CALLED, {"type": "function_call_output", "output": "1"}]},
        "input[2].call_id",
        "missing",
    ),
    (
        {
            "input": [
                USER,
                CALLED,
                {"type": "function_call_output", "call_id": "1", "output": [{"type": "x"}]},
            ]
        },
        "input[2].output[0].type",
        "'input_text'",
    ),
]


async def test_bad_fields_are_refused_by_their_paths(gate: Gate) -> None:
    async with gate.http() as http:
        for change, param, text in REFUSED:
            answer = await http.post(PATH, json=ASKED | change)
            assert answer.status_code == 400, (change, answer.text)
            error = ErrorAnswer.model_validate(answer.json()).error
            assert error.param == param and text in error.message, (change, error)
    assert gate.worker.submits == []

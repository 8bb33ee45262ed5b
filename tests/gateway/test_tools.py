"""Tools and thoughts at the API: what the model is told, what reaches a worker, and what clients get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from bus.grammars import problem
from bus.settings import RedisSettings
from gateway.openai.answer_types import ChatAnswer, ChatChunk
from gateway.openai.tools.declarations import FunctionTool
from gateway.openai.tools.forced import calls_grammar
from gateway.openai.tools.formats import TOOL_FORMATS
from tests.support import tiny_model, tool_models
from tests.support.gateway_harness import Gate, running

pytest_plugins = ["tests.support.gateway_fixtures"]


def tool(name: str, **schema: Any) -> dict[str, Any]:
    fields = {"name": name} | ({"parameters": {"type": "object"} | schema} if schema else {})
    return {"type": "function", "function": fields}


ADD = tool("add", properties={"a": {"type": "integer"}}, required=["a"], additionalProperties=False)
NOW = tool("now")
USER = [{"role": "user", "content": "fox"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": USER}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LIST = '[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]'


@pytest.fixture(scope="module")
def folder(tools_folder: Path) -> Path:
    """The folder of the model that `gate` serves."""
    return tools_folder


async def whole(gate: Gate, **body: Any) -> dict[str, Any]:
    """Return the first choice of an answer that has the described type."""
    async with gate.http() as http:
        answer = await http.post("/v1/chat/completions", json=CHAT | body)
    assert answer.status_code == 200, answer.text
    holds(ChatAnswer, answer.json())
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def streamed(gate: Gate, **body: Any) -> list[dict[str, Any]]:
    """Return the first choices of a stream's events, each of the described type."""
    async with gate.http() as http:
        answer = await http.post("/v1/chat/completions", json=CHAT | body | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    for event in events:
        holds(ChatChunk, event)
    return [event["choices"][0] for event in events]


def holds(kind: type[BaseModel], value: Any) -> None:
    kind.model_validate_json(json.dumps(value), strict=True)


def told(gate: Gate) -> str:
    """Return the prompt that the model got."""
    ids = gate.worker.submits[-1].prompt_token_ids
    return str(gate.tokenizer._rust.decode(ids, skip_special_tokens=False))


async def test_a_call_reaches_the_client_whole(gate: Gate) -> None:
    gate.worker.reply = gate.says("I add.\n" + CALL)
    choice = await whole(gate, tools=[ADD, NOW])
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert told(gate).startswith('[{"type": "function", "function": {"name": "add", "description": "", ')
    assert '"additionalProperties": false' in told(gate)
    gate.worker.reply = gate.says(CALL)
    assert (await whole(gate, tools=[ADD]))["message"]["content"] is None


async def test_a_call_streams_with_its_name_first_and_its_arguments_as_they_come(gate: Gate) -> None:
    gate.worker.reply = gate.says("I add.\n" + CALL + CALL.replace("1", "23"))
    choices = await streamed(gate, tools=[ADD], logprobs=True)
    deltas = [one for choice in choices for one in choice["delta"].get("tool_calls", ())]
    begun = [one for one in deltas if "id" in one]
    assert [(one["index"], one["function"]) for one in begun] == [
        (0, {"name": "add", "arguments": ""}),
        (1, {"name": "add", "arguments": ""}),
    ]
    assert len({one["id"] for one in begun}) == 2 and {one["type"] for one in begun} == {"function"}
    for index, arguments in enumerate(('{"a": 1}', '{"a": 23}')):
        pieces = [one["function"]["arguments"] for one in deltas if one["index"] == index and "id" not in one]
        assert "".join(pieces) == arguments and len(pieces) > 2
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "I add."
    assert [one["finish_reason"] for one in choices if one["finish_reason"]] == ["tool_calls"]
    scored = [token for one in choices if one["logprobs"] for token in one["logprobs"]["content"]]
    assert len(scored) == len(gate.ids("I add.\n" + CALL + CALL.replace("1", "23")))


async def test_the_client_library_puts_a_streamed_call_together(gate: Gate) -> None:
    gate.worker.reply = gate.says(CALL)
    strict = ADD | {"function": ADD["function"] | {"strict": True}}  # it parses no others
    async with gate.client() as client, client.chat.completions.stream(**CHAT, tools=[strict]) as stream:
        answer = await stream.get_final_completion()
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1} and answer.choices[0].finish_reason == "tool_calls"


async def test_what_is_no_call_of_a_tool_is_content(gate: Gate) -> None:
    for text in ("a <tool", '<tool_call>{"name": "rm"}</tool_call>', "<tool_call> no"):
        gate.worker.reply = gate.says(text)
        choice = await whole(gate, tools=[ADD])
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
    gate.worker.reply = gate.says(CALL)
    assert (await whole(gate))["message"]["content"] == '\n{"name": "add", "arguments": {"a": 1}}\n'
    for choice in (await whole(gate, tools=[ADD], tool_choice="none"), await whole(gate, tools=[])):
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"
        assert "tools" not in told(gate) and '"function"' not in told(gate)
        assert gate.worker.submits[-1].sampling.grammar is None


async def test_an_answer_that_is_cut_has_what_was_written_of_its_call(gate: Gate) -> None:
    gate.worker.reply = gate.says(CALL)
    choice = await whole(gate, tools=[ADD], max_tokens=len(gate.ids(CALL[: CALL.index("1")])))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a":')
    stopped = await whole(gate, tools=[ADD], stop=": 1")
    assert stopped["finish_reason"] == "stop"
    assert stopped["message"]["tool_calls"][0]["function"]["arguments"] == '{"a"'


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_without_parallel_calls_an_answer_ends_after_the_first(gate: Gate, choice: str) -> None:
    gate.worker.reply = gate.says(CALL * 3 if choice == "auto" else LIST)
    asked = {"tools": [ADD, NOW], "tool_choice": choice, "parallel_tool_calls": False}
    answer = await whole(gate, **asked)
    assert len(answer["message"]["tool_calls"]) == 1 and answer["finish_reason"] == "tool_calls"
    await gate.settled()


async def test_a_forced_call_is_held_to_the_schemas_and_read_from_a_list(gate: Gate) -> None:
    gate.worker.reply = gate.says(LIST)
    choice = await whole(gate, tools=[ADD, NOW], tool_choice="required")
    called = [call["function"] for call in choice["message"]["tool_calls"]]
    assert called == [{"name": "add", "arguments": '{"a": 1}'}, {"name": "now", "arguments": "{}"}]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    grammar = gate.worker.submits[-1].sampling.grammar
    assert grammar is not None and grammar.end_token_ids == gate.tokenizer.stop_token_ids
    jsonschema.validate(json.loads(LIST), json.loads(grammar.text))
    named = {"type": "function", "function": {"name": "now"}}
    await whole(gate, tools=[ADD, NOW], tool_choice=named)
    grammar = gate.worker.submits[-1].sampling.grammar
    assert grammar is not None
    only = json.loads(grammar.text)
    jsonschema.validate([{"name": "now", "arguments": {}}], only)
    for wrong in (json.loads(LIST), [{"name": "add", "arguments": {"a": 1}}], []):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, only)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_schema_of_forced_calls_is_that_of_the_tools(name: Any) -> None:
    tree = {
        "properties": {
            "value": {"$ref": "#/$defs/value"},
            "inner": {"$ref": "#"},
            "$ref": {"$ref": "#/$defs/default"},
        },
        "required": ["value"],
        "additionalProperties": False,
        "$defs": {"value": {"const": {"$ref": "#/nowhere"}}, "default": {"type": "null"}},
    }
    form = TOOL_FORMATS[name]
    tools = [FunctionTool.model_validate(one) for one in (ADD, tool("tree", **tree), NOW)]
    grammar = calls_grammar(tools, form, is_single=False)
    assert grammar.is_lenient
    schema = json.loads(grammar.text)

    def call(name: str, arguments: Any) -> dict[str, Any]:
        return {"name": name, form.arguments: arguments}

    value = {"$ref": "#/nowhere"}
    good = [call("tree", {"value": value, "inner": {"value": value, "$ref": None}}), call("add", {"a": 2})]
    jsonschema.validate(good, schema)
    for bad in (
        [],
        [call("tree", {"value": value, "inner": {}})],
        [call("add", {"a": "2"})],
        [call("rm", {})],
        [call("now", {"a": 1})],
        [{"name": "now"}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def test_the_library_compiles_forced_calls() -> None:
    tree = {
        "properties": {"inner": {"$ref": "#"}, "n": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "null"}},
    }
    for is_single in (False, True):
        tools = [FunctionTool.model_validate(one) for one in (ADD, tool("tree", **tree), NOW)]
        assert problem(calls_grammar(tools, TOOL_FORMATS["llama3"], is_single=is_single)) is None


async def test_earlier_calls_and_their_results_go_to_the_template(gate: Gate) -> None:
    call = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a": null}'}}
    turns: list[dict[str, Any]] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "call_7", "content": [{"type": "text", "text": "it is 1"}]},
        {"role": "assistant", "tool_calls": [call | {"index": 0}]},
        {"role": "tool", "tool_call_id": "call_7", "content": "2", "name": "add"},
    ]
    turns[3]["tool_calls"][0]["function"] = {"name": "now", "arguments": ""}
    await whole(gate, messages=turns, max_tokens=4)
    assert told(gate).endswith(
        '[assistant](so)<tool_call>{"name": "add", "arguments": {"a": null}}</tool_call>\n'
        "[toolcall_7]it is 1\n"
        '[assistant]<tool_call>{"name": "now", "arguments": {}}</tool_call>\n'
        "[toolcall_7]2\n[assistant]"
    )


async def test_thoughts_have_a_field_of_their_own(redis_settings: RedisSettings, tmp_path: Path) -> None:
    folder = tool_models.write(tmp_path / "m", tool_models.THINKING)
    async with running(redis_settings, folder) as gate:
        gate.worker.reply = gate.says("hm,\nso\n</think>\n\nYes." + CALL)
        message = (await whole(gate, tools=[ADD]))["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm,\nso", "Yes.")
        assert message["tool_calls"][0]["function"]["name"] == "add"
        deltas = [choice["delta"] for choice in await streamed(gate)]
        assert "".join(one.get("reasoning_content", "") for one in deltas) == "hm,\nso"
        content = "".join(one.get("content", "") for one in deltas)
        assert content.startswith("Yes.") and "<tool_call>" not in content  # no tools, so no markers
        gate.worker.reply = gate.says('{"a": 1}')
        held = await whole(gate, response_format={"type": "json_object"})
        assert held["message"]["content"] == '{"a": 1}' and "reasoning_content" not in held["message"]
        gate.worker.reply = gate.says("hm")
        assert (await whole(gate, max_tokens=1))["message"]["content"] == ""


async def test_an_answer_may_begin_with_a_thought_by_itself(gate: Gate) -> None:
    gate.worker.reply = gate.says("<think>hm</think> Yes.")
    message = (await whole(gate))["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes.")


async def test_a_setting_names_the_format_and_a_template_may_be_for_tools_alone(
    redis_settings: RedisSettings, tmp_path: Path
) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}:"
    tiny_model.byte_level(tmp_path / "m", chat_template=plain)
    asked = CHAT | {"tools": [ADD]}
    async with running(redis_settings, tmp_path / "m") as gate, gate.http() as http:
        for choice in ("auto", "required"):
            refused = await http.post("/v1/chat/completions", json=asked | {"tool_choice": choice})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "tools_not_supported")
            assert error["param"] == "tools" and "does not tell" in error["message"]
    extra = tmp_path / "m" / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("{{ tools | tojson }}" + plain)
    async with running(redis_settings, tmp_path / "m") as gate, gate.http() as http:
        refused = await http.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 400 and "gateway.tool_formats" in refused.text
        gate.worker.reply = gate.says(LIST)
        forced = await whole(gate, tools=[ADD, NOW], tool_choice="required")
        assert len(forced["message"]["tool_calls"]) == 2 and told(gate).startswith("[{")
        await whole(gate, max_tokens=1)
        assert told(gate) == "fox:"
    async with running(redis_settings, tmp_path / "m", tool_formats=["other=none", "demo=mistral"]) as gate:
        gate.worker.reply = gate.says('[TOOL_CALLS]add[ARGS]{"a": 1}')
        (call,) = (await whole(gate, tools=[ADD]))["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert len(call["id"]) == 9 and call["id"].isalnum()  # older templates refuse others


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def called(**function: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"} | function}
    return {"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]}


PARAMETERS = "tools[0].function.parameters"
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": "add"}, "tools", "must be an array"),
    ({"tools": [1]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
    ({"tools": [tool("")]}, "tools[0].function.name", "empty string"),
    ({"tools": [tool("a b")]}, "tools[0].function.name", "must match"),
    ({"tools": [tool("a" * 65)]}, "tools[0].function.name", "at most 64"),
    ({"tools": [ADD, NOW, ADD]}, "tools", "two tools have the name 'add'"),
    ({"tools": [tool(f"f{i}") for i in range(129)]}, "tools", "at most 128"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": "x"}}]},
        PARAMETERS,
        "a JSON schema",
    ),
    ({"tools": [tool("a", type="string")]}, PARAMETERS, "its type must be 'object'"),
    (
        {"tools": [tool("a", properties={"b": {"type": "text"}})]},
        PARAMETERS,
        "properties.b has the type 'text'",
    ),
    ({"tools": [tool("a", properties=["b"])]}, PARAMETERS, "properties must be an object"),
    ({"tools": [tool("a", properties={"b": 1})]}, PARAMETERS, "properties.b must be a schema"),
    ({"tools": [tool("a", required="b")]}, PARAMETERS, "required must be an array of strings"),
    ({"tools": [tool("a", properties={"b": nested(64)})]}, PARAMETERS, "nested deeper than 64"),
    ({"tools": [tool("a", properties={"b": nested(200)})]}, PARAMETERS, "nested deeper than 64"),
    ({"tools": [ADD], "tool_choice": "any"}, "tool_choice", "'required'"),
    ({"tools": [ADD], "tool_choice": 5}, "tool_choice", "must be an object"),
    ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "now"}}},
        "tool_choice.function.name",
        "the tools are add",
    ),
    ({"tool_choice": "required"}, "tool_choice", "send tools"),
    (
        {"tools": [], "tool_choice": {"type": "function", "function": {"name": "a"}}},
        "tool_choice",
        "send tools",
    ),
    ({"tools": [ADD], "parallel_tool_calls": "no"}, "parallel_tool_calls", "true or false"),
    (
        {"tools": [NOW, tool("a", properties={"b": {"$ref": "#/$defs/c"}})], "tool_choice": "required"},
        "tools[1].function.parameters",
        "no call of 'a' can be forced",
    ),
    ({"tools": [ADD], "response_format": {"type": "json_object"}}, "tools", "held to a form"),
    ({"tools": [ADD], "guided_regex": "a"}, "tools", "held to a form"),
    (called(arguments="{"), ARGUMENTS, "must be a JSON object"),
    (called(arguments="[1]"), ARGUMENTS, "it is no object"),
    (called(arguments={"a": 1}), ARGUMENTS, "must be a string"),
    (called(arguments=json.dumps(nested(64))), ARGUMENTS, "nested deeper than 64"),
    (called(arguments='{"a": ' + "[" * 9000 + "]" * 9000 + "}"), ARGUMENTS, "more than 8192"),
    (called(name=""), "messages[1].tool_calls[0].function.name", "empty string"),
    (
        {"messages": [USER[0] | {"tool_calls": [called()["messages"][1]["tool_calls"][0]]}]},
        "messages[0]",
        "assistant",
    ),
    ({"messages": [USER[0] | {"tool_call_id": "1"}]}, "messages[0]", "only the role 'tool'"),
    ({"messages": [*USER, {"role": "tool", "content": "1"}]}, "messages[1]", "needs the tool_call_id"),
]


async def test_bad_tools_calls_and_choices_are_refused_by_name(gate: Gate) -> None:
    async with gate.http() as http:
        for asked, param, text in REFUSED:
            answer = await http.post("/v1/chat/completions", json=CHAT | asked)
            assert answer.status_code == 400, (asked, answer.text)
            error = answer.json()["error"]
            assert error["param"] == param and text in error["message"], (param, error)
            assert error["type"] == "invalid_request_error" and error["code"]
            assert len(error["message"]) < 700
        other = await http.post("/v1/completions", json={"model": "demo", "prompt": "a", "tools": [ADD]})
        assert "/v1/chat/completions" in other.json()["error"]["message"]
    assert not gate.worker.submits


async def test_a_template_that_refuses_calls_says_why(redis_settings: RedisSettings, tmp_path: Path) -> None:
    strict = tool_models.TEMPLATE.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if m.tool_calls | length > 1 %}{{ raise_exception('one at once') }}{% endif %}",
    )
    tiny_model.byte_level(tmp_path / "m", chat_template=strict)
    call = called()["messages"][1]["tool_calls"][0]
    turns = [*USER, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    async with running(redis_settings, tmp_path / "m") as gate, gate.http() as http:
        refused = await http.post("/v1/chat/completions", json=CHAT | {"messages": turns})
    assert refused.status_code == 400 and "one at once" in refused.json()["error"]["message"]

"""Forced calls of tools in the real service: each keeps its tool's schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from bench.common.service import Service
from tests.service.test_worker_process import DEMO

pytestmark = [
    pytest.mark.faults,
    pytest.mark.slow,
    pytest.mark.skipif(not (DEMO / "config.json").is_file(), reason="models/demo is not built"),
    pytest.mark.timeout(300),  # kernels may be compiled first
]

SCHEMAS: dict[str, dict[str, Any]] = {
    "set_light": {
        "type": "object",
        "properties": {
            "room": {"enum": ["kitchen", "hall"]},
            "level": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["room", "level"],
        "additionalProperties": False,
    },
    "find": {
        "type": "object",
        "properties": {"where": {"$ref": "#/$defs/place"}},
        "required": ["where"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "string", "pattern": "^[a-z]{1,8}$"}},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()
]
ASKED: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Make it bright."}],
    "tools": TOOLS,
    "max_tokens": 300,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model with a template that tells it of tools."""
    folder = tmp_path_factory.mktemp("models") / "tools"
    folder.mkdir()
    for path in DEMO.iterdir():
        (folder / path.name).symlink_to(path)
    template = json.loads((DEMO / "tokenizer_config.json").read_text())["chat_template"]
    (folder / "chat_template.jinja").write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + template)
    with Service(model=folder, settings={"WORKER__DTYPE": "float32"}) as running:
        yield running


def test_every_forced_call_keeps_the_schema_of_its_tool(service: Service) -> None:
    num_calls = 0
    for seed in range(24):
        asked = {"tool_choice": "required", "parallel_tool_calls": seed % 2 == 0, "seed": seed}
        answer = httpx.post(f"{service.url(0)}/v1/chat/completions", json=ASKED | asked, timeout=60)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        calls = choice["message"].get("tool_calls", [])
        if choice["finish_reason"] == "length":
            calls = calls[:-1]
        else:
            assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert len(calls) <= 1 or asked["parallel_tool_calls"]
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
            num_calls += 1
    assert num_calls >= 16


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_tool_chosen_by_name_is_called_once_in_a_stream(service: Service, name: str) -> None:
    with openai.OpenAI(base_url=f"{service.url(0)}/v1", api_key="none") as client:
        asked: Any = ASKED | {"tool_choice": {"type": "function", "function": {"name": name}}, "seed": 5}
        begun, arguments, ends = list[str](), "", list[str]()
        for chunk in client.chat.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    begun += [call.function.name] if call.function.name else []
                    arguments += call.function.arguments or ""
                ends += [choice.finish_reason] if choice.finish_reason else []
    assert begun == [name] and ends == ["tool_calls"]
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])

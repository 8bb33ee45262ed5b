"""/openapi.json and the page that shows it: whole, exact, and true of real answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from bus.settings import RedisSettings
from gateway.app import CALLS, ROUTERS, describe
from gateway.openai.answer_types import (
    ChatAnswer,
    ChatChunk,
    CompletionAnswer,
    CompletionChunk,
    DetokenizeAnswer,
    EmbeddingsAnswer,
    ErrorAnswer,
    HealthAnswer,
    ReadyAnswer,
    ResponseAnswer,
    ResponseEvent,
    ServedModels,
    TokenizeAnswer,
    VersionAnswer,
)
from gateway.openai.fields import Between, Body
from gateway.openai.params import SamplingBody
from gateway.openai.unsupported import HARMLESS
from gateway.operations import schema
from gateway.operations.inputs import BodyOf, OrderOf, QueryOf
from tests.support.gateway_harness import BODY, Gate, running

pytest_plugins = ["tests.support.gateway_fixtures"]

ROUTES = [one for router in ROUTERS for one in router.routes if isinstance(one, APIRoute)]
KEY = {"authorization": "Bearer sk-api-key-of-test"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    gateway: Any = SimpleNamespace(keys=["one"], admin_keys=[])
    made: dict[str, Any] = json.loads(json.dumps(describe(gateway)))
    return made


def kinds() -> dict[str, type[Body]]:
    """The types that parse the bodies, by operation."""
    found: dict[str, type[Body]] = {f"post {path}": body for path, (body, *_) in CALLS.items()}
    for route in ROUTES:
        for one in schema._calls_of(route.dependant):
            if isinstance(one, BodyOf | OrderOf):
                method = "".join(route.methods or ())
                found[f"{method.lower()} {route.path_format}"] = one.kind
    return found


def test_every_route_is_described(document: dict[str, Any]) -> None:
    described = {(m.upper(), path) for path, methods in document["paths"].items() for m in methods}
    assert described == {(m, one.path_format) for one in ROUTES for m in one.methods or ()} | {
        ("POST", path) for path in CALLS
    }
    operations = [one for methods in document["paths"].values() for one in methods.values()]
    ids = [one["operationId"] for one in operations]
    assert len(set(ids)) == len(ids)
    for one in operations:
        assert one["summary"] and {"400", "431", "503"} <= one["responses"].keys(), one["operationId"]


def test_no_handler_parses_a_body_that_is_not_described() -> None:
    """A handler that calls `body_of` itself takes a body past the schema."""
    folder = Path(schema.__file__).parent
    callers = {one.name for one in folder.glob("*.py") if "body_of(request" in one.read_text()}
    assert callers == {"answers.py", "inputs.py"}
    orders = {f"{m.lower()} {one.path_format}" for one in ROUTES for m in one.methods or ()}
    orders = {one for one in orders if one.startswith(("post", "put")) and not one.endswith("/drain")}
    assert kinds().keys() == orders | {f"post {path}" for path in CALLS}


@pytest.mark.parametrize("operation", sorted(kinds()))
def test_every_field_that_is_parsed_is_described(document: dict[str, Any], operation: str) -> None:
    kind = kinds()[operation]
    method, path = operation.split()
    ref = document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    described = document["components"]["schemas"][ref.split("/")[-1]]
    harmless = set(HARMLESS) if issubclass(kind, SamplingBody) else set()
    assert described["properties"].keys() == kind.model_fields.keys() | harmless
    assert described["additionalProperties"] == {"type": "null"}
    for name, field in kind.model_fields.items():
        one = described["properties"][name]
        assert one.get("description"), f"{operation}: {name} has no description"
        assert (name in described.get("required", [])) == field.is_required()
        text = json.dumps(one)
        for limit in limits_of(field.annotation, field.metadata):
            least = "exclusiveMinimum" if limit.above else "minimum"
            shown = f'"{least}": {json.dumps(limit.low)}', f'"maximum": {json.dumps(limit.high)}'
            assert all(one in text for one in shown) or name == "logit_bias", name  # keys are texts


def limits_of(annotation: Any, metadata: list[Any]) -> Iterator[Between]:
    yield from (one for one in metadata if isinstance(one, Between))
    for one in get_args(annotation):
        yield from limits_of(one, list(getattr(one, "__metadata__", ())))


def test_every_parameter_of_a_query_is_described(document: dict[str, Any]) -> None:
    for route in ROUTES:
        wanted = {one.alias for one in route.dependant.query_params} | set(route.param_convertors)
        for one in schema._calls_of(route.dependant):
            wanted |= set(one.kind.model_fields) if isinstance(one, QueryOf) else set()
        for method in route.methods or ():
            given = document["paths"][route.path_format][method.lower()].get("parameters", [])
            assert {one["name"] for one in given} == wanted, route.path_format


def test_references_lead_to_types(document: dict[str, Any]) -> None:
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert named and named <= document["components"]["schemas"].keys()
    assert all(re.fullmatch(r"[\w.-]+", name) for name in document["components"]["schemas"])


def test_only_what_a_configured_key_opens_has_security(document: dict[str, Any]) -> None:
    paths = document["paths"]
    for path in ("/v1/models", "/openapi.json"):
        assert paths[path]["get"]["security"] == [{"apiKey": []}]
        assert {"401", "403"} <= paths[path]["get"]["responses"].keys()
    assert paths["/v1/completions"]["post"]["security"] == [{"apiKey": []}]
    assert "security" not in paths["/admin/state"]["get"]
    assert {"401", "403"} <= paths["/admin/state"]["get"]["responses"].keys()
    assert "401" not in paths["/health"]["get"]["responses"]


async def test_a_key_opens_the_description_and_not_the_page(
    redis_settings: RedisSettings, folder: Path
) -> None:
    keys = [KEY["authorization"].removeprefix("Bearer ")]
    async with running(redis_settings, folder, api_keys=keys) as gate, gate.http() as http:
        refused = await http.get("/openapi.json")
        assert refused.status_code == 401
        ErrorAnswer.model_validate(refused.json())
        given = await http.get("/openapi.json", headers=KEY)
        assert given.json()["paths"]["/v1/models"]["get"]["security"] == [{"apiKey": []}]
        for path in ("/docs", "/redoc"):
            page = await http.get(path)
            assert page.headers["content-security-policy"].startswith("default-src 'self';")
            named = re.findall(r'(?:href|src)="([^"#]*)"', page.text)
            assert named and all(one.startswith("/") for one in named)
            for one in named:
                assert (await http.get(one, headers=KEY)).status_code == 200, one


async def test_answers_have_the_described_types(gate: Gate) -> None:
    messages = [{"role": "user", "content": "fox"}]
    chat = {"model": BODY["model"], "messages": messages, "max_tokens": 5}
    scored = {"logprobs": True, "top_logprobs": 2, "return_precision": True, "n": 2}
    async with gate.http() as http:

        async def holds(kind: type[BaseModel], method: str, path: str, body: Any = None) -> None:
            answer = await http.request(method, path, json=body)
            assert answer.is_success == (kind is not ErrorAnswer), answer.text
            if body is None or not body.get("stream"):
                kind.model_validate(answer.json(), strict=True)
                return
            events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
            assert events
            for event in events:
                kind.model_validate_json(event, strict=True)

        stream = {"stream": True, "stream_options": {"include_usage": True}}
        await holds(CompletionAnswer, "POST", "/v1/completions", BODY)
        await holds(CompletionAnswer, "POST", "/v1/completions", BODY | {"logprobs": 2, "echo": True})
        await holds(CompletionChunk, "POST", "/v1/completions", BODY | stream | {"return_precision": True})
        await holds(ChatAnswer, "POST", "/v1/chat/completions", chat)
        await holds(ChatAnswer, "POST", "/v1/chat/completions", chat | scored)
        await holds(ChatChunk, "POST", "/v1/chat/completions", chat | stream | scored)
        response = {"model": BODY["model"], "input": "fox", "max_output_tokens": 5}
        await holds(ResponseAnswer, "POST", "/v1/responses", response)
        rich = {"top_logprobs": 2, "return_precision": True}
        await holds(ResponseEvent, "POST", "/v1/responses", response | rich | {"stream": True})
        await holds(ErrorAnswer, "POST", "/v1/chat/completions", {})
        await holds(ErrorAnswer, "POST", "/v1/responses", {})
        embedded = {"model": BODY["model"], "input": ["fox", "dog"]}
        await holds(EmbeddingsAnswer, "POST", "/v1/embeddings", embedded)
        await holds(ErrorAnswer, "GET", "/nowhere")
        await holds(ServedModels, "GET", "/v1/models")
        await holds(TokenizeAnswer, "POST", "/tokenize", {"model": BODY["model"], "prompt": "fox"})
        await holds(DetokenizeAnswer, "POST", "/detokenize", {"model": BODY["model"], "tokens": [1]})
        await holds(VersionAnswer, "GET", "/version")
        await holds(HealthAnswer, "GET", "/health")
        await holds(ReadyAnswer, "GET", "/ready")


async def test_a_body_of_all_defaults_is_accepted(gate: Gate, document: dict[str, Any]) -> None:
    """Generated clients send every default that the schema names."""
    given: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "fox", "max_tokens": 5},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 5},
        "/v1/responses": {"input": "fox", "max_output_tokens": 5},
        "/v1/embeddings": {"input": "fox"},
    }
    assert given.keys() == CALLS.keys()
    for path, needs in given.items():
        kind = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        fields = document["components"]["schemas"][kind.split("/")[-1]]["properties"]
        body = {name: one["default"] for name, one in fields.items() if "default" in one}
        assert len(body) > (20 if issubclass(CALLS[path][0], SamplingBody) else 4)
        async with gate.http() as http:
            answer = await http.post(path, json=body | needs | {"model": BODY["model"]})
        assert answer.status_code == 200, answer.text

"""/openapi.json (OpenAPI 3.1) from the types that parse requests, and the page that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, get_origin

from fastapi import APIRouter, Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.responses import Response

from bus.version import program_version
from gateway.http.paced import PacedResponse
from gateway.openai.answer_types import ErrorAnswer
from gateway.openai.fields import Body, JsonSchema
from gateway.openai.formats import to_json
from gateway.openai.params import SamplingBody, ServedBody
from gateway.openai.unsupported import HARMLESS
from gateway.operations.answers import allowed
from gateway.operations.inputs import BodyOf, OrderOf, QueryOf, answering
from gateway.operations.public import READ, page, with_key

JSON: Final = "application/json"
REF: Final = "#/components/schemas/{model}"
KEYS: Final[Mapping[Any, str]] = {with_key: "apiKey", allowed: "adminKey"}
# Statuses of refusals and when they come. Those of every route: the head is read before the path is known.
ALWAYS: Final = (400, 431, 503)
OF_KEYS: Final = (401, 403)
OF_BODIES: Final = (408, 413, 415)
WHEN: Final[Mapping[int, str]] = {
    304: "the browser has this version",
    400: "a field, a parameter or the HTTP itself is wrong; `param` names the field",
    401: "no key, or one that is not known",
    403: "without a configured key, this caller may not",
    404: "there is nothing of this name; the message says what there is",
    405: "the path takes other methods; the header `allow` names them",
    408: "the body did not come in time (gateway.header_timeout_s)",
    409: "the state forbids it; the message says why",
    413: "the body is too large (gateway.max_body_bytes)",
    415: "the body is not JSON, or is compressed",
    429: "the key's limit is reached; `retry-after` has the seconds to wait",
    431: "the head of the request is too large",
    503: "it cannot be served now; `retry-after` has the seconds to wait",
    504: "no worker began it in time",
}
_RETRY: Final = {
    "retry-after": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}
}
# An event of a stream, as OpenAPI 3.2 describes it. `data` is JSON, or `[DONE]`.
EVENT: Final[JsonSchema] = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
}
# Of calls, which FastAPI does not route.
OF_CALLS: Final = (*OF_KEYS, *OF_BODIES, 404, 429, 504)

# Body, answer, and event of a stream; None: it has none.
Calls = Mapping[str, tuple[type[ServedBody], type[BaseModel], type[BaseModel] | None]]

router = APIRouter()


@router.api_route("/openapi.json", methods=READ, dependencies=[Depends(with_key)], responses=answering())
async def openapi(request: Request) -> Response:
    """Return this description of the API, in OpenAPI 3.1."""
    state = request.app.state
    if state.document is None:
        state.document = to_json(state.describe())
    return PacedResponse(state.document, media_type=JSON)


@router.api_route("/docs", methods=READ, responses=answering(None, 304, media="text/html"))
@router.api_route("/redoc", methods=READ, responses=answering(None, 304, media="text/html"))
async def docs(request: Request) -> Response:
    """Return a page that shows this description. It asks for a key where one is configured."""
    return page(request, "docs.html")


class Describer:
    """Collects the types of one document, and describes its operations."""

    def __init__(self, calls: Calls, has_key: Mapping[str, bool]) -> None:
        """Describe `calls`, too, which FastAPI does not route: body, answer and event by path."""
        self._calls, self._has_key = calls, has_key
        self._kinds: dict[tuple[Any, str], TypeAdapter[Any]] = {}

    def document(self, routes: Iterable[Any]) -> JsonSchema:
        """Return the whole description."""
        paths: dict[str, JsonSchema] = {path: {"post": self._call(path)} for path in self._calls}
        for route in routes:
            if isinstance(route, APIRoute):
                for method in sorted(route.methods or ()):
                    paths.setdefault(route.path_format, {})[method.lower()] = self._operation(route, method)
        schemas = self._schemas()
        return {
            "openapi": "3.1.0",
            "info": {"title": "Instar", "version": program_version(), "description": _ABOUT},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in KEYS.values()},
            },
        }

    def _call(self, path: str) -> JsonSchema:
        body, answer, event = self._calls[path]
        content: JsonSchema = {JSON: {"schema": self._ref(answer, "serialization")}}
        if event:
            of_event = self._ref(event, "serialization")
            content["text/event-stream"] = {"itemSchema": EVENT, "x-event-schema": of_event}
        form = "the answer, whole or as a stream" if event else "the answer"
        return {
            "operationId": _operation_id("post", path),
            "summary": _summary(body.__doc__),
            "tags": ["v1"],
            "requestBody": self._body(body),
            "responses": {"200": {"description": form, "content": content}}
            | self._refusals((*ALWAYS, *OF_CALLS), "post", {}),
            **self._security("apiKey"),
        }

    def _operation(self, route: APIRoute, method: str) -> JsonSchema:
        needs = list(_calls_of(route.dependant))
        key = next((KEYS[one] for one in needs if one in KEYS), "")
        parameters = [*self._path_parameters(route), *self._query_parameters(route)]
        refusals = {status for status in map(int, route.responses) if status >= 300} | set(ALWAYS)
        refusals |= set(OF_KEYS) if key else set()
        refusals |= {404} if route.param_convertors else set()
        described: JsonSchema = {
            "operationId": _operation_id(method, route.path_format),
            "summary": _summary(route.endpoint.__doc__) or route.name.replace("_", " "),
            "tags": [route.path_format.split("/")[1] or "pages"],
        }
        for one in needs:
            if isinstance(one, BodyOf | OrderOf):
                described["requestBody"] = self._body(one.kind)
                refusals |= set(OF_BODIES)
            elif isinstance(one, QueryOf):
                parameters += _fields_as_parameters(one.kind)
        if parameters:
            described["parameters"] = parameters
        answers = {str(status): self._answer(route, status, method) for status in _good(route)}
        return (
            described
            | {"responses": answers | self._refusals(refusals, method, route.responses)}
            | self._security(key)
        )

    def _security(self, key: str) -> JsonSchema:
        return {"security": [{key: []}]} if self._has_key.get(key) else {}

    def _answer(self, route: APIRoute, status: int | str, method: str) -> JsonSchema:
        said: JsonSchema = {"description": WHEN.get(int(status), "done, or under way")}
        declared = route.responses.get(status, {})
        if method == "HEAD" or int(status) == 304:
            return said
        if "content" in declared:
            return said | {"content": declared["content"]}
        kind = declared.get("model")
        schema = self._ref(kind, "serialization") if kind else {"type": "object"}
        return said | {"content": {JSON: {"schema": schema}}}

    def _refusals(
        self, statuses: Iterable[int], method: str, declared: Mapping[int | str, JsonSchema]
    ) -> JsonSchema:
        error = self._ref(ErrorAnswer, "serialization")
        described: JsonSchema = {}
        for status in sorted(set(statuses)):
            one: JsonSchema = {"description": WHEN[status]}
            described[str(status)] = one
            if method != "HEAD" and status != 304:
                own = declared.get(status, {}).get("model")
                either = {"anyOf": [error, self._ref(own, "serialization")]} if own else error
                one["content"] = {JSON: {"schema": either}}
            if status in (429, 503, 504):
                one["headers"] = _RETRY
        return described

    def _body(self, kind: type[Body]) -> JsonSchema:
        return {"required": True, "content": {JSON: {"schema": self._ref(kind, "validation")}}}

    def _ref(self, kind: Any, mode: str) -> JsonSchema:
        if get_origin(kind) is list:
            return {"type": "array", "items": {"type": "object"}}
        self._kinds.setdefault((kind, mode), TypeAdapter(kind))
        return {"$ref": REF.format(model=kind.__name__)}

    def _path_parameters(self, route: APIRoute) -> Iterator[JsonSchema]:
        for name in route.param_convertors:
            schema = {"type": "string", "minLength": 1}
            yield {"name": name, "in": "path", "required": True, "schema": schema}

    def _query_parameters(self, route: APIRoute) -> Iterator[JsonSchema]:
        for one in route.dependant.query_params:
            kind: Any = one.field_info.annotation
            schema = TypeAdapter(kind).json_schema() | {"default": one.default}
            yield {"name": one.alias, "in": "query", "required": False, "schema": schema}

    def _schemas(self) -> JsonSchema:
        """Return the types by name; those of bodies with what `json_object` drops and `HARMLESS` accepts."""
        inputs: Any = [(kind, mode, adapter) for (kind, mode), adapter in self._kinds.items()]
        _, found = TypeAdapter.json_schemas(inputs, ref_template=REF)
        schemas: dict[str, JsonSchema] = found["$defs"]
        of_bodies = {kind.__name__ for kind, mode in self._kinds if mode == "validation"}
        for kind, _ in self._kinds:
            if issubclass(kind, SamplingBody):
                _add_harmless(schemas[kind.__name__])
        for name in _reached(of_bodies, schemas):
            schemas[name] = _with_nulls(schemas[name])
        return dict(sorted(schemas.items()))


_ABOUT: Final = (
    "An LLM server that changes shape while it serves. Errors have OpenAI's form on every route. "
    "A field of a body that is null counts as left out; any other that is unknown is refused by name."
)


def _calls_of(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    """Yield what FastAPI calls before the handler."""
    for one in dependant.dependencies:
        if one.call is not None:
            yield one.call
        yield from _calls_of(one)


def _good(route: APIRoute) -> list[int | str]:
    """Return the statuses of answers that are no refusals."""
    return [one for one in route.responses if int(one) < 300] or [route.status_code or 200]


def _operation_id(method: str, path: str) -> str:
    return "_".join([method.lower(), *re.findall(r"\w+", path)]) if path != "/" else f"{method.lower()}_root"


def _summary(text: str | None) -> str:
    return " ".join((text or "").split())


def _fields_as_parameters(kind: type[Body]) -> list[JsonSchema]:
    schema = kind.model_json_schema()
    required = schema.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": one}
        for name, one in schema["properties"].items()
    ]


def _add_harmless(schema: JsonSchema) -> None:
    """Add the values of other servers' parameters that change nothing here."""
    for name, values in HARMLESS.items():
        only = {"enum": list(values), "description": "Accepted, and changes nothing."}
        schema["properties"].setdefault(name, only)


def _reached(names: Iterable[str], schemas: Mapping[str, JsonSchema]) -> set[str]:
    """Return these types and all that they refer to."""
    reached, waiting = set[str](), list(names)
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += re.findall(r"'#/components/schemas/(\w+)'", repr(schemas[name]))
    return reached


def _with_nulls(schema: Any) -> Any:
    """Return a schema in which optional and unknown fields may be null, which counts as left out."""
    if isinstance(schema, list):
        return [_with_nulls(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        name: one if name in ("default", "examples", "enum", "const") else _with_nulls(one)
        for name, one in schema.items()
    }
    if isinstance(fields := schema.get("properties"), dict) and "type" in schema:
        required = schema.get("required", [])
        out["properties"] = {
            name: _with_nulls(one) if name in required else _or_null(_with_nulls(one))
            for name, one in fields.items()
        }
        if out.get("additionalProperties") is False:
            out["additionalProperties"] = {"type": "null"}
    return out


_OUTSIDE: Final = ("description", "default", "title", "examples")


def _or_null(schema: JsonSchema) -> JsonSchema:
    if {"type": "null"} in schema.get("anyOf", ()) or None in schema.get("enum", ()):
        return schema
    around = {name: schema[name] for name in _OUTSIDE if name in schema}
    inner = {name: one for name, one in schema.items() if name not in around}
    return {"anyOf": [inner, {"type": "null"}]} | around

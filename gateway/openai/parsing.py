"""From a request's bytes to checked fields, with an error that names what was wrong.

Three passes, so that nothing is ever ignored: fields that are null, or set to the value that means "do
nothing", fall away; what is left and known to OpenAI or vLLM but not to us is refused by its name; the rest
is validated, types and ranges, by pydantic. Each refusal is a 400 with the field in `param`.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from pydantic import ValidationError

from gateway.errors import ApiError, bad_json, invalid, too_long, unsupported
from gateway.openai.params import HARMLESS, UNSUPPORTED, ChatBody, CompletionBody, SamplingBody

MAX_PROMPTS = 1024  # in one call
MAX_FIELDS = 2048  # of one object
MAX_OBJECTS = 8192  # in one body: more take the event loop away from the others
MAX_DEPTH = 16

B = TypeVar("B", bound=SamplingBody)


def parse(kind: type[B], data: bytes) -> B:
    """The body of one call. Raises ApiError 400."""
    fields = _fields(data)
    for name in fields.keys() - kind.model_fields.keys():
        _refuse(name, fields[name], kind)
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _first_problem(error) from None
    _check_together(body)
    return body


def prompts(value: Any, context: int) -> list[str | list[int]]:
    """The prompts of one completion call; a text stays a text. Raises ApiError 400, for empty ones too, and
    for more than `context` token ids in one."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_integer(value[0])):
        return [_prompt(value, "prompt", context)]
    if not isinstance(value, list):
        raise _bad_prompt("prompt", value)
    if not value:
        raise invalid("prompt is empty", "prompt", "empty_prompt")
    if len(value) > MAX_PROMPTS:
        raise invalid(f"prompt holds {len(value)} prompts, at most {MAX_PROMPTS} fit one call", "prompt")
    return [_prompt(one, f"prompt[{i}]", context) for i, one in enumerate(value)]


def _prompt(value: Any, where: str, context: int) -> str | list[int]:
    if not isinstance(value, str | list):
        raise _bad_prompt(where, value)
    if not value:
        raise invalid(f"{where} is empty", "prompt", "empty_prompt")
    if isinstance(value, list):
        if len(value) > context:
            raise too_long(len(value), context)
        if set(map(type, value)) != {int} or min(value) < 0:  # at C's speed; which one, at ours
            i = next(i for i, token in enumerate(value) if not _is_integer(token) or token < 0)
            raise _bad_prompt(f"{where}[{i}]", value[i])
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_prompt(where: str, value: Any) -> ApiError:
    wanted = "a text, a list of texts, a list of token ids (0 or more) or a list of such lists"
    return invalid(f"prompt must be {wanted}; {where} is {_shown(value)}", "prompt")


def _fields(data: bytes) -> dict[str, Any]:
    """The JSON object without its nulls and harmless fields."""
    if not data:
        raise bad_json("the body is empty; a JSON object is needed")
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise bad_json(_why_undecodable(data, error)) from None
    if not isinstance(value, dict):
        raise bad_json(f"the body is a JSON {_json_type(value)}; an object is needed")
    if len(value) > MAX_FIELDS:
        raise bad_json(f"the body has {len(value)} fields; the limit is {MAX_FIELDS}")
    clean = _Cleaner().clean
    return {name: clean(v, name) for name, v in value.items() if v is not None and not _is_harmless(name, v)}


class _Cleaner:
    """Takes the nulls out: clients dump whole message objects, with `null` for all they do not use. Refuses
    bodies of a size or depth that only an attack has."""

    def __init__(self) -> None:
        self._num_objects = 0

    def clean(self, value: Any, name: str, depth: int = 1) -> Any:
        """`name`: of the field of the body it is in. Raises ApiError 400."""
        if isinstance(value, dict):
            self._count(1, name, depth)
            if len(value) > MAX_FIELDS:
                raise invalid(
                    f"{name} holds an object of {len(value)} fields; the limit is {MAX_FIELDS}", name
                )
            return {key: self.clean(v, name, depth + 1) for key, v in value.items() if v is not None}
        if isinstance(value, list) and value and isinstance(value[0], dict | list):
            self._count(len(value), name, depth)
            return [self.clean(item, name, depth + 1) for item in value]
        return value

    def _count(self, more: int, name: str, depth: int) -> None:
        self._num_objects += more
        if self._num_objects > MAX_OBJECTS:
            raise invalid(f"{name} holds more than {MAX_OBJECTS} objects and lists", name)
        if depth > MAX_DEPTH:
            raise invalid(f"{name} is nested deeper than {MAX_DEPTH}", name)


def _why_undecodable(data: bytes, error: Exception) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as bad:
        return f"the body is not valid UTF-8: byte {bad.start} is 0x{data[bad.start]:02x}"
    return f"the body is not valid JSON: {error}"


def _is_harmless(name: str, value: Any) -> bool:
    # type too: in Python 1 == True == 1.0
    return any(value == known and type(value) is type(known) for known in HARMLESS.get(name, ()))


def _refuse(name: str, value: Any, kind: type[SamplingBody]) -> None:
    if name in ("echo", "prompt") or name in ("messages", "max_completion_tokens", "top_logprobs"):
        other = "/v1/completions" if kind is ChatBody else "/v1/chat/completions"
        raise unsupported(name, f"{name} belongs to {other}")
    if name in UNSUPPORTED:
        raise unsupported(name, f"{name} is not supported here{_best_value(name)}")
    raise ApiError(400, f"unknown parameter {name[:200]!r}", param=name[:200], code="unknown_parameter")


def _best_value(name: str) -> str:
    values = [msgspec.json.encode(value).decode() for value in HARMLESS.get(name, ())]
    return f"; leave it out or send {' or '.join(values)}" if values else "; leave it out"


def _check_together(body: SamplingBody) -> None:
    """Rules that join two fields."""
    if "stream_options" in body.model_fields_set and not body.stream:
        raise invalid("stream_options is only allowed with stream: true", "stream_options")
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        old, new = body.max_tokens, body.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens is {old} and max_completion_tokens {new}; send one"
            raise invalid(message, "max_completion_tokens")
    elif isinstance(body, CompletionBody) and body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens must be at least 1 (0 only with echo: true)", "max_tokens")


def _first_problem(error: ValidationError) -> ApiError:
    """One clear sentence about the deepest problem: of a union's branches the one that got furthest."""
    problem = max(
        error.errors(include_url=False), key=lambda one: (len(one["loc"]), one["type"] == "too_long")
    )
    param = _path(problem["loc"])
    if problem["type"] == "missing":
        return invalid(f"{param} is missing", param, "missing_parameter")
    if problem["type"] == "extra_forbidden":
        return unsupported(param, f"{param} is not supported here; leave it out")
    text = _sentence(problem["msg"])
    is_length = problem["type"] in ("too_long", "too_short")  # the message has the length already
    return invalid(
        f"{param}: {text}" if is_length else f"{param}: {text}, not {_shown(problem['input'])}", param
    )


_UNION_TAGS: Final = frozenset(["str", "int", "float", "constrained-int", "[key]"])


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "list[TextPart]", 1, "type") -> messages[0].content[1].type"""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _UNION_TAGS and not step.startswith(("list[", "dict[")):
            path += f".{step}" if path else step
    return path


def _sentence(text: str) -> str:
    """pydantic's wording, fit to follow a colon."""
    text = text.removeprefix("Input ").replace(" after validation", "")
    return text[:1].lower() + text[1:]


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, dict | list) else _json_type(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")

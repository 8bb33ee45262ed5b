"""Checks of tools while a body is parsed: parameters are a schema, arguments an object.

The library that compiles grammars checks a schema whole, and only where one is needed: with `required` and a
named tool (`gateway.openai.tools.forced`).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.openai.json_body import MAX_OBJECTS, has_too_many

MAX_DEPTH: Final = 64  # of a schema and of arguments: templates write both by recursion

_TYPES: Final = frozenset(["array", "boolean", "integer", "null", "number", "object", "string"])


def schema_problem(schema: Any) -> str | None:
    """Return why the parameters of a function cannot be a JSON schema of an object; None if they can."""
    if not isinstance(schema, dict):
        return "it must be a JSON schema, an object"
    if is_deeper(schema, MAX_DEPTH):
        return f"it is nested deeper than {MAX_DEPTH}"
    if schema.get("type") not in (None, "object"):
        return f"its type must be 'object', as arguments are one, and is {_short(schema['type'])}"
    return _problem_within(schema, "")


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments as an object; no text at all is an empty one.

    Raises ValueError with the reason for a text that is no JSON object, or one too deep or of too many parts.
    """
    if not text.strip():
        return {}
    try:
        data = text.encode()
        if has_too_many(data):
            raise ValueError(f"it holds more than {MAX_OBJECTS} objects and lists")
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(value, dict):
        raise ValueError("it is no object")
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH}")
    return value


def is_deeper(value: Any, limit: int) -> bool:
    """Return True if objects and lists are nested deeper than `limit`, without going deeper itself."""
    level = [value]
    for _ in range(limit):
        level = [inner for one in level for inner in _inside(one)]
        if not level:
            return False
    return True


def _inside(value: Any) -> list[Any]:
    """Return the objects and lists in one."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in items if isinstance(one, dict | list)]


def _problem_within(schema: dict[str, Any], where: str) -> str | None:
    """Check the keywords that describe an object's fields, and theirs in turn."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    if not all(isinstance(one, str) and one in _TYPES for one in kinds):
        at = where.removesuffix(".") or "it"
        return f"{at} has the type {_short(kind)}; types are {', '.join(sorted(_TYPES))}"
    fields = {} if schema.get("properties") is None else schema["properties"]
    if not isinstance(fields, dict):
        return f"{where}properties must be an object"
    required = [] if schema.get("required") is None else schema["required"]
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        return f"{where}required must be an array of strings"
    for name, field in fields.items():
        if isinstance(field, bool):
            continue
        if not isinstance(field, dict):
            return f"{where}properties.{name[:100]} must be a schema, an object"
        if problem := _problem_within(field, f"{where}properties.{name[:100]}."):
            return problem
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."

"""pydantic's findings as one sentence: the parameter, the value given, what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.errors import ApiError, invalid, unsupported

# pydantic's error type -> what is allowed; {names} come from the error's context.
_WANTED: Final = {
    "range": "allowed is {allowed}",
    "literal_error": "allowed is {expected}",
    "float_type": "it must be a number",
    "finite_number": "it must be a finite number",
    "string_type": "it must be a string",
    "list_type": "it must be an array",
    "string_pattern_mismatch": "it must match {pattern}",
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "it must be an integer"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "it must be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "it must be an object"),
}
_LENGTHS: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], str]]] = {
    "too_long": lambda value, limits: f"holds {len(value)} items; at most {limits['max_length']} are allowed",
    "too_short": lambda value, _: "is empty" if not value else f"holds {len(value)} items; more are needed",
    "string_too_long": lambda value, limits: (
        f"has {len(value)} characters; at most {limits['max_length']} are allowed"
    ),
    "string_too_short": lambda *_: "is an empty string",
}
_UNION_TAGS: Final = frozenset(
    ["str", "int", "float", "[key]", "[named]", "[message]", "[call]", "[result]", "[tool]"]
)


def first_problem(error: ValidationError, within: str = "") -> ApiError:
    """Return the deepest problem: of a union's branches, the one that matched the most.

    `within`: what stands before the path of the field at fault.
    """
    problem = max(
        error.errors(include_url=False), key=lambda one: (len(one["loc"]), one["type"] == "too_long")
    )
    param = within + _path(problem["loc"])
    if problem["type"] == "missing":
        return invalid(f"{param} is missing", param, "missing_parameter")
    if problem["type"] == "extra_forbidden":
        return unsupported(param, f"{param} is not supported here; leave it out")
    return invalid(f"{param[:200]} {sentence(problem)}", param)


def sentence(problem: ErrorDetails) -> str:
    """Return what is wrong with the value: `is 'maybe'; it must be true or false`."""
    kind, value, limits = problem["type"], problem["input"], problem.get("ctx", {})
    if kind in _LENGTHS:
        return _LENGTHS[kind](value, limits)
    wanted = _WANTED.get(kind)
    return f"is {shown(value)}; {wanted.format(**limits) if wanted else problem['msg']}"


def _path(loc: tuple[int | str, ...]) -> str:
    """Return ("messages", 0, "content", "list[TextPart]", 1, "type") as messages[0].content[1].type."""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in _UNION_TAGS and not step.startswith(("list[", "dict[", "constrained-", "function-")):
            path += f".{step}" if path else step
    return path


def shown(value: Any) -> str:
    """Return a short form of a value for people; lists and objects by their type."""
    if isinstance(value, dict | list):
        return f"an {json_type(value)}"
    text = {True: "true", False: "false", None: "null"}[value] if _is_word(value) else repr(value)
    return text if len(text) <= 100 else text[:100] + "..."


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def json_type(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")

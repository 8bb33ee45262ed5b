"""The form of an answer that must call a tool: one JSON list of calls, as a schema (`required`, named)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from bus.messages import Grammar
from gateway.openai.tools.declarations import FunctionTool
from gateway.openai.tools.formats import ToolFormat

_REFERENCES: Final = ("$ref", "$dynamicRef")
_BY_NAME: Final = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA: Final = ("const", "enum", "default", "examples")  # keywords whose values are no schemas
_COMBINED: Final = ("$ref", "anyOf", "oneOf", "allOf")  # they may say by themselves that it is an object


def calls_grammar(tools: Sequence[FunctionTool], form: ToolFormat, *, is_single: bool) -> Grammar:
    """Return the form of a list of calls of these tools, one or more; `is_single`: exactly one.

    What is not supported in a tool's schema is ignored, unless all of them are strict.
    """
    items = [_call_schema(tool.function.name, number, form) for number, tool in enumerate(tools)]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": items},
        "$defs": {str(number): _placed(tool, number) for number, tool in enumerate(tools)},
    } | ({"maxItems": 1} if is_single else {})
    is_strict = all(tool.function.strict for tool in tools)
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode(), is_lenient=not is_strict)


def parameters_grammar(tool: FunctionTool) -> Grammar:
    """Return the form of one tool's arguments, to find the tool whose schema cannot be compiled."""
    text = msgspec.json.encode(_parameters(tool)).decode()
    return Grammar(kind="json_schema", text=text, is_lenient=not tool.function.strict)


def _call_schema(name: str, number: int, form: ToolFormat) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, form.arguments: {"$ref": f"#/$defs/{number}"}},
        "required": ["name", form.arguments],
        "additionalProperties": False,
    }


def _parameters(tool: FunctionTool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, which are an object; without parameters an empty one."""
    given = tool.function.parameters
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if "type" in given or any(one in given for one in _COMBINED):
        return given
    return given | {"type": "object"}


def _placed(tool: FunctionTool, number: int) -> Any:
    """Return a tool's schema at its place in the whole one: its references begin there."""
    return _moved(_parameters(tool), f"#/$defs/{number}")


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _REFERENCES and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[name] = root + value[1:]
        elif name in _BY_NAME and isinstance(value, dict):
            moved[name] = {key: _moved(one, root) for key, one in value.items()}
        else:
            moved[name] = value if name in _DATA else _moved(value, root)
    return moved

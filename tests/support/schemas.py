"""JSON schemas for structured output: one of each keyword that is supported, and ones made at random."""

from __future__ import annotations

import random
from typing import Any

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "left"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "boolean"},
    {"type": "null"},
    {"const": None},
    {"enum": [None, 1, "a", [True], {"b": 2}]},
    {"type": "integer", "minimum": 10, "maximum": 99},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "string", "maxLength": 8},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    {"anyOf": [{"type": "boolean"}, {"const": "no"}]},
    {"oneOf": [{"const": 1}, {"const": "one"}]},
    {"allOf": [{"type": "integer", "minimum": 5, "maximum": 99}, {"maximum": 7}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": "a"}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "array", "items": POINT, "maxItems": 2},
    POINT,
    {"type": "object", "properties": {"p": POINT, "q": POINT}, "required": ["q"]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    TREE,
]


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """Make a schema whose shortest values are short, of all types, with up to `depth` levels."""
    kinds = ["integer", "boolean", "null", "string", "enum", "pattern"] + ["object", "array", "any"] * (
        depth > 0
    )
    match draw.choice(kinds):
        case "integer":
            low = draw.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 500)}
        case "string":
            shortest = draw.randint(0, 3)
            return {"type": "string", "minLength": shortest, "maxLength": shortest + draw.randint(0, 5)}
        case "enum":
            words = ["alpha", 'a "quote"', "né", 0, -1.5, None, True, [], {"k": 1}]
            return {"enum": draw.sample(words, draw.randint(1, 4))}
        case "pattern":
            return {"type": "string", "pattern": draw.choice(["^[a-f]{1,4}$", "^(yes|no)$", "^x?y{2}[0-9]$"])}
        case "object":
            names = draw.sample(["id", "name", "tags", "next", "größe", "a b"], draw.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(draw, depth - 1) for name in names},
                "required": draw.sample(names, draw.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "array":
            fewest = draw.randint(0, 2)
            items = random_schema(draw, depth - 1)
            return {
                "type": "array",
                "items": items,
                "minItems": fewest,
                "maxItems": fewest + draw.randint(0, 2),
            }
        case "any":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case kind:
            return {"type": kind}

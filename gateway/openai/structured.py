"""Structured output: the one form that a body asks for, and refusals before a worker sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, Final

import msgspec

from bus.grammars import compiling_thread, excess, problem
from bus.messages import Grammar
from gateway.errors import invalid
from gateway.openai.params import CallBody

_ANY_OBJECT: Final = '{"type":"object"}'
_NAMES: Final = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
}

# One thread: a hostile grammar takes seconds, and the library lets go of the GIL.
_thread = cache(compiling_thread)
_found = lru_cache(maxsize=256)(problem)


async def grammar_of(body: CallBody, end_token_ids: tuple[int, ...]) -> Grammar | None:
    """Return the form that the answer must have, which the model's own tokens end; None for any.

    Raises ApiError 400 for two forms in one body, and for one that is too large or that nothing can have.
    """
    asked = list(_asked(body))
    if not asked:
        return None
    param, grammar = asked[0]
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise invalid(f"{names} each ask for a form of the answer; send one of them", asked[1][0])
    what = _NAMES[grammar.kind]
    if why := await problem_of(grammar):
        raise invalid(f"this {what} cannot be used: {why}", param)
    return replace(grammar, end_token_ids=end_token_ids)


async def problem_of(grammar: Grammar) -> str | None:
    """Return why a form cannot be used, in one line; None if it can."""
    return await asyncio.get_running_loop().run_in_executor(_thread("grammars"), _problem, grammar)


def _problem(grammar: Grammar) -> str | None:
    """Return why a grammar cannot be used, or None; what exceeds the limits is not remembered."""
    return excess(grammar) or _found(grammar)


def _asked(body: CallBody) -> Iterator[tuple[str, Grammar]]:
    """Yield each form that the body asks for, and the path of its field. Raises ApiError 400."""
    if (answer := body.response_format) and answer.type == "json_object":
        yield "response_format", Grammar(kind="json_schema", text=_ANY_OBJECT)
    elif answer and answer.json_schema:
        asked = answer.json_schema
        param = "response_format.json_schema.schema"
        yield param, _schema(param, asked.schema_, is_lenient=not asked.strict)
    yield from _named("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if (outputs := body.structured_outputs) is None:
        return
    yield from _named("structured_outputs.", outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
    if outputs.json_object:
        yield "structured_outputs.json_object", Grammar(kind="json_schema", text=_ANY_OBJECT)


def _named(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[tuple[str, Grammar]]:
    """Yield each form of vLLM's that is given, and the path of its field: `prefix` and the form's name."""
    if schema is not None:
        yield f"{prefix}json", _schema(f"{prefix}json", schema)
    if regex is not None:
        yield f"{prefix}regex", Grammar(kind="regex", text=regex)
    if choice:
        yield f"{prefix}choice", _choice(choice)
    if grammar is not None:
        yield f"{prefix}grammar", Grammar(kind="grammar", text=grammar)


def _schema(param: str, schema: dict[str, Any] | str, *, is_lenient: bool = False) -> Grammar:
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    except RecursionError:
        raise invalid(f"{param}: this JSON schema is nested too deeply", param) from None
    return Grammar(kind="json_schema", text=text, is_lenient=is_lenient)


def _choice(texts: list[str]) -> Grammar:
    return Grammar(kind="choice", text=msgspec.json.encode(texts).decode())

"""Parsing of a body into checked fields, with errors that name what was wrong.

Fields that do nothing are dropped, unsupported ones refused by name, the rest validated by pydantic.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError

from gateway.errors import ApiError, invalid, too_long, unsupported
from gateway.openai.json_body import json_object
from gateway.openai.params import MAX_PROMPTS, SamplingBody, ServedBody
from gateway.openai.problems import first_problem, shown
from gateway.openai.unsupported import ELSEWHERE, HARMLESS, UNSUPPORTED

B = TypeVar("B", bound=ServedBody)


def parse(kind: type[B], data: bytes) -> B:
    """Return the body of one call. Raises ApiError 400."""
    given, known = json_object(data), kind.model_fields
    if issubclass(kind, SamplingBody):
        given = {name: one for name, one in given.items() if name in known or not _is_harmless(name, one)}
    for name in given:
        if name not in known:
            raise _unknown(name, kind)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise first_problem(error) from None
    body.check_together()
    return body


def prompts(value: Any, context: int, field: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of one call: texts, or lists of at most `context` token ids.

    Raises ApiError 400, which names the field.
    """
    if isinstance(value, str) or (isinstance(value, list) and value and _is_integer(value[0])):
        return [_prompt(value, field, context)]
    if not isinstance(value, list):
        raise _bad_prompt(field, value)
    if not value:
        raise invalid(f"{field} is empty", field, "empty_prompt")
    if len(value) > MAX_PROMPTS:
        raise invalid(f"{field} holds {len(value)} prompts, at most {MAX_PROMPTS} fit one call", field)
    return [_prompt(one, f"{field}[{i}]", context) for i, one in enumerate(value)]


def _prompt(value: Any, where: str, context: int) -> str | list[int]:
    if not isinstance(value, str | list):
        raise _bad_prompt(where, value)
    if not value:
        raise invalid(f"{where} is empty", where.partition("[")[0], "empty_prompt")
    if isinstance(value, list):
        if len(value) > context:
            raise too_long(len(value), context)
        if set(map(type, value)) != {int} or min(value) < 0:  # fast; the search for the culprit is not
            i = next(i for i, token in enumerate(value) if not _is_integer(token) or token < 0)
            raise _bad_prompt(f"{where}[{i}]", value[i])
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_prompt(where: str, value: Any) -> ApiError:
    wanted = "a text, a list of texts, a list of token ids (0 or more) or a list of such lists"
    field = where.partition("[")[0]
    return invalid(f"{field} must be {wanted}; {where} is {shown(value)}", field)


def _is_harmless(name: str, value: Any) -> bool:
    # The type, too: in Python 1 == True == 1.0.
    return any(value == known and type(value) is type(known) for known in HARMLESS.get(name, ()))


def _unknown(name: str, kind: type[ServedBody]) -> ApiError:
    if name in ELSEWHERE and issubclass(kind, SamplingBody):
        return unsupported(name, f"{name} belongs to {ELSEWHERE[name]}")
    if one := UNSUPPORTED.get(name):
        why = f": {one.why}" if one.why else ""
        return unsupported(name, f"{name} is not supported here{why}{_best_value(name)}")
    name = name[:200]
    near = get_close_matches(name.lower(), kind.model_fields, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ApiError(400, f"unknown parameter {name!r}{hint}", param=name, code="unknown_parameter")


def _best_value(name: str) -> str:
    values = [msgspec.json.encode(value).decode() for value in HARMLESS.get(name, ())]
    return f"; leave it out or send {' or '.join(values)}" if values else "; leave it out"

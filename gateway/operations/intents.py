"""An intent as a client writes it: in a body, or as the parameters of a query.

The controller checks whether its fields go together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, cast, get_args

from pydantic import ValidationError

from bus.deployments import CostModel, Intent, Objective
from bus.precisions import Precision
from gateway.errors import invalid
from gateway.openai.params import MAX_COUNT, Body, between
from gateway.openai.problems import first_problem, shown
from gateway.operations.orders import meant

OBJECTIVES: Final = get_args(Objective)
Tokens = Annotated[int, between(1, MAX_COUNT)]
Limit = Annotated[float, between(0, 1e30, above=True)]


class IntentBody(Body):
    minimise: Objective = "cost"
    cost: CostModel = "memory_seconds"
    max_latency_s: Limit | None = None
    max_cost: Limit | None = None
    max_loss: Annotated[float, between(0, 1e6)] | None = None
    prompt_tokens: Tokens = 256
    output_tokens: Tokens = 64
    batch_size: Annotated[int, between(1, 4096)] = 1
    tp: Annotated[int, between(1, 64)] | None = None
    pp: Annotated[int, between(1, 64)] | None = None
    precision: Precision | None = None


class _Named(Body):
    intent: IntentBody


def intent_of(value: Any) -> Intent:
    """Return the intent of an object with its fields, or of the name of what to minimise.

    Raises ApiError 400.
    """
    if isinstance(value, str):
        if value not in OBJECTIVES:
            raise invalid(f"intent is {value[:100]!r}; {meant(value, OBJECTIVES)}", "intent")
        return Intent(minimise=cast(Objective, value))
    if not isinstance(value, dict):
        either = f"it must be an object, or one of {', '.join(OBJECTIVES)}"
        raise invalid(f"intent is {shown(value)}; {either}", "intent")
    _refuse_unknown(value, "intent.")
    try:
        body = _Named.model_validate({"intent": value}).intent
    except ValidationError as error:
        raise first_problem(error) from None
    return Intent(**body.model_dump())


def intent_in_query(query: Mapping[str, str]) -> Intent:
    """Return the intent of a query's parameters. Raises ApiError 400."""
    _refuse_unknown(query, "")
    try:
        body = IntentBody.model_validate({name: _number_or_text(text) for name, text in query.items()})
    except ValidationError as error:
        raise first_problem(error) from None
    return Intent(**body.model_dump())


def _refuse_unknown(fields: Mapping[str, Any], within: str) -> None:
    for name in fields:
        if name not in IntentBody.model_fields:
            known = meant(name, IntentBody.model_fields)
            raise invalid(
                f"unknown field {within}{name[:200]}; {known}", within + name[:200], "unknown_field"
            )


def _number_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

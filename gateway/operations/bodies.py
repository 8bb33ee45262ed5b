"""Bodies of the admin API, from the declarations of their fields."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, create_model
from pydantic import Field as Limits

from bus.fields import Field
from bus.messages import Part
from bus.precisions import Precision
from gateway.openai.fields import PERCENT, PERCENT_TEXT, Body, between, or_text


def body_type(name: str, declared: Iterable[Field], *, takes_null: bool = True, **more: Any) -> type[Body]:
    """Return a class that validates the fields; null counts as left out, unless `takes_null` is False."""
    fields: Any = more | {one.name: _pydantic(one, takes_null) for one in declared}
    return create_model(name, __base__=Body, **fields)


def _pydantic(one: Field, takes_null: bool) -> tuple[Any, Any]:
    kind, words = _type_of(one), _words(one)
    if one.is_required:
        return kind, Limits(description=words)
    if one.unset:
        no_value = BeforeValidator(lambda value: None if value == one.unset else value)
        kind = Annotated[kind | None, no_value, or_text(const=one.unset)]
    if takes_null or one.default is None:
        return kind | None, Limits(None, description=words)
    return kind, Limits(one.default, description=words)


def _words(one: Field) -> str:
    """Return the field's meaning and unit; its limits are in its type."""
    return f"{one.summary}; unit: {one.unit}" if one.unit else one.summary


def _type_of(one: Field) -> Any:
    """Return the type by which pydantic validates a field, with its limits."""
    limits = between(one.minimum, one.maximum, above=one.above_minimum)
    of_list = Limits(min_length=1, max_length=one.max_items)
    types: dict[str, Any] = {
        **dict.fromkeys(("integer", "blocks", "degree"), Annotated[int, limits]),
        "number": Annotated[float, limits, PERCENT, PERCENT_TEXT]
        if one.unit == "share"
        else Annotated[float, limits],
        "text": str,
        "choice": Literal[tuple(one.choices)],
        "precision": Precision,
        "layers": Annotated[list[Annotated[int, limits]], of_list],
        "parts": Annotated[list[Part], of_list],
        "workers": Annotated[list[str], of_list],
    }
    return types[one.type]

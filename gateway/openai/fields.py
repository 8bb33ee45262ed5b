"""The types of which fields of bodies are made: ranges, sizes and their words, for check and schema alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from bus.fields import MAX_COUNT

JsonSchema = dict[str, Any]


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Between:
    """The range of a number, for its check and its schema."""

    low: float
    high: float
    above: bool

    def check(self, value: float) -> float:
        """Return the value. Raises PydanticCustomError, which names both ends."""
        low, high = self.low, self.high
        if value < low or value > high or (self.above and value == low):
            allowed = f"more than {low} and at most {high}" if self.above else f"{low} to {high}"
            raise PydanticCustomError("range", "allowed is {allowed}", {"allowed": allowed})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        least = "exclusiveMinimum" if self.above else "minimum"
        return handler(core) | {least: self.low, "maximum": self.high}


@dataclass(frozen=True)
class Described:
    """The schema of a field whose check says more than its type: a function of what the type alone says."""

    change: Callable[[JsonSchema], JsonSchema]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return self.change(handler(core))


@dataclass(frozen=True)
class DescribedAs:
    """The type by which the schema describes a field that is checked by hand."""

    kind: Any

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchema:
        return handler(TypeAdapter(self.kind).core_schema)


def or_text(**limits: Any) -> Described:
    """Return the schema of a value, or of a text for it."""
    return Described(lambda schema: {"anyOf": [schema, {"type": "string"} | limits]})


def between(low: float, high: float, *, above: bool = False) -> Between:
    """Return a check that `low` <= value <= `high`, whose error names both; `above`: `low` < value."""
    return Between(low, high, above)


def at_most(limit: int) -> BeforeValidator:
    """Return a check of an object's size before its fields are validated, which may take seconds."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "at most {max_length} items", {"max_length": limit})
        return value

    return BeforeValidator(check)


def _percent(value: Any) -> Any:
    """Return "1%" as 0.01, and all else as it is."""
    if isinstance(value, str) and value.endswith("%"):
        with suppress(ValueError):
            return float(value.removesuffix("%")) / 100
    return value


PERCENT = BeforeValidator(_percent)
PERCENT_TEXT = or_text(pattern=r"^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)%$", examples=["1%"])
Loss = Annotated[float, between(0, 1), PERCENT, PERCENT_TEXT]  # of perplexity
TokenId = Annotated[int, between(0, MAX_COUNT)]


def _boolean(value: Any) -> Any:
    """Return a boolean. Raises PydanticKnownError for a number, which a literal takes: 0 == False."""
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_boolean)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_boolean)]

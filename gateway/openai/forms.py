"""The fields that ask for a form of the answer. `gateway.openai.structured` makes its grammar."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.openai.fields import Body, JsonSchema

MAX_CHOICES = 1024  # of guided_choice

Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),  # not FailFast(): the union hashes it
]


class JsonSchemaFormat(Body):
    """A schema that an answer keeps."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Ignored, but needed, as OpenAI needs it."""
    description: str | None = None
    """Ignored."""
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    """The schema itself."""
    strict: bool | None = None
    """Refuse keywords that are not supported; else they are ignored."""


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    """Any text, a JSON object of any fields, or what `json_schema` allows."""
    json_schema: JsonSchemaFormat | None = None
    """Needed by the type json_schema, and only by it."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("schema", "json_schema and the type 'json_schema' need each other")
        return self


class StructuredOutputs(Body):
    """One of the fields guided_*, under vLLM's newer names."""

    json_: Annotated[JsonSchema | str | None, Field(alias="json")] = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: Choices | None = None
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in Lark or GBNF."""
    json_object: bool | None = None
    """True: a JSON object of any fields."""

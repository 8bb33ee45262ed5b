"""The messages of a conversation, with the calls that earlier answers made."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.openai.fields import Body, Described, DescribedAs, JsonSchema
from gateway.openai.tools.schemas import arguments_of

MAX_MESSAGES = 2048
MAX_PARTS = 256  # parts of one message
MAX_CALLS = 128  # of one message


class TextPart(Body):
    """A text of a message, under the name of either API. Fields that other programs add are ignored."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "input_text", "output_text"]
    text: str


def _as_object(value: Any) -> Any:
    """Return the arguments of a call, which a message has as text, as the object that templates take."""
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "it must be a string")
    try:
        return arguments_of(value)
    except ValueError as error:
        raise PydanticCustomError(
            "arguments", "it must be a JSON object: {why}", {"why": str(error)}
        ) from None


class CalledFunction(Body):
    """The function of an earlier call. Fields that other programs add are ignored."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1)]
    """As the answer had it."""
    arguments: Annotated[JsonSchema, BeforeValidator(_as_object), DescribedAs(str)]
    """The text of a JSON object."""


class ToolCall(Body):
    """A call that an earlier answer made. Fields that other programs add are ignored."""

    model_config = ConfigDict(extra="allow")

    id: Annotated[str, Field(min_length=1)]
    """The message with the result names it, too."""
    type: Literal["function"] = "function"
    """The only kind of tool."""
    function: CalledFunction
    """What was called."""

    @property
    def num_ignored(self) -> int:
        """The fields of it that have no effect here."""
        return len(self.model_extra or ()) + len(self.function.model_extra or ())

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates take: as in OpenAI's API, but with arguments as an object."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


def _unless_empty(value: Any) -> Any:
    if value:
        raise PydanticCustomError("extra_forbidden", "it is not supported here")
    return value


_EMPTY: Final[JsonSchema] = {"enum": [None, False, 0, "", [], {}]}
_Unsupported = Annotated[Any, AfterValidator(_unless_empty), Described(lambda _: _EMPTY)]


def _says_what(schema: JsonSchema) -> None:
    """Note what `Message._says_nothing` takes for a content."""
    schema["required"].remove("content")
    silent = {"properties": {"role": {"const": "assistant"}}}
    schema["anyOf"] = [
        {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        silent,
    ]


class Message(Body):
    """A message. Fields that other programs add to one are ignored, as vLLM does."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_says_what)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = Field(default=[])
    """Only an assistant's: what it called."""
    tool_call_id: str | None = None
    """Only of the role tool: the call whose result this is."""
    reasoning_content: str | None = None
    """Only an assistant's: what it thought, for templates that take it."""
    # They change what a message says, so they are refused unless they are empty.
    function_call: _Unsupported = None
    audio: _Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _says_nothing(cls, value: Any) -> Any:
        """Take an assistant's message without content, which its API returns as null, for an empty one."""
        if isinstance(value, dict) and value.get("role") == "assistant" and "content" not in value:
            return value | {"content": ""}
        return value

    @model_validator(mode="after")
    def _has_its_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "only the role 'assistant' has tool_calls")
        if self.tool_call_id and self.role != "tool":
            raise PydanticCustomError("role", "only the role 'tool' has a tool_call_id")
        if not self.tool_call_id and self.role == "tool":
            raise PydanticCustomError("role", "the role 'tool' needs the tool_call_id of the call it answers")
        return self

    @property
    def num_ignored(self) -> int:
        """The fields of it, its parts and its calls that have no effect here."""
        parts = [] if isinstance(self.content, str) else self.content
        extra = sum(len(one.model_extra or ()) for one in (self, *parts))
        return extra + sum(call.num_ignored for call in self.tool_calls)

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates take: plain text; `developer` is OpenAI's new name of `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text,
            "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls],
            "tool_call_id": self.tool_call_id,
        }
        if self.role == "assistant":
            message["reasoning_content"] = self.reasoning_content
        return {name: value for name, value in message.items() if value or name == "content"}

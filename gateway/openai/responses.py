"""The body of /v1/responses, and the chat that it asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bus.fields import MAX_COUNT
from gateway.openai.fields import Body, JsonSchema, OnlyFalse, between, or_text
from gateway.openai.forms import JsonSchemaFormat, ResponseFormat
from gateway.openai.messages import MAX_MESSAGES, MAX_PARTS, CalledFunction, Message, TextPart, ToolCall
from gateway.openai.params import ChatBody, Metadata, SamplingBody
from gateway.openai.sampling import sampling
from gateway.openai.tools.declarations import (
    MAX_TOOLS,
    FunctionSpec,
    FunctionTool,
    NamedFunction,
    NamedTool,
    ToolChoice,
    check_choice,
    refuse_namesakes,
)

LOGPROBS: Final = "message.output_text.logprobs"
Includable = Literal[
    "message.output_text.logprobs",
    # Of items that no answer has here.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class InputItem(Message):
    """A message, as a client writes it or as an earlier answer had it."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]

    @model_validator(mode="before")
    @classmethod
    def _is_message(cls, value: Any) -> Any:
        kind = value.get("type", "message") if isinstance(value, dict) else "message"
        if kind != "message":
            raise PydanticCustomError(
                "item",
                "its type is {kind}; {known} are supported here",
                {"kind": repr(kind)[:60], "known": _KNOWN},
            )
        return value


class CallItem(CalledFunction):
    """A call that an earlier answer made. Fields that other programs add are ignored."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    """The item with the result names it, too."""

    def as_call(self) -> ToolCall:
        """Return the same as a message of a chat has it."""
        function = CalledFunction.model_construct(name=self.name, arguments=self.arguments)
        return ToolCall.model_construct(id=self.call_id, function=function)


class ResultItem(Body):
    """The result of a call. Fields that other programs add are ignored."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    """The call whose result this is."""
    output: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    """Its text, or parts of it."""


_KNOWN: Final = "'message', 'function_call' and 'function_call_output'"
_TAGS: Final = {"function_call": "[call]", "function_call_output": "[result]"}


def _tag_of(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _TAGS.get(kind, "[message]") if isinstance(kind, str) else "[message]"


# The tags are no part of an error's path (`gateway.openai.problems`).
Item = Annotated[
    Annotated[InputItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[call]")]
    | Annotated[ResultItem, Tag("[result]")],
    Discriminator(_tag_of),
]


def _messages(items: Sequence[InputItem | CallItem | ResultItem]) -> list[Message]:
    """Return the items as messages of a chat, where an assistant's message has the calls that follow it."""
    found: list[Message] = []
    for item in items:
        if isinstance(item, ResultItem):
            found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
        elif isinstance(item, InputItem):
            found.append(item)
        elif found and found[-1].role == "assistant":
            calls = [*found[-1].tool_calls, item.as_call()]
            found[-1] = found[-1].model_copy(update={"tool_calls": calls})
        else:
            found.append(Message(role="assistant", content="", tool_calls=[item.as_call()]))
    return found


def _listed(value: Any) -> Any:
    """Return a text as the message of a user."""
    if value == "":
        raise PydanticCustomError("string_too_short", "it is empty")
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


_LISTED = BeforeValidator(_listed)


class TextFormat(Body):
    """The form of the text. All fields but the type belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, a JSON object of any fields, or what `schema` allows."""
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """Ignored, but needed beside a schema, as OpenAI needs it."""
    description: str | None = None
    """Ignored."""
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    """The schema that the text keeps."""
    strict: bool | None = None
    """Refuse keywords that are not supported; else they are ignored."""

    @model_validator(mode="after")
    def _has_its_schema(self) -> TextFormat:
        if {self.type == "json_schema", self.schema_ is not None, self.name is not None} == {True, False}:
            raise PydanticCustomError("schema", "name, schema and the type 'json_schema' need each other")
        return self

    def as_response_format(self) -> ResponseFormat:
        """Return the same as a chat has it."""
        form = None
        if self.schema_ is not None:
            fields = {"name": self.name, "schema": self.schema_, "strict": self.strict}
            form = JsonSchemaFormat.model_validate(fields)
        return ResponseFormat(type=self.type, json_schema=form)

    def for_answer(self) -> dict[str, Any]:
        """Return the fields that the answer repeats."""
        if self.schema_ is None:
            return {"type": self.type}
        rest = {"description": self.description, "strict": self.strict}
        return {"type": self.type, "name": self.name, "schema": self.schema_} | rest


class TextOptions(Body):
    """The form of the text."""

    format: TextFormat | None = None
    """Any text, if it is left out."""
    verbosity: Literal["medium"] | None = None
    """The only one that there is."""


class ResponseStreamOptions(Body):
    include_obfuscation: OnlyFalse = False
    """Padding of events, of which there is none here."""


class OfFunction(Body):
    type: Literal["function"]
    """The only kind of tool."""


class ResponseTool(FunctionSpec, OfFunction):  # in this order the type is checked first
    """A function that the model may call, with its fields beside the type."""

    def for_answer(self) -> dict[str, Any]:
        """Return the fields that the answer repeats."""
        names = ("type", "name", "description", "parameters", "strict")
        return {name: getattr(self, name) for name in names}

    def as_tool(self) -> FunctionTool:
        """Return the same as a chat has it."""
        return FunctionTool.model_construct(type=self.type, function=self)


class NamedChoice(NamedFunction, OfFunction):
    """The choice of one tool, which the model then calls."""


def _named_once(tools: list[ResponseTool]) -> list[ResponseTool]:
    refuse_namesakes([tool.name for tool in tools])
    return tools


_Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedChoice, Tag("[named]")],
    Discriminator(lambda value: "str" if isinstance(value, str) else "[named]"),
]


class ResponsesBody(SamplingBody):
    """The body of /v1/responses. No answer is stored, so every call has the whole conversation."""

    # Fields of a chat by their names here, for errors that the chat's own checks find.
    NAMES: ClassVar[dict[str, str]] = {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
    } | {f"tools[{number}].function.parameters": f"tools[{number}].parameters" for number in range(MAX_TOOLS)}

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES),
        FailFast(),
        _LISTED,
        or_text(minLength=1, examples=["The quick fox"]),
    ]
    """A text, or the messages, the calls and their results so far."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    """Most tokens of output."""
    top_logprobs: Annotated[int, sampling("logprobs")] = 0
    """Log-probabilities of each token, and of so many of the likeliest; 0: none but by `include`."""
    include: list[Includable] = Field(default=[], max_length=16)
    """message.output_text.logprobs: log-probabilities of each token. The others change nothing here."""
    text: TextOptions = TextOptions()
    """The form of the output."""
    tools: Annotated[
        list[ResponseTool], Field(max_length=MAX_TOOLS), FailFast(), AfterValidator(_named_once)
    ] = Field(default=[])
    """Functions that the model may call."""
    tool_choice: _Choice = "auto"
    """Whether it calls one: never, as it likes, at least one, or one by name. Of no effect without tools."""
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""
    truncation: Literal["disabled"] = "disabled"
    """An input longer than the model's context is refused."""
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    """Options of a stream. The last event always has the numbers of tokens."""
    metadata: Metadata | None = None
    """Repeated in the answer."""

    @property
    def text_format(self) -> TextFormat:
        return self.text.format or TextFormat()

    @property
    def has_logprobs(self) -> bool:
        return self.top_logprobs > 0 or LOGPROBS in self.include

    @property
    def chat_choice(self) -> ToolChoice:
        """The choice of a tool as a chat has it."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        return NamedTool.model_construct(
            type=choice.type, function=NamedFunction.model_construct(name=choice.name)
        )

    @property
    def choice_for_answer(self) -> str | dict[str, str]:
        """The choice of a tool as the answer repeats it."""
        choice = self.tool_choice
        return choice if isinstance(choice, str) else {"type": choice.type, "name": choice.name}

    def check_together(self) -> None:
        super().check_together()
        check_choice(self.chat_choice, [tool.name for tool in self.tools], "tool_choice.name")

    def as_call(self) -> ChatBody:
        """Return the chat that this asks for: whatever a chat can do is said in a chat's fields here."""
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields}
        told = [Message(role="system", content=self.instructions)] if self.instructions else []
        return ChatBody.model_construct(  # every field was validated
            **shared,
            response_format=self.text_format.as_response_format(),
            messages=[*told, *_messages(self.input)],
            tools=[tool.as_tool() for tool in self.tools],
            tool_choice=self.chat_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs if self.has_logprobs else None,
        )

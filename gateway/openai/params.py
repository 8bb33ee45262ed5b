"""The fields of /v1/completions and /v1/chat/completions, with their types and ranges.

Those that /v1/responses has beside them are in `gateway.openai.responses`.

`gateway.openai.parsing` makes these from the bytes of a body, and errors from what does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema

from bus.fields import MAX_COUNT
from bus.messages import SAMPLING_RANGES
from bus.precisions import Precision
from gateway.openai.tools.schemas import arguments_of, schema_problem

MAX_STOPS = 16  # OpenAI takes 4, vLLM any number
MAX_STOP_TOKENS = 128
MAX_STOP_CHARS = 512  # each is searched in every token's text
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_METADATA = 16
MAX_CHOICES = 1024  # of guided_choice
MAX_TOOLS = 128
MAX_CALLS = 128  # of one message
MAX_MESSAGES = 2048
MAX_PARTS = 256  # parts of one message
MAX_PROMPTS = 1024  # prompts in one call

JsonSchema = dict[str, Any]


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


def sampling(name: str, *, above: bool = False) -> Between:
    """Return the check of the range that `bus.messages` declares for a sampling parameter."""
    return between(*SAMPLING_RANGES[name], above=above)


def _percent(value: Any) -> Any:
    """Return "1%" as 0.01, and all else as it is."""
    if isinstance(value, str) and value.endswith("%"):
        with suppress(ValueError):
            return float(value.removesuffix("%")) / 100
    return value


PERCENT = BeforeValidator(_percent)
PERCENT_TEXT = or_text(pattern=r"^(100(\.0+)?|[0-9]{1,2}(\.[0-9]+)?)%$", examples=["1%"])
Loss = Annotated[float, between(0, 1), PERCENT, PERCENT_TEXT]  # of perplexity


def _integer_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isascii() and key.isdecimal() else key: bias for key, bias in value.items()}


_OFF = AfterValidator(lambda top_k: max(0, top_k))  # vLLM's clients send -1
TokenId = Annotated[int, between(0, MAX_COUNT)]


def _at_most(limit: int) -> BeforeValidator:
    """Return a check of an object's size before its fields are validated, which may take seconds."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "at most {max_length} items", {"max_length": limit})
        return value

    return BeforeValidator(check)


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_LISTED = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    FailFast(),
    _LISTED,
    or_text(minLength=1, maxLength=MAX_STOP_CHARS),
]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, between(-100, 100)]],
    BeforeValidator(_integer_keys),
    _at_most(MAX_LOGIT_BIAS),  # validators run from the last to the first
    Described(
        lambda schema: (
            schema | {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,9}$"}}
        )
    ),
]
Choices = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),  # not FailFast(): the union hashes it
]


class Body(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


Metadata = Annotated[
    dict[str, str],
    _at_most(MAX_METADATA),
    Described(lambda schema: schema | {"maxProperties": MAX_METADATA}),
]


def _boolean(value: Any) -> Any:
    """Return a boolean. Raises PydanticKnownError for a number, which a literal takes: 0 == False."""
    if not isinstance(value, bool):
        raise PydanticKnownError("bool_type")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_boolean)]
OnlyTrue = Annotated[Literal[True], BeforeValidator(_boolean)]


class StreamOptions(Body):
    include_usage: bool = False
    """End with a chunk that has the numbers of tokens."""
    continuous_usage_stats: bool = False
    """With include_usage, every chunk has the numbers so far, as in vLLM."""
    include_obfuscation: OnlyFalse = False
    """Padding of chunks, of which there is none here."""


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


class ServedBody(Body):
    """The fields that all calls have."""

    model: Annotated[str, Field(min_length=1, examples=["demo"])]
    """The name of a served model."""
    min_precision: Precision | None = None
    """Least precision of every layer in every step."""
    max_loss: Loss | None = None
    """Most loss of perplexity in every step, as a share or as a text in percent."""
    min_precision_wait: bool = True
    """False: 503 at once if no instance keeps min_precision or max_loss, one of which it needs."""
    cache_salt: Annotated[str, Field(max_length=256)] = ""
    """Only requests with the same one share KV blocks."""
    user: str | None = None
    """Ignored."""


class SamplingBody(ServedBody):
    """The fields that all calls that generate have."""

    temperature: Annotated[float, sampling("temperature")] = 1.0
    """0 takes the likeliest token; higher values choose more freely."""
    top_p: Annotated[float, sampling("top_p", above=True)] = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    top_k: Annotated[int, between(-1, MAX_COUNT), _OFF] = 0
    """Sample among so many of the likeliest tokens; 0 or -1: all."""
    min_p: Annotated[float, sampling("min_p")] = 0.0
    """Least probability of a token, as a share of that of the likeliest."""
    presence_penalty: Annotated[float, sampling("presence_penalty")] = 0.0
    """Taken from the logit of each token that the output has."""
    frequency_penalty: Annotated[float, sampling("frequency_penalty")] = 0.0
    """Taken from a logit for each time that the output has its token."""
    repetition_penalty: Annotated[float, sampling("repetition_penalty")] = 1.0
    """Divides the logits of tokens that prompt or output have; 1: off."""
    min_tokens: Annotated[int, between(0, MAX_COUNT)] = 0
    """Tokens of output before an end token or a stop string counts."""
    logit_bias: LogitBias = {}
    """Added to the logits of these token ids."""
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] | None = None
    """The same seed gives the same tokens for the same request."""
    stop: Stops = []
    """Texts before which the output ends."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = []
    """Tokens that end the output, beside the model's own."""
    skip_special_tokens: bool = True
    """False: special tokens of the output are part of its text, by their names."""
    guided_json: JsonSchema | str | None = None
    """A JSON schema that the answer keeps, as an object or as text."""
    guided_regex: str | None = None
    """A regular expression that the whole answer matches."""
    guided_choice: Choices | None = None
    """Texts of which the answer is one."""
    guided_grammar: str | None = None
    """A grammar of the answer, in Lark or GBNF."""
    structured_outputs: StructuredOutputs | None = None
    """The same as guided_json, guided_regex, guided_choice and guided_grammar, in vLLM's newer names."""
    stream: bool = False
    """Answer in server-sent events, as tokens are made."""
    ignore_eos: bool = False
    """Go on after the model's end token, up to max_tokens."""
    return_precision: bool = False
    """Report how many layers below full precision made each token."""
    metadata: Metadata | None = None
    """Ignored."""
    prompt_cache_key: str | None = None
    """Ignored: a prompt that begins as another did takes its KV without being asked to."""
    safety_identifier: str | None = None
    """Ignored."""


class ChoicesBody(SamplingBody):
    """The fields of both calls that answer in choices."""

    n: Annotated[int, between(1, MAX_N)] = 1
    """Choices for each prompt."""
    response_format: ResponseFormat | None = None
    """The form of the answer: any text, a JSON object, or what a JSON schema allows."""
    stream_options: StreamOptions = StreamOptions()
    """Only with stream: true."""

    @property
    def num_samples(self) -> int:
        """Requests for each prompt."""
        return self.n


_Text = Annotated[str, Field(min_length=1, examples=["The quick fox"])]
_TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompts = _Text | _TokenIds | Annotated[list[_Text | _TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)]


class CompletionBody(ChoicesBody):
    """The body of /v1/completions. `max_tokens` 0 with echo scores the prompt and generates nothing."""

    prompt: Annotated[Any, DescribedAs(Prompts)]  # `parsing.prompts` checks it
    """A text, token ids, or a list of either."""
    max_tokens: Annotated[int, between(0, MAX_COUNT)] | None = None
    """Most tokens of output; 0 only with echo: true."""
    logprobs: Annotated[int, sampling("logprobs")] | None = None
    """Log-probabilities of each token, and of so many of the likeliest."""
    echo: bool = False
    """Begin the text with the prompt; with max_tokens 0 and logprobs, score it and generate nothing."""
    best_of: Annotated[int, between(1, MAX_N)] | None = None
    """Samples for each prompt, of which the `n` of the highest mean log-probability are the choices."""

    @property
    def num_samples(self) -> int:
        return self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """True if there are more samples than choices."""
        return self.num_samples > self.n


class TextPart(Body):
    """A text of a message, under the name of either API. Fields that other programs add are ignored."""

    model_config = ConfigDict(extra="allow")

    type: Literal["text", "input_text", "output_text"]
    text: str


def _unless_empty(value: Any) -> Any:
    if value:
        raise PydanticCustomError("extra_forbidden", "it is not supported here")
    return value


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


def _as_schema(value: Any) -> Any:
    if problem := schema_problem(value):
        raise PydanticCustomError("parameters", "{problem}", {"problem": problem})
    return value


ToolName = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$", examples=["get_weather"])
]
Parameters = Annotated[JsonSchema, BeforeValidator(_as_schema)]


class FunctionSpec(Body):
    """A function that the model may call."""

    name: ToolName
    """Letters, digits, `_`, `.` and `-`; each name only once."""
    description: str | None = None
    """What it does, for the model."""
    parameters: Parameters | None = None
    """A JSON schema of its arguments, of the type object; left out: it takes none."""
    strict: bool | None = None
    """Where a call is forced, refuse keywords of the schema that are not supported; else they are ignored."""


class FunctionTool(Body):
    type: Literal["function"]
    """The only kind of tool."""
    function: FunctionSpec
    """The function itself."""

    def for_template(self) -> dict[str, Any]:
        """Return what chat templates take, who read every field without asking for it."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


class NamedFunction(Body):
    name: str
    """The name of one of the tools."""


class NamedTool(Body):
    """The choice of one tool, which the model then calls."""

    type: Literal["function"]
    """The only kind of tool."""
    function: NamedFunction
    """The function to call."""


def refuse_namesakes(names: Sequence[str]) -> None:
    """Raise PydanticCustomError for a name that two tools have."""
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        raise PydanticCustomError("names", "two tools have the name {name}", {"name": repr(twice)})


def _named_once(tools: list[FunctionTool]) -> list[FunctionTool]:
    refuse_namesakes([tool.function.name for tool in tools])
    return tools


# The tags are no part of an error's path (`gateway.openai.problems`).
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")] | Annotated[NamedTool, Tag("[named]")],
    Discriminator(lambda value: "str" if isinstance(value, str) else "[named]"),
]


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
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = []
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


class ChatBody(ChoicesBody):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    """The conversation so far."""
    max_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    """Most tokens of output."""
    max_completion_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    """The same as max_tokens, in OpenAI's newer name."""
    logprobs: bool = False
    """Log-probabilities of each token."""
    top_logprobs: Annotated[int, sampling("logprobs")] | None = None
    """With logprobs: those of so many of the likeliest tokens, too."""
    tools: Annotated[
        list[FunctionTool], Field(max_length=MAX_TOOLS), FailFast(), AfterValidator(_named_once)
    ] = []
    """Functions that the model may call."""
    tool_choice: ToolChoice = "auto"
    """Whether it calls one: never, as it likes, at least one, or one by name. Of no effect without tools."""
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""


CallBody = CompletionBody | ChatBody

# Values that change nothing.
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "add_generation_prompt": (True,),
    "background": (False,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # in completions, as tool_choice and tools
    "priority": (0,),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
# Parameters of OpenAI or vLLM, for a better message than "unknown".
UNSUPPORTED: Final = frozenset(
    """
    audio background best_of context_management conversation dimensions function_call functions image
    max_tool_calls modalities moderation prediction previous_response_id prompt_cache_options
    prompt_cache_retention
    reasoning reasoning_effort service_tier store suffix tool_choice tools verbosity
    web_search_options add_generation_prompt allowed_token_ids bad_words chat_template
    chat_template_kwargs continue_final_message documents include_stop_str_in_output length_penalty priority
    prompt_logprobs spaces_between_special_tokens
    truncate_prompt_tokens use_beam_search
    """.split()  # noqa: SIM905
)
# Why some of them are.
_NO_STATE: Final = "no answer is stored; send the whole conversation"
REASONS: Final = {
    "background": "an answer goes to the call that asks for it",
    "conversation": _NO_STATE,
    "dimensions": "an embedding has the size of the model's hidden states",
    "previous_response_id": _NO_STATE,
    "store": "no answer is stored",
    "suffix": "models have no common form of a prompt with a gap",
}
# Parameters of one call that another has not.
ELSEWHERE: Final = {
    **dict.fromkeys(("echo", "prompt"), "/v1/completions"),
    **dict.fromkeys(("max_completion_tokens", "messages"), "/v1/chat/completions"),
    **dict.fromkeys(
        ("parallel_tool_calls", "tool_choice", "tools", "top_logprobs"),
        "/v1/chat/completions and /v1/responses",
    ),
    **dict.fromkeys(("include", "instructions", "max_output_tokens", "text", "truncation"), "/v1/responses"),
    "encoding_format": "/v1/embeddings",
    "input": "/v1/responses and /v1/embeddings",
    "max_tokens": "/v1/completions and /v1/chat/completions; here it is max_output_tokens",
    "response_format": "/v1/completions and /v1/chat/completions; here it is text.format",
}

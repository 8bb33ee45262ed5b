"""The answers of the OpenAI API and its errors, as the schema describes them.

Answers are written as bytes (`gateway.openai.formats`), and tests hold them to these types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel


class AnswerType(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class ErrorFields(AnswerType):
    message: str
    """What was wrong, the value, the limit, and what to do."""
    type: str
    param: str | None
    """The field at fault."""
    code: str | None
    """A name for the case, for programs."""


class ErrorAnswer(AnswerType):
    """An error in OpenAI's form."""

    error: ErrorFields


class CachedTokens(AnswerType):
    cached_tokens: int
    """Prompt tokens whose KV was there already."""


class Usage(AnswerType):
    """The tokens of a call; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | None = None


class PrecisionSpan(AnswerType):
    """Tokens [start, end) of a choice, and the shape that made them."""

    start: int
    end: int
    layers_below_full: int
    fingerprint: str


class CompletionLogprobs(AnswerType):
    """Four parallel lists, an entry a token; null where nothing precedes it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Characters of the choice's text before the token."""


class ScoredBytes(AnswerType):
    token: str
    logprob: float
    bytes: list[int]
    """The token in UTF-8, which may be a part of a character."""


class ScoredChoice(ScoredBytes):
    top_logprobs: list[ScoredBytes]


class ChatLogprobs(AnswerType):
    content: list[ScoredChoice]
    refusal: None


FinishReason = Literal["stop", "length", "tool_calls"] | None


class _Choice(AnswerType):
    index: int
    finish_reason: FinishReason
    precision: list[PrecisionSpan] | None = None
    """With return_precision."""


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None


class CallOfFunction(AnswerType):
    name: str
    arguments: str
    """The text of a JSON object, as the model wrote it."""


class CallOfTool(AnswerType):
    """A call that the client is to make. The message with its result names the id."""

    id: str
    type: Literal["function"]
    function: CallOfFunction


class AnswerMessage(AnswerType):
    role: Literal["assistant"]
    content: str | None
    """Null if there are only calls."""
    refusal: None
    reasoning_content: str | None = None
    """What the model thought before, where its chat template marks it."""
    tool_calls: list[CallOfTool] | None = None


class ChatChoice(_Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class FunctionDelta(AnswerType):
    name: str | None = None
    arguments: str
    """The next piece of the arguments' text."""


class ToolDelta(AnswerType):
    """A piece of a call. Its id, its type and its name come once, before its arguments."""

    index: int
    """Number of the call in its choice."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChunkDelta(AnswerType):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    """What the model thinks before, where its chat template marks it."""
    tool_calls: list[ToolDelta] | None = None


class ChunkChoice(_Choice):
    delta: ChunkDelta
    logprobs: ChatLogprobs | None


class _Head(AnswerType):
    id: str
    created: int
    """Unix time in seconds."""
    model: str
    system_fingerprint: str | None
    """The shape that made the answer."""


class CompletionAnswer(_Head):
    """The answer of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Head):
    """The data of one event of a stream of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatAnswer(_Head):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(_Head):
    """The data of one event of a stream of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: Usage | None = None


class InputDetails(CachedTokens):
    cache_write_tokens: Literal[0]
    """KV of prompts is kept without being asked for."""


class OutputDetails(AnswerType):
    reasoning_tokens: Literal[0]
    """Reasoning is part of the text."""


class ResponseUsage(AnswerType):
    """The tokens of a call of /v1/responses."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputText(AnswerType):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[str], Field(max_length=0)]
    logprobs: list[ScoredChoice]
    """Empty unless asked for."""


class OutputMessage(AnswerType):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(AnswerType):
    """A call that the client is to make. The item with its result names the call_id."""

    id: str
    type: Literal["function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    call_id: str
    name: str
    arguments: str
    """The text of a JSON object, as the model wrote it; empty until it is whole."""


OutputItem = Annotated[OutputMessage | OutputCall, Field(discriminator="type")]


class AskedTool(AnswerType):
    """A tool as the request had it."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class AskedChoice(AnswerType):
    """The choice of one tool as the request had it."""

    type: Literal["function"]
    name: str


class PlainFormat(AnswerType):
    type: Literal["text", "json_object"]


class SchemaFormat(AnswerType):
    type: Literal["json_schema"]
    name: str
    description: str | None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    """As the request had it."""
    strict: bool | None


class TextForm(AnswerType):
    format: PlainFormat | SchemaFormat
    verbosity: Literal["medium"]


class ResponseFailure(AnswerType):
    code: Literal["server_error"]
    message: str


class CutShort(AnswerType):
    reason: Literal["max_output_tokens"]


class ResponseAnswer(AnswerType):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    """Unix time in seconds."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    """Null until the end."""
    error: ResponseFailure | None
    incomplete_details: CutShort | None
    system_fingerprint: str | None
    """The shape that made the answer."""
    precision: list[PrecisionSpan] | None = None
    """With return_precision."""
    # What was asked for, and what is the same in every answer.
    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextForm
    tool_choice: Literal["none", "auto", "required"] | AskedChoice
    tools: list[AskedTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class _Numbered(AnswerType):
    sequence_number: int
    """From 0, in order."""


class StateEvent(_Numbered):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class ItemEvent(_Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfText(_Numbered):
    item_id: str
    output_index: int
    content_index: int


class PartEvent(_OfText):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDeltaEvent(_OfText):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ScoredChoice]


class TextDoneEvent(_OfText):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ScoredChoice]


class _OfCall(_Numbered):
    item_id: str
    output_index: int


class ArgumentsDeltaEvent(_OfCall):
    type: Literal["response.function_call_arguments.delta"]
    delta: str
    """The next piece of the arguments' text."""


class ArgumentsDoneEvent(_OfCall):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(_Numbered):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            StateEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | ErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """The data of one event of a stream of /v1/responses."""


class EmbeddingUsage(AnswerType):
    prompt_tokens: int
    total_tokens: int


class EmbeddedPrompt(AnswerType):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Of length 1; a text in base64 if it was asked for."""


class EmbeddingsAnswer(AnswerType):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[EmbeddedPrompt]
    model: str
    system_fingerprint: str | None
    """The shape that made the last of them."""
    usage: EmbeddingUsage


class ServedModel(AnswerType):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """The longest sequence, prompt and output together, in tokens."""


class ServedModels(AnswerType):
    object: Literal["list"]
    data: list[ServedModel]


class TokenizeAnswer(AnswerType):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(AnswerType):
    prompt: str


class VersionAnswer(AnswerType):
    version: str


class HealthAnswer(AnswerType):
    status: Literal["ok"]


class ReadyAnswer(AnswerType):
    status: Literal["ready"]
    models: list[str]


class NotReadyAnswer(AnswerType):
    status: Literal["not ready"]
    reason: str

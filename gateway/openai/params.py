"""The parameters of /v1/completions and /v1/chat/completions: each is a field of one of these bodies.

Here stand their names, ranges and defaults, their words for the description of the API, and what two of them
demand of each other. Their types are by theme in `sampling`, `forms`, `messages` and `tools.declarations`,
all made of those of `fields`. The parameters that /v1/responses has beside them are in `responses`, those
that no call takes in `unsupported`.

`gateway.openai.parsing` makes bodies from bytes, and errors from what does not fit.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from bus.fields import MAX_COUNT
from bus.precisions import Precision
from gateway.errors import invalid
from gateway.openai.fields import (
    Body,
    Described,
    DescribedAs,
    JsonSchema,
    Loss,
    OnlyFalse,
    TokenId,
    at_most,
    between,
)
from gateway.openai.forms import Choices, ResponseFormat, StructuredOutputs
from gateway.openai.messages import MAX_MESSAGES, Message
from gateway.openai.sampling import LogitBias, Stops, StopTokenIds, TopK, sampling
from gateway.openai.tools.declarations import ToolChoice, Tools, check_choice

MAX_N = 128
MAX_METADATA = 16
MAX_PROMPTS = 1024  # prompts in one call

Metadata = Annotated[
    dict[str, str],
    at_most(MAX_METADATA),
    Described(lambda schema: schema | {"maxProperties": MAX_METADATA}),
]


class StreamOptions(Body):
    include_usage: bool = False
    """End with a chunk that has the numbers of tokens."""
    continuous_usage_stats: bool = False
    """With include_usage, every chunk has the numbers so far, as in vLLM."""
    include_obfuscation: OnlyFalse = False
    """Padding of chunks, of which there is none here."""


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

    def check_together(self) -> None:
        """Check what fields demand of each other. Raises ApiError 400."""
        has_floor = self.min_precision is not None or self.max_loss is not None
        if not self.min_precision_wait and not has_floor:
            raise invalid("min_precision_wait needs min_precision or max_loss", "min_precision_wait")


class SamplingBody(ServedBody):
    """The fields that all calls that generate have."""

    temperature: Annotated[float, sampling("temperature")] = 1.0
    """0 takes the likeliest token; higher values choose more freely."""
    top_p: Annotated[float, sampling("top_p", above=True)] = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    top_k: TopK = 0
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
    logit_bias: LogitBias = Field(default={})
    """Added to the logits of these token ids."""
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] | None = None
    """The same seed gives the same tokens for the same request."""
    stop: Stops = Field(default=[])
    """Texts before which the output ends."""
    stop_token_ids: StopTokenIds = Field(default=[])
    """Tokens that end the output, beside the model's own."""
    priority: Annotated[int, between(-(2**31), 2**31 - 1)] = 0
    """Among the waiting requests of a key the lowest goes first."""
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

    def check_together(self) -> None:
        if self.stream_options != StreamOptions() and not self.stream:
            raise invalid("stream_options is only allowed with stream: true", "stream_options")
        super().check_together()


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

    def check_together(self) -> None:
        super().check_together()
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens must be at least 1 (0 only with echo: true)", "max_tokens")
        if self.num_samples < self.n:
            message = f"best_of is {self.best_of} and n is {self.n}; send at least n, or leave best_of out"
            raise invalid(message, "best_of")
        if self.is_ranked and self.stream:
            message = (
                f"best_of is {self.best_of} and n is {self.n}, so the choices are known at the end only; "
                "leave stream or best_of out"
            )
            raise invalid(message, "best_of")


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
    tools: Tools = Field(default=[])
    """Functions that the model may call."""
    tool_choice: ToolChoice = "auto"
    """Whether it calls one: never, as it likes, at least one, or one by name. Of no effect without tools."""
    parallel_tool_calls: bool = True
    """False: at most one call in an answer."""

    def check_together(self) -> None:
        super().check_together()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            message = f"max_tokens is {old} and max_completion_tokens {new}; send one"
            raise invalid(message, "max_completion_tokens")
        names = [tool.function.name for tool in self.tools]
        check_choice(self.tool_choice, names, "tool_choice.function.name")


CallBody = CompletionBody | ChatBody

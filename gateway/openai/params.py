"""The fields of /v1/completions and /v1/chat/completions, with their types and ranges.

`gateway.openai.parsing` makes these from the bytes of a body, and errors from what does not fit.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from bus.fields import MAX_COUNT
from bus.messages import SAMPLING_RANGES
from bus.precisions import Precision

MAX_STOPS = 4
MAX_STOP_TOKENS = 128
MAX_STOP_CHARS = 512  # each is searched in every token's text
MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_METADATA = 16
MAX_MESSAGES = 2048
MAX_PARTS = 256  # parts of one message


def between(low: float, high: float, *, above: bool = False) -> AfterValidator:
    """Return a check that `low` <= value <= `high`, whose error names both; `above`: `low` < value."""
    allowed = f"more than {low} and at most {high}" if above else f"{low} to {high}"

    def check(value: float) -> float:
        if value < low or value > high or (above and value == low):
            raise PydanticCustomError("range", "allowed is {allowed}", {"allowed": allowed})
        return value

    return AfterValidator(check)


def sampling(name: str, *, above: bool = False) -> AfterValidator:
    """Return the check of the range that `bus.messages` declares for a sampling parameter."""
    return between(*SAMPLING_RANGES[name], above=above)


def _percent(value: Any) -> Any:
    """Return "1%" as 0.01, and all else as it is."""
    if isinstance(value, str) and value.endswith("%"):
        with suppress(ValueError):
            return float(value.removesuffix("%")) / 100
    return value


PERCENT = BeforeValidator(_percent)
Loss = Annotated[float, between(0, 1), PERCENT]  # of perplexity


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
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS), FailFast(), _LISTED]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, between(-100, 100)]],
    BeforeValidator(_integer_keys),
    _at_most(MAX_LOGIT_BIAS),  # validators run from the last to the first
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: with include_usage, every chunk has the numbers so far
    include_obfuscation: Literal[False] = False


class SamplingBody(Body):
    """The fields that both calls have."""

    model: Annotated[str, Field(min_length=1)]
    temperature: Annotated[float, sampling("temperature")] = 1.0
    top_p: Annotated[float, sampling("top_p", above=True)] = 1.0
    top_k: Annotated[int, between(-1, MAX_COUNT), _OFF] = 0
    min_p: Annotated[float, sampling("min_p")] = 0.0
    presence_penalty: Annotated[float, sampling("presence_penalty")] = 0.0
    frequency_penalty: Annotated[float, sampling("frequency_penalty")] = 0.0
    repetition_penalty: Annotated[float, sampling("repetition_penalty")] = 1.0
    min_tokens: Annotated[int, between(0, MAX_COUNT)] = 0  # before an end token or a stop string counts
    logit_bias: LogitBias = {}
    seed: Annotated[int, between(-(2**63), 2**63 - 1)] | None = None
    stop: Stops = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] = []  # beside the model's own
    n: Annotated[int, between(1, MAX_N)] = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    ignore_eos: bool = False
    min_precision: Precision | None = None  # least precision of every layer in every step
    max_loss: Loss | None = None  # most loss of perplexity in every step
    min_precision_wait: bool = True  # False: 503 at once if no instance keeps it
    cache_salt: Annotated[str, Field(max_length=256)] = ""  # only requests with the same one share KV blocks
    return_precision: bool = False  # report how many layers below full made each token
    user: str | None = None
    metadata: Annotated[dict[str, str], _at_most(MAX_METADATA)] | None = None  # ignored, as user is


class CompletionBody(SamplingBody):
    """The body of /v1/completions. `max_tokens` 0 with echo scores the prompt and generates nothing."""

    prompt: Any  # text, texts, token ids or lists of them: `parsing.prompts` checks it
    max_tokens: Annotated[int, between(0, MAX_COUNT)] | None = None
    logprobs: Annotated[int, sampling("logprobs")] | None = None
    echo: bool = False


class TextPart(Body):
    type: Literal["text"]
    text: str


def _unless_empty(value: Any) -> Any:
    if value:
        raise PydanticCustomError("extra_forbidden", "it is not supported here")
    return value


_Unsupported = Annotated[Any, AfterValidator(_unless_empty)]


class Message(Body):
    """A message. Fields that other programs add to one are ignored, as vLLM does."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_PARTS)]
    name: str | None = None
    # They change what a message says, so they are refused unless they are empty.
    tool_calls: _Unsupported = None
    tool_call_id: _Unsupported = None
    function_call: _Unsupported = None
    audio: _Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _says_nothing(cls, value: Any) -> Any:
        """Take an assistant's message without content, which its API returns as null, for an empty one."""
        if isinstance(value, dict) and value.get("role") == "assistant" and "content" not in value:
            return value | {"content": ""}
        return value

    @property
    def num_ignored(self) -> int:
        """The fields of it that have no effect here."""
        return len(self.model_extra or ())

    def for_template(self) -> dict[str, str]:
        """Return what chat templates take: plain text; `developer` is OpenAI's new name of `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({"name": self.name} if self.name else {})


class ChatBody(SamplingBody):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    max_completion_tokens: Annotated[int, between(1, MAX_COUNT)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, sampling("logprobs")] | None = None


CallBody = CompletionBody | ChatBody

# Values that change nothing.
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1.0, 1),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),  # without tools
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),  # without tools
    "tools": ([],),
    "use_beam_search": (False,),
}
# Parameters of OpenAI or vLLM, for a better message than "unknown".
UNSUPPORTED: Final = frozenset(
    """
    audio best_of function_call functions modalities prediction reasoning_effort response_format
    service_tier store suffix tool_choice tools verbosity web_search_options prompt_cache_key
    safety_identifier add_generation_prompt allowed_token_ids bad_words chat_template
    chat_template_kwargs continue_final_message documents guided_choice guided_grammar guided_json
    guided_regex include_stop_str_in_output length_penalty priority
    prompt_logprobs skip_special_tokens spaces_between_special_tokens structured_outputs
    truncate_prompt_tokens use_beam_search
    """.split()  # noqa: SIM905
)

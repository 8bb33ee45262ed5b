"""The types of the fields that choose tokens and end an output."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, FailFast, Field

from bus.fields import MAX_COUNT
from bus.messages import SAMPLING_RANGES
from gateway.openai.fields import Between, Described, TokenId, at_most, between, or_text

MAX_STOPS = 16  # OpenAI takes 4, vLLM any number
MAX_STOP_TOKENS = 128
MAX_STOP_CHARS = 512  # each is searched in every token's text
MAX_LOGIT_BIAS = 1024


def sampling(name: str, *, above: bool = False) -> Between:
    """Return the check of the range that `bus.messages` declares for a sampling parameter."""
    return between(*SAMPLING_RANGES[name], above=above)


_OFF = AfterValidator(lambda top_k: max(0, top_k))  # vLLM's clients send -1
TopK = Annotated[int, between(-1, MAX_COUNT), _OFF]


def _integer_keys(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {int(key) if key.isascii() and key.isdecimal() else key: bias for key, bias in value.items()}


LogitBias = Annotated[
    dict[TokenId, Annotated[float, between(-100, 100)]],
    BeforeValidator(_integer_keys),
    at_most(MAX_LOGIT_BIAS),  # validators run from the last to the first
    Described(
        lambda schema: (
            schema | {"maxProperties": MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,9}$"}}
        )
    ),
]

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_LISTED = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    FailFast(),
    _LISTED,
    or_text(minLength=1, maxLength=MAX_STOP_CHARS),
]
StopTokenIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)]

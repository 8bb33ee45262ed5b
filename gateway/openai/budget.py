"""The memory that a call takes at the gateway, known before it runs. Pure.

The numbers are bytes of Python's heap: the ids of a prompt, an output token that waits for its whole answer,
and the scores of one while the answer is written. Those of scores are measured, with tracemalloc on answers
of 2,000 tokens of the demo model, and rounded up; TOKEN_BYTES is an estimate. In Redis the ids of a prompt
take 5 bytes each at most: a tenth of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.delivery.request import GenerationRequest
from gateway.errors import invalid
from gateway.openai.formats import Format
from gateway.openai.logprobs import chat_logprobs

MIB: Final = 1024 * 1024
PROMPT_TOKEN_BYTES: Final = 48
TOKEN_BYTES: Final = 256
SCORE_BYTES: Final = 1024  # of a token with scores
CHAT_TOP_BYTES, TOP_BYTES = 400, 80  # of each alternative; a chat names the bytes of each, too


def bytes_of_token(logprobs: int | None, *, is_chat: bool) -> int:
    """Return the memory of an output token, which is scored with `logprobs` others; None: it is not."""
    if logprobs is None:
        return TOKEN_BYTES
    return TOKEN_BYTES + SCORE_BYTES + (CHAT_TOP_BYTES if is_chat else TOP_BYTES) * logprobs


@dataclass(frozen=True, slots=True)
class CallBytes:
    """The memory of one call. A stream keeps no tokens; what its client does not read has its own limit."""

    sure: int  # of its prompts, and of the scores of them that it has asked for
    per_token: int  # of each output token
    most: int  # with all the tokens that it has asked for

    @classmethod
    def of(
        cls, requests: Sequence[GenerationRequest], num_samples: int, form: Format, *, is_stream: bool
    ) -> CallBytes:
        """Return that of the requests of a call, which has each prompt `num_samples` times."""
        sampling = requests[0].sampling
        num_prompt = sum(len(one.prompt_token_ids) for one in requests[::num_samples])
        sure, made = PROMPT_TOKEN_BYTES * num_prompt, sum(one.sampling.max_tokens for one in requests)
        if is_stream:
            return cls(sure, 0, sure)
        per_token = bytes_of_token(sampling.logprobs, is_chat=form.logprobs is chat_logprobs)
        if sampling.prompt_logprobs is not None:
            sure += num_samples * num_prompt * per_token
        return cls(sure, per_token, sure + made * per_token)

    def refuse_above(self, max_call_mb: int) -> None:
        """Raise ApiError 400 for a call that may take more."""
        if self.most > max_call_mb * MIB:
            raise invalid(
                f"this call may take {-(-self.most // MIB)} MiB of the gateway: prompts, and max_tokens "
                f"times the sequences with {self.per_token} bytes a token; one call may take {max_call_mb} "
                "(gateway.max_call_mb); ask for fewer tokens or logprobs, or for a stream",
                "max_tokens",
            )


def most_tokens(max_call_mb: int, num_samples: int, logprobs: int | None, *, is_chat: bool) -> int:
    """Return how many tokens of each sample take half of what one call may: a default that is not refused."""
    return max(1, max_call_mb * MIB // 2 // (num_samples * bytes_of_token(logprobs, is_chat=is_chat)))

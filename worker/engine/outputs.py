"""The outputs of an instance: what a request is told of its sequence."""

from __future__ import annotations

from dataclasses import dataclass

from bus.messages import Delta, FinishReason, RejectReason, Submit, TokenLogprobs
from worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens that one step made for one request."""

    request: Submit
    delta: Delta


def output_of(
    seq: Sequence,
    token_ids: list[int],
    finished: FinishReason | None = None,
    *,
    logprobs: TokenLogprobs | None = None,
    error: str | None = None,
    reject_reason: RejectReason | None = None,
    embedding: bytes | None = None,
) -> Output:
    """Make the next output of a sequence, with all that it has to tell of its prompt.

    token_ids: its newest tokens, which it has already. What is told of the prompt is told once: the tokens
    that were cached, and their log-probabilities.
    """
    cached_tokens, seq.num_unreported_cached = seq.num_unreported_cached, 0
    prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []
    delta = Delta(
        request_id=seq.request.request_id,
        attempt=seq.request.attempt,
        index=len(seq.token_ids) - seq.num_prompt - len(token_ids),
        token_ids=token_ids,
        finish_reason=finished,
        error=error,
        logprobs=[logprobs] if logprobs else None,
        prompt_logprobs=prompt_logprobs or None,
        prompt_index=seq.num_prompt_scored - len(prompt_logprobs),
        reject_reason=reject_reason,
        cached_tokens=cached_tokens,
        embedding=embedding,
    )
    return Output(seq.request, delta)

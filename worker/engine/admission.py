"""Rules, without state, for refusing a request and for ending one."""

from __future__ import annotations

from bus.messages import SAMPLING_RANGES, FinishReason, SamplingParams, Submit
from worker.engine.sequence import Limits, Sequence

FINITE = 1e9


def refusal(request: Submit, limits: Limits, vocab_size: int) -> str | None:
    """Return why this request cannot run here at all, or None.

    One bad token id would fail the whole batch of its step.
    """
    if error := length_refusal(len(request.prompt_token_ids), request.sampling.max_tokens, limits):
        return error
    for name, ids in (
        ("prompt", request.prompt_token_ids),
        ("output", request.sent_token_ids),
        ("logit_bias", request.sampling.logit_bias),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            bad = next(token for token in ids if not 0 <= token < vocab_size)
            return f"token id {bad} of the {name} is outside the vocabulary of {vocab_size}"
    return _bad_sampling(request.sampling)


def length_refusal(num_prompt: int, max_tokens: int, limits: Limits) -> str | None:
    """Return why a prompt of so many tokens cannot run here at all, or None."""
    if not num_prompt:
        return "the prompt is empty; send at least one token"
    room = limits.max_model_len - (max_tokens > 0)
    if num_prompt > room:
        return (
            f"the prompt has {num_prompt} tokens; this model takes at most {room} "
            f"(a context of {limits.max_model_len}, answer included)"
        )
    return None


def _bad_sampling(sampling: SamplingParams) -> str | None:
    """Return what would fail a whole batch: the gateway checks what clients send, but not all on the bus."""
    for name, (low, high) in SAMPLING_RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not low <= value <= high:  # written so that NaN is out of range
            return f"{name} is {value}; it must lie between {low:g} and {high:g}"
    if not all(-FINITE <= bias <= FINITE for bias in sampling.logit_bias.values()):
        return "a logit_bias is not a finite number"
    return None


def why_finished(seq: Sequence, limits: Limits) -> FinishReason | None:
    """Return why `seq` has ended, or None.

    Only the newest token counts; tokens sent in earlier attempts count towards max_tokens.
    """
    sampling = seq.request.sampling
    if seq.token_ids[-1] in sampling.stop_token_ids or (seq.matcher and seq.matcher.is_complete):
        return "stop"
    if seq.num_output >= sampling.max_tokens or len(seq.token_ids) >= limits.max_model_len:
        return "length"
    return None


def goes_on(seq: Sequence, limits: Limits) -> bool:
    """Return True if only the value of its next token can end the sequence."""
    has_output_left = seq.num_output + 1 < seq.request.sampling.max_tokens
    return has_output_left and len(seq.token_ids) + 1 < limits.max_model_len

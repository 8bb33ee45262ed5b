"""Requests from the gateway to a worker, and the tokens that come back."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from bus.precisions import Precision

FinishReason = Literal["stop", "length", "error"]


class RejectReason(StrEnum):
    """Why a worker returns a request that can run elsewhere, or on the same instance later."""

    PRECISION_FLOOR = "precision_floor"  # a layer is below the request's `min_precision`
    KV_CAPACITY = "kv_capacity"  # the whole KV cache, at its current size, is too small
    RETIRED = "retired"  # the instance is being unloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens.

    The gateway draws a `seed` where the client gave none. A draw is a function of (seed, output position)
    alone, so a request that continues on another worker samples the same text.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # alternatives of each output token; 0: only the chosen one; None: off
    prompt_logprobs: int | None = None  # the same of each prompt token
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids; empty if the client set ignore_eos


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """A request to run; stream `requests:{instance}`.

    The client already has the output tokens `sent_token_ids`. The worker prefills prompt and sent tokens and
    continues at index len(sent_token_ids); `max_tokens` counts the sent tokens too.
    """

    request_id: str
    attempt: int
    gateway: str
    epoch: int  # of the instance's leading worker when the gateway chose it
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sent_token_ids: list[int] = field(default_factory=list)
    trace_id: str = ""
    min_precision: Precision | Literal[""] = ""  # no layer may be below it while this runs; "": no floor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The log probability of a token and of its most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top_ids: list[int] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The tokens that one step added to one request.

    Empty `token_ids` without a `finish_reason` mean that the request was admitted (its first prefill chunk
    ran, which ends its time in the queue) or that it is still alive after a long silence.
    """

    request_id: str
    attempt: int
    index: int  # output position of token_ids[0]
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None  # with finish_reason "error"
    logprobs: list[TokenLogprobs] | None = None  # one per token id
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token; [0] is None
    reject_reason: RejectReason | None = None  # with an error that another attempt may avoid


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Everything that one engine step made for one gateway; stream `tokens:{gateway}`."""

    worker: str
    epoch: int
    instance: str
    step: int
    born_ns: int  # time.time_ns() when the step's tokens were known: the start of their way to the client
    fingerprint: str  # shape id of the step, such as tp1-int4x2; clients get it as `system_fingerprint`
    deltas: list[Delta]
    layers_below_full: int = 0  # of the instance in this step; see `bus.messages.layers_below_full`
    step_s: float = 0.0  # duration; requests that the step admitted stopped waiting when it began


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A gateway's waiting requests that only an instance of a higher degree could hold; stream `demand`.

    The gateway repeats it while they wait. A demand that is not repeated is over.
    """

    gateway: str
    model: str
    tokens: int  # prompt and output of the longest of these requests
    count: int
    at_ms: int

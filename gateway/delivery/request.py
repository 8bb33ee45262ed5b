"""A request that the gateway accepted, and its state until it ends.

A `GenerationRequest` never changes. Its `RequestState` has all that is needed to continue elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from bus.messages import Delta, FinishReason, SamplingParams, StepOutput
from bus.precisions import Precision
from bus.prefix_keys import prompt_digests
from gateway.delivery.journey import Journey
from gateway.errors import ApiError

Floor = Precision | Literal[""]  # the lowest precision that a request accepts; "": any


class RetryReason(StrEnum):
    """Why an attempt ended without ending its request."""

    PRECISION_FLOOR = "precision_floor"
    KV_CAPACITY = "kv_capacity"
    RETIRED = "retired"
    RECALLED = "recalled"  # the gateway took it out of a worker's queue
    GAP = "gap"  # a token is missing
    SILENT = "silent"
    WORKER_LOST = "worker_lost"
    WORKER_LEFT = "worker_left"
    EPOCH_CHANGED = "epoch_changed"
    LEASE_MISSING = "lease_missing"
    GATEWAY_LEASE_LOST = "gateway_lease_lost"
    BUS_RESTARTED = "bus_restarted"
    BUS_FULL = "bus_full"


class InstanceAddress(NamedTuple):
    """One incarnation of an instance's worker. Deltas from another address than the attempt's are void."""

    instance: str
    worker: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt and how to continue it. Made from the body of a call; the Submit is made from it."""

    id: str
    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrived: float  # seconds of the monotonic clock
    trace_id: str = ""  # the client's id of its call
    min_precision: Floor = ""  # no layer may be below it in any step of this request
    waits_for_precision: bool = True  # until the deadline; False: refuse it instead
    cache_salt: str = ""  # requests with unlike salts share no KV blocks
    key: str = ""  # id of the API key: between keys a worker's queue is fair by tokens
    weight: float = 1.0  # the key's share beside others
    priority: int = 0  # within a key the lowest goes first in a worker's queue
    embeds: bool = False  # an embedding is wanted, and no token
    # What becomes of its tokens: the worker does not get these.
    index: int = 0  # index of its choice in the answer
    stop: tuple[str, ...] = ()
    echo: str | None = None  # the prompt's text, to be sent before the output's
    has_output: bool = True  # False: the prompt is echoed and scored, nothing else (max_tokens 0)
    returns_precision: bool = False
    skips_special_tokens: bool = True  # False: they are text

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the longest output."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


class Sink(Protocol):
    """The receiver of a call's tokens. `flush` writes out what a batch of them brought."""

    def on_admitted(self) -> None:
        """Note that a worker began one of the call's requests."""

    def on_tokens(self, request: GenerationRequest, delta: Delta, skip: int, step: StepOutput | None) -> bool:
        """Take the tokens of `delta` from `skip` on, each once. Return True to get no more of them."""

    def on_end(self) -> None:
        """Note that a request ended by itself, after its last tokens."""

    def fail(self, error: ApiError) -> None:
        """Note that a request failed, and with it the call."""

    def flush(self) -> None: ...


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of a request. Times are seconds of the monotonic clock; 0: not yet."""

    request: GenerationRequest
    sink: Sink
    deadline: float  # a worker must begin by then
    received: list[int] = field(default_factory=list)
    num_prompt_scored: int = 0  # prompt tokens whose log-probabilities the sink has
    attempt: int = 0  # counts submissions
    strikes: int = 0  # attempts that a worker's failure ended
    target: InstanceAddress | None = None  # address for this attempt; None: the request waits
    is_sent: bool = False  # Redis has the Submit of this attempt
    is_running: bool = False  # the worker of this attempt began
    was_admitted: bool = False  # a worker of any attempt began
    was_recalled: bool = False
    cached_tokens: int = 0  # prompt tokens that the first worker did not compute
    digests: dict[int, list[int]] = field(default_factory=dict)  # prompt's digests, by tokens of a block
    num_misfits: int = 0  # times that a worker's whole KV cache was too small
    refused_by: frozenset[InstanceAddress] = frozenset()  # below its floor or retired, since the last poll
    last_sign: float = 0.0  # time of the last sign of life: sent, admitted or a token
    began: float = 0.0  # when the first worker did
    first_token: float = 0.0
    last_token: float = 0.0
    ended: str = ""  # how: stop, length, abort or the code of an error
    journey: Journey | None = None  # only if the call is traced

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_known_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.request.prompt_token_ids) + len(self.received)

    def misses_scores(self, delta: Delta) -> bool:
        """Return True if log-probabilities of the prompt that come before this delta, or in it, did not."""
        request, known = self.request, self.num_prompt_scored
        if request.sampling.prompt_logprobs is None or self.received:
            return False
        is_last = bool(delta.token_ids) or delta.finish_reason not in (None, "error")
        end = max(known, delta.prompt_index + len(delta.prompt_logprobs or []))
        return delta.prompt_index > known or (is_last and end < len(request.prompt_token_ids))

    def new_scores(self, delta: Delta) -> Delta:
        """Return a delta without the log-probabilities of the prompt that an earlier attempt sent."""
        if not delta.prompt_logprobs:
            return delta
        known, begin = self.num_prompt_scored, delta.prompt_index
        self.num_prompt_scored = max(known, begin + len(delta.prompt_logprobs))
        rest = delta.prompt_logprobs[max(0, known - begin) :]
        return replace(delta, prompt_logprobs=rest or None, prompt_index=max(known, begin))

    def prompt_digests(self, block_tokens: int) -> list[int]:
        """Return the digests of the prompt's first blocks (`bus.prefix_keys`), computed once.

        Empty for prompt log-probabilities, which take no cached block.
        """
        request = self.request
        if request.sampling.prompt_logprobs is not None:
            return []
        if block_tokens not in self.digests:
            self.digests[block_tokens] = prompt_digests(
                request.cache_salt, request.prompt_token_ids, block_tokens
            )
        return self.digests[block_tokens]

    @property
    def log_ids(self) -> dict[str, str]:
        """`extra` of a log line: the client's id of its call, and the id of this request."""
        return {"request_id": self.request.trace_id, "sequence": self.id}

    def tpot_s(self) -> float | None:
        """Return the mean seconds between tokens; None for fewer than two."""
        gaps = len(self.received) - 1
        return (self.last_token - self.first_token) / gaps if gaps > 0 else None

    def missed_finish(self) -> FinishReason | None:
        """Return how the request ended if it has all its tokens and only the last message was lost."""
        sampling = self.request.sampling
        if self.received and self.received[-1] in sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.received) >= sampling.max_tokens else None

    def end_attempt(self, reason: RetryReason, now: float) -> None:
        """Note in the trace why this attempt does not continue."""
        if self.journey is not None:
            self.journey.void(reason, now)

"""The numbers that this gateway measures, by model: plain counters, cheap enough for every token.

To add a metric, add a field with its help: `gateway.operations.metrics` writes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Final

# vLLM's buckets (vllm/v1/metrics/loggers.py), so that its dashboards fit. Seconds, or tokens.
TTFT: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
PER_TOKEN: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0),
    *(480.0, 960.0, 1920.0, 7680.0),
)
TOKENS: Final = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CHOICES: Final = (1.0, 2.0, 5.0, 10.0, 20.0)


class Distribution:
    """Counts per bucket, the last above every bound; far cheaper per token than prometheus_client's."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True)
class Exported:
    """The declaration of a number at /metrics, as `instar_{name}`, where `name` is that of its field."""

    help: str
    label: str = ""  # label of a Counter's keys
    bounds: tuple[float, ...] = ()  # bounds of a Distribution
    is_vllms: bool = True  # vLLM has the same name


def _number(text: str, *, is_vllms: bool = True) -> Any:
    return field(default=0, metadata={"exported": Exported(text, is_vllms=is_vllms)})


def _counter(text: str, label: str, *, is_vllms: bool = True) -> Any:
    return field(default_factory=Counter, metadata={"exported": Exported(text, label, is_vllms=is_vllms)})


def _spread(text: str, bounds: tuple[float, ...], *, is_vllms: bool = True) -> Any:
    declared = Exported(text, bounds=bounds, is_vllms=is_vllms)
    return field(default_factory=partial(Distribution, bounds), metadata={"exported": declared})


def exported(kind: type[ModelStats | GatewayStats]) -> dict[str, Exported]:
    """Return the declarations of a class's numbers by name, in their order."""
    return {one.name: one.metadata["exported"] for one in fields(kind) if one.metadata}


@dataclass(slots=True)
class ModelStats:
    """Counters since this process began. A request here is one sequence: n=2 counts twice."""

    prompt_tokens: int = _number("Prompt tokens of ended sequences.")
    generation_tokens: int = _number("Tokens received from workers.")
    generation_tokens_by_precision: Counter[str] = _counter(
        "Tokens received, by the lowest precision of any layer in the step that made them.",
        "precision",
        is_vllms=False,
    )
    request_success: Counter[str] = _counter(
        "Sequences that ended, by how: stop, length, abort.", "finished_reason"
    )
    request_failures: Counter[str] = _counter("Sequences accepted that failed, by error code.", "code")
    request_replays: Counter[str] = _counter("Sequences submitted again, by why.", "reason")
    slo_requests: int = _number("Sequences that ended and can be judged by the SLOs.", is_vllms=False)
    slo_ttft_violations: int = _number(
        "Of those, first token later than slo.ttft_s, or never.", is_vllms=False
    )
    slo_tpot_violations: int = _number(
        "Of those, slower from token to token than slo.tpot_s, or failed.", is_vllms=False
    )
    requests_within_slo: int = _number("Of those, within both.", is_vllms=False)
    time_to_first_token_seconds: Distribution = _spread("From a request's arrival to its first token.", TTFT)
    inter_token_latency_seconds: Distribution = _spread("From token to token of one sequence.", PER_TOKEN)
    e2e_request_latency_seconds: Distribution = _spread("From a request's arrival to its end.", LATENCY)
    request_queue_time_seconds: Distribution = _spread("From a request's arrival to its first step.", LATENCY)
    request_prompt_tokens: Distribution = _spread("Prompt tokens of a sequence.", TOKENS)
    request_generation_tokens: Distribution = _spread("Tokens generated for a sequence.", TOKENS)
    request_params_n: Distribution = _spread("The parameter n of a call.", CHOICES)
    request_params_max_tokens: Distribution = _spread("The parameter max_tokens of a sequence.", TOKENS)


@dataclass(slots=True)
class GatewayStats:
    """Counters of the whole gateway since this process began, and those of each model."""

    models: defaultdict[str, ModelStats] = field(default_factory=partial(defaultdict, ModelStats))
    admission_rejections: Counter[str] = _counter("Calls refused, by error code.", "reason")
    key_rejections: Counter[str] = _counter("Calls with a known API key that were refused.", "key")
    ignored_message_fields: int = _number("Fields of chat messages that have no effect here.")
    late_deltas: int = _number("Deltas dropped: of a void attempt or a fenced epoch.")
    token_gaps: int = _number("Requests that missed a token.")

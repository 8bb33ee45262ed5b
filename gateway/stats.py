"""The numbers that this gateway measures, by model: plain counters, cheap enough for every token.

Intervals are differences of this process's monotonic clock. To add a metric, add a field here with its name
and help: `gateway.operations.metrics` writes every field that has them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Final

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
    """Counts per bucket; `counts[-1]` is above every bound.

    A fraction of prometheus_client's cost per observation, which matters once per token.
    """

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
    """The declaration of a number at /metrics, as `instar_{name}`.

    `label`: of the keys of a Counter. `is_vllms`: vLLM has it under the same name. `attribute` and
    `is_distribution` are those of the field that has it.
    """

    name: str
    help: str
    label: str = ""
    is_vllms: bool = True
    attribute: str = ""
    is_distribution: bool = False


def _as(name: str, text: str, label: str = "", *, is_vllms: bool = True) -> dict[str, Exported]:
    return {"exported": Exported(name, text, label, is_vllms)}


def exported(kind: type[ModelStats | GatewayStats]) -> list[Exported]:
    """Return the declarations of a class's numbers, in their order."""
    return [
        replace(declared, attribute=one.name, is_distribution=one.type == Distribution.__name__)
        for one in fields(kind)
        if (declared := one.metadata.get("exported"))
    ]


@dataclass(slots=True)
class ModelStats:
    """Counters since this process began. A request here is one sequence: n=2 counts twice."""

    prompt_tokens: int = field(default=0, metadata=_as("prompt_tokens", "Prompt tokens of ended sequences."))
    generation_tokens: int = field(
        default=0, metadata=_as("generation_tokens", "Tokens received from workers.")
    )
    tokens_by_precision: Counter[str] = field(
        default_factory=Counter,
        metadata=_as(
            "generation_tokens_by_precision",
            "Tokens received, by the lowest precision of any layer in the step that made them.",
            "precision",
            is_vllms=False,
        ),
    )
    finished: Counter[str] = field(
        default_factory=Counter,
        metadata=_as(
            "request_success", "Sequences that ended, by how: stop, length, abort.", "finished_reason"
        ),
    )
    failures: Counter[str] = field(
        default_factory=Counter,
        metadata=_as("request_failures", "Sequences accepted that failed, by error code.", "code"),
    )
    replays: Counter[str] = field(
        default_factory=Counter,
        metadata=_as("request_replays", "Sequences submitted again, by why.", "reason"),
    )
    slo_requests: int = field(
        default=0,
        metadata=_as("slo_requests", "Sequences that ended and can be judged by the SLOs.", is_vllms=False),
    )
    slo_ttft_violations: int = field(
        default=0,
        metadata=_as(
            "slo_ttft_violations", "Of those, first token later than slo.ttft_s, or never.", is_vllms=False
        ),
    )
    slo_tpot_violations: int = field(
        default=0,
        metadata=_as(
            "slo_tpot_violations",
            "Of those, slower from token to token than slo.tpot_s, or failed.",
            is_vllms=False,
        ),
    )
    within_slo: int = field(
        default=0, metadata=_as("requests_within_slo", "Of those, within both.", is_vllms=False)
    )
    time_to_first_token: Distribution = field(
        default_factory=partial(Distribution, TTFT),
        metadata=_as("time_to_first_token_seconds", "From a request's arrival to its first token."),
    )
    inter_token_latency: Distribution = field(
        default_factory=partial(Distribution, PER_TOKEN),
        metadata=_as("inter_token_latency_seconds", "From token to token of one sequence."),
    )
    e2e_request_latency: Distribution = field(
        default_factory=partial(Distribution, LATENCY),
        metadata=_as("e2e_request_latency_seconds", "From a request's arrival to its end."),
    )
    request_queue_time: Distribution = field(
        default_factory=partial(Distribution, LATENCY),
        metadata=_as("request_queue_time_seconds", "From a request's arrival to its first step."),
    )
    request_prompt_tokens: Distribution = field(
        default_factory=partial(Distribution, TOKENS),
        metadata=_as("request_prompt_tokens", "Prompt tokens of a sequence."),
    )
    request_generation_tokens: Distribution = field(
        default_factory=partial(Distribution, TOKENS),
        metadata=_as("request_generation_tokens", "Tokens generated for a sequence."),
    )
    request_params_n: Distribution = field(
        default_factory=partial(Distribution, CHOICES),
        metadata=_as("request_params_n", "The parameter n of a call."),
    )
    request_params_max_tokens: Distribution = field(
        default_factory=partial(Distribution, TOKENS),
        metadata=_as("request_params_max_tokens", "The parameter max_tokens of a sequence."),
    )

    def ended(
        self, *, num_prompt_tokens: int, num_generated_tokens: int, max_tokens: int, seconds: float
    ) -> None:
        """One sequence ended, however."""
        self.prompt_tokens += num_prompt_tokens
        self.e2e_request_latency.observe(seconds)
        self.request_prompt_tokens.observe(num_prompt_tokens)
        self.request_generation_tokens.observe(num_generated_tokens)
        self.request_params_max_tokens.observe(max_tokens)


@dataclass(slots=True)
class GatewayStats:
    """Counters of the whole gateway since this process began, and those of each model."""

    models: dict[str, ModelStats] = field(default_factory=dict)
    rejections: Counter[str] = field(
        default_factory=Counter,
        metadata=_as("admission_rejections", "Calls refused, by error code.", "reason"),
    )
    late_deltas: int = field(
        default=0, metadata=_as("late_deltas", "Deltas dropped: of a void attempt or a fenced epoch.")
    )
    gaps: int = field(default=0, metadata=_as("token_gaps", "Requests that missed a token."))

    def of(self, model: str) -> ModelStats:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelStats()
        return found

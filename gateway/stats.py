"""What this gateway measured itself, per model: plain numbers, cheap enough for every token.

Intervals are differences of this process's monotonic clock. `gateway.operations.metrics` turns them
into text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
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
    """Counts per bucket; `counts[-1]` is above every bound. A fraction of prometheus_client's cost per
    observation, which matters once per token."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class ModelStats:
    """Counters since this process began. A request here is one sequence: n=2 counts twice."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    tokens_by_precision: Counter[str] = field(default_factory=Counter)  # the lowest of any layer in its step
    finished: Counter[str] = field(default_factory=Counter)  # by reason: stop, length, abort
    failures: Counter[str] = field(default_factory=Counter)  # accepted and failed, by error code
    replays: Counter[str] = field(default_factory=Counter)  # by reason
    slo_requests: int = 0  # that ended and can be judged
    slo_ttft_violations: int = 0
    slo_tpot_violations: int = 0
    within_slo: int = 0
    time_to_first_token: Distribution = field(default_factory=partial(Distribution, TTFT))
    inter_token_latency: Distribution = field(default_factory=partial(Distribution, PER_TOKEN))
    e2e_request_latency: Distribution = field(default_factory=partial(Distribution, LATENCY))
    request_queue_time: Distribution = field(default_factory=partial(Distribution, LATENCY))
    request_prompt_tokens: Distribution = field(default_factory=partial(Distribution, TOKENS))
    request_generation_tokens: Distribution = field(default_factory=partial(Distribution, TOKENS))
    request_params_n: Distribution = field(default_factory=partial(Distribution, CHOICES))
    request_params_max_tokens: Distribution = field(default_factory=partial(Distribution, TOKENS))

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
    models: dict[str, ModelStats] = field(default_factory=dict)
    rejections: Counter[str] = field(default_factory=Counter)  # by error code
    late_deltas: int = 0  # of void attempts and fenced epochs
    gaps: int = 0

    def of(self, model: str) -> ModelStats:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelStats()
        return found

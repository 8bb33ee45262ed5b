"""Telemetry from workers to the monitor, and the metrics that the monitor makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from bus.messages.shapes import LayerShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A mergeable sketch: the number of values by bucket (see `bus.histogram`), and their sum."""

    counts: dict[int, int] = field(default_factory=dict)
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTelemetry:
    """One instance as its worker sees it, in seconds, tokens and blocks.

    Gauges are current; counters and histograms are totals since the epoch began.
    """

    id: str
    running: int
    waiting: int
    waiting_tokens: int
    kv_blocks: int
    kv_used: int  # by all members of its group
    layers: list[LayerShape]
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    finished: dict[str, int]
    queue_seconds: Histogram
    step_seconds: Histogram
    time_to_first_token: Histogram  # from when the worker received the request
    time_per_output_token: Histogram
    oldest_wait_seconds: float = 0.0
    recomputed_tokens: int = 0  # whose KV was lost or given away
    longest_tokens: int = 0  # prompt and most output of the longest request here, running or waiting
    kv_own: int = 0  # blocks of its own requests, which it keeps when its group splits; part of `kv_used`
    workers: list[str] = field(default_factory=list)  # of its group, by shard; empty: it serves alone


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCounts:
    """Pages of a worker's pool by use. Always budget = weights + kv + free."""

    budget: int
    weights: int
    kv: int
    free: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTelemetry:
    """A worker's report; stream `telemetry`. Several a second under load, one a second when idle."""

    worker: str
    epoch: int
    at_ms: int  # the worker's wall clock, for display; intervals come from its monotonic clock
    busy: float  # share of the time since the last report spent in engine steps, 0..1
    pages: PageCounts
    instances: list[InstanceTelemetry]
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMetrics:
    """One instance, smoothed over the monitor's window.

    A percentile is None if no request had such a value in the window: absent is not zero.
    """

    id: str
    worker: str
    epoch: int
    running: float
    waiting: float
    waiting_tokens: float
    kv_blocks: int
    kv_used: float
    kv_usage: float  # 0..1
    queue_seconds_p95: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    preemptions_per_second: float
    last: InstanceTelemetry  # unsmoothed, for /metrics and /admin/state
    queue_delay_seconds: float = 0.0  # queue_seconds_p95 or the age of the queue's head, the longer one


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMetrics:
    """The last report of one worker, and its age."""

    worker: str
    epoch: int
    busy: float
    pages: PageCounts
    age_seconds: float  # since the last report; policies hold still on stale metrics
    at_ms: int = 0  # of that report, by the worker's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """The monitor's smoothed picture of the cluster; stream `metrics`."""

    at_ms: int
    window_seconds: float
    workers: list[WorkerMetrics]
    instances: list[InstanceMetrics]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMoment:
    """One instance at one time, as charts show it. The members of a group count as one."""

    running: float
    waiting: float
    queue_delay_s: float
    ttft_p95_s: float | None  # None: no first token in the window
    tpot_p95_s: float | None
    kv_blocks: int
    kv_used: float
    layers_below_full: int
    tp: int
    tokens_per_s: float  # generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One point of the monitor's history; stream `moments`, which holds 15 minutes at least."""

    at: float  # seconds since 1970
    instances: dict[str, InstanceMoment]

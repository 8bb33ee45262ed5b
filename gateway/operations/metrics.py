"""/metrics in Prometheus' text format: vLLM's names and buckets under `instar_`.

Three sources: what this gateway measured itself; the workers' last reports, by way of the monitor; and the
process. A gauge whose report is stale is left out, since a router that reads 0 takes a silent worker for an
idle one. `metrics_compat = "vllm"` repeats the names that routers read under `vllm:`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bus.messages import (
    KIND_OF,
    Cause,
    InstanceCard,
    InstanceMetrics,
    LayerShape,
    MorphKind,
    MorphOutcome,
    layers_below_full,
)
from bus.precisions import PRECISIONS
from gateway.morphs import Morphs
from gateway.state import Gateway
from gateway.stats import Distribution, ModelStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
ENGINE: Final = ["model_name", "engine"]
OUTCOMES: Final[tuple[MorphOutcome, ...]] = ("applied", "deferred", "stale", "conflict", "failed")

_PRESSURE: Final = ("kv_usage", "queue_delay", "preemptions")
_AWAY: Final = ("retirement", "replaced", "undone", "orphan")
CAUSES: Final[dict[MorphKind, tuple[Cause, ...]]] = {
    "resize": (*_PRESSURE, "order"),
    "swap": (*_PRESSURE, "ease", "layer_limit", "order"),
    "transform": ("long_request", "no_long_request", "order", "deployment", *_AWAY),
    "deploy": ("deployment", "better", "packed"),
    "retire": _AWAY,
}

DISTRIBUTIONS: Final = {
    "time_to_first_token_seconds": ("time_to_first_token", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token_latency", "From token to token of one sequence."),
    "e2e_request_latency_seconds": ("e2e_request_latency", "From a request's arrival to its end."),
    "request_queue_time_seconds": ("request_queue_time", "From a request's arrival to its first step."),
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a sequence."),
    "request_generation_tokens": ("request_generation_tokens", "Tokens generated for a sequence."),
    "request_params_n": ("request_params_n", "The parameter n of a call."),
    "request_params_max_tokens": ("request_params_max_tokens", "The parameter max_tokens of a sequence."),
}
# What the Gateway API inference extension and other routers read, with the labels they expect.
ROUTERS_READ: Final = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
)


def exposition(gateway: Gateway) -> bytes:
    """The whole page."""
    registry = CollectorRegistry()
    registry.register(_Page(gateway))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        yield from _own("instar_", self._gateway)
        yield from _morphs("instar_", self._gateway.morphs)
        yield from _models("instar_", self._gateway.stats.models)
        yield from _slos("instar_", self._gateway.stats.models)
        yield _by_precision("instar_", self._gateway.stats.models)
        instances = list(_fresh(self._gateway))
        yield from _instances("instar_", instances)
        if self._gateway.settings.gateway.metrics_compat == "vllm":
            for metric in _instances("vllm:", instances):
                if metric.name.removeprefix("vllm:") in ROUTERS_READ:
                    yield metric
            yield from _models("vllm:", self._gateway.stats.models)


@dataclass(frozen=True, slots=True)
class Fresh:
    """A worker's part of an instance. What belongs to a whole group, its KV for one, is told once, of the
    worker that `leads`; requests and counters are each worker's own: no counter falls when a group parts."""

    card: InstanceCard
    leads: bool
    metrics: InstanceMetrics


def _fresh(gateway: Gateway) -> Iterator[Fresh]:
    now = time.monotonic()
    for worker in gateway.cluster.workers.values():
        for card in worker.instances:
            metrics = gateway.cluster.instance_metrics(card.id, worker.epoch, now)
            if metrics is not None:
                yield Fresh(card, not card.workers or card.workers[0] == worker.id, metrics)


def _own(prefix: str, gateway: Gateway) -> Iterator[Metric]:
    stats, admission = gateway.stats, gateway.admission
    yield _gauge(
        f"{prefix}gateway_requests_inflight", "Sequences accepted and not ended.", admission.inflight
    )
    yield _gauge(f"{prefix}gateway_requests_queued", "Of those, not begun by a worker.", admission.queued)
    yield _gauge(f"{prefix}gateway_streams", "Open streams.", len(gateway.streams))
    yield _gauge(f"{prefix}gateway_bus_up", "Whether Redis answers.", int(gateway.bus.up))
    yield _gauge(f"{prefix}workers", "Workers with a lease.", len(gateway.cluster.workers))
    late = "Deltas dropped: of a void attempt or a fenced epoch."
    yield CounterMetricFamily(f"{prefix}late_deltas", late, value=stats.late_deltas)
    yield CounterMetricFamily(f"{prefix}token_gaps", "Requests that missed a token.", value=stats.gaps)
    rejections = CounterMetricFamily(f"{prefix}admission_rejections", "Calls refused.", labels=["reason"])
    for reason, count in sorted(stats.rejections.items()):
        rejections.add_metric([reason], count)
    yield rejections
    if (tracer := gateway.tracer) is not None:
        made, sent = "Spans of traces made.", "Of those, taken by the collector; the rest waits, or is lost."
        yield CounterMetricFamily(f"{prefix}trace_spans_made", made, value=tracer.num_made)
        yield CounterMetricFamily(f"{prefix}trace_spans_sent", sent, value=tracer.num_sent)


def _morphs(prefix: str, morphs: Morphs) -> Iterator[Metric]:
    """Of the whole cluster, as reported while this gateway listened: each gateway says the same. Told from
    0 on, since `increase` sees nothing of a counter that begins with its first event."""
    ended = CounterMetricFamily(
        f"{prefix}morphs", "Morphs that ended, by outcome.", labels=["kind", "outcome"]
    )
    for kind, outcome in product(KIND_OF.values(), OUTCOMES):
        ended.add_metric([kind, outcome], morphs.outcomes[kind, outcome])
    seconds = HistogramMetricFamily(
        f"{prefix}morph_seconds", "From a morph's start to its end, whatever the outcome.", labels=["kind"]
    )
    for kind, distribution in sorted(morphs.seconds.items()):
        seconds.add_metric([kind], _buckets(distribution), distribution.total)
    pauses = HistogramMetricFamily(
        f"{prefix}morph_pause_seconds",
        "Of a morph, all that the engine spent on it between steps, as its worker tells.",
        labels=["kind"],
    )
    for kind, distribution in sorted(morphs.pauses.items()):
        pauses.add_metric([kind], _buckets(distribution), distribution.total)
    decisions = CounterMetricFamily(
        f"{prefix}morph_decisions",
        "Morphs that ended, by why they were decided and by outcome.",
        labels=["kind", "cause", "outcome"],
    )
    known = (
        (kind, cause, outcome) for kind, causes in CAUSES.items() for cause in causes for outcome in OUTCOMES
    )
    for labels in sorted({*known, *morphs.decisions}):
        decisions.add_metric(labels, morphs.decisions[labels])
    yield from (ended, seconds, pauses, decisions)


def _models(prefix: str, models: dict[str, ModelStats]) -> Iterator[Metric]:
    label = ["model_name"]
    prompt = CounterMetricFamily(f"{prefix}prompt_tokens", "Prompt tokens of ended sequences.", labels=label)
    generated = CounterMetricFamily(
        f"{prefix}generation_tokens", "Tokens received from workers.", labels=label
    )
    success = CounterMetricFamily(
        f"{prefix}request_success", "Sequences that ended, by how.", labels=[*label, "finished_reason"]
    )
    replays = CounterMetricFamily(
        f"{prefix}request_replays", "Sequences submitted again, by why.", labels=[*label, "reason"]
    )
    failures = CounterMetricFamily(
        f"{prefix}request_failures", "Sequences accepted that failed, by code.", labels=[*label, "code"]
    )
    for model, stats in models.items():
        prompt.add_metric([model], stats.prompt_tokens)
        generated.add_metric([model], stats.generation_tokens)
        for reason, count in sorted(stats.finished.items()):
            success.add_metric([model, reason], count)
        for code, count in sorted(stats.failures.items()):
            failures.add_metric([model, code], count)
        for reason, count in sorted(stats.replays.items()):
            replays.add_metric([model, reason], count)
    yield from (prompt, generated, success, failures, replays)
    for name, (field, text) in DISTRIBUTIONS.items():
        family = HistogramMetricFamily(f"{prefix}{name}", text, labels=label)
        for model, stats in models.items():
            distribution: Distribution = getattr(stats, field)
            family.add_metric([model], _buckets(distribution), distribution.total)
        yield family


def _slos(prefix: str, models: dict[str, ModelStats]) -> Iterator[Metric]:
    """A violation of both counts in both; requests = within + those that violated any."""
    told: dict[str, tuple[str, Callable[[ModelStats], int]]] = {
        "slo_requests": ("Sequences that ended and can be judged by the SLOs.", lambda one: one.slo_requests),
        "slo_ttft_violations": (
            "Of those, first token later than slo.ttft_s, or never.",
            lambda one: one.slo_ttft_violations,
        ),
        "slo_tpot_violations": (
            "Of those, slower from token to token than slo.tpot_s, or failed.",
            lambda one: one.slo_tpot_violations,
        ),
        "requests_within_slo": ("Of those, within both.", lambda one: one.within_slo),
    }
    for name, (text, value) in told.items():
        family = CounterMetricFamily(f"{prefix}{name}", text, labels=["model_name"])
        for model, stats in models.items():
            family.add_metric([model], value(stats))
        yield family


def _by_precision(prefix: str, models: dict[str, ModelStats]) -> Metric:
    family = CounterMetricFamily(
        f"{prefix}generation_tokens_by_precision",
        "Tokens received, by the lowest precision of any layer in the step that made them.",
        labels=["model_name", "precision"],
    )
    for model, stats in models.items():
        for precision, count in sorted(stats.tokens_by_precision.items()):
            family.add_metric([model, precision], count)
    return family


def _instances(prefix: str, instances: Iterable[Fresh]) -> Iterator[Metric]:
    """Of the workers' last reports, unsmoothed."""
    running = GaugeMetricFamily(f"{prefix}num_requests_running", "Sequences in the batch.", labels=ENGINE)
    waiting = GaugeMetricFamily(f"{prefix}num_requests_waiting", "Sequences in the queue.", labels=ENGINE)
    usage = GaugeMetricFamily(
        f"{prefix}kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=ENGINE
    )
    total = GaugeMetricFamily(f"{prefix}kv_blocks", "KV blocks: changes while serving.", labels=ENGINE)
    used = GaugeMetricFamily(f"{prefix}kv_blocks_used", "KV blocks in use.", labels=ENGINE)
    below = GaugeMetricFamily(
        f"{prefix}layers_below_full", "Layers of which a half is below full precision.", labels=ENGINE
    )
    layers = GaugeMetricFamily(
        f"{prefix}layers",
        "Layers by precision; attention and FFN count a half each.",
        labels=[*ENGINE, "precision"],
    )
    config = GaugeMetricFamily(
        f"{prefix}cache_config_info", "As now.", labels=[*ENGINE, "block_size", "num_gpu_blocks"]
    )
    preemptions = CounterMetricFamily(f"{prefix}num_preemptions", "Sequences put back.", labels=ENGINE)
    recomputed = CounterMetricFamily(
        f"{prefix}recomputed_tokens", "Tokens whose KV was lost or given away and made again.", labels=ENGINE
    )
    degree = GaugeMetricFamily(
        f"{prefix}tensor_parallel_size", "Workers of the instance: changes while serving.", labels=ENGINE
    )
    for instance in instances:
        labels, last = [instance.card.model, instance.card.id], instance.metrics.last
        running.add_metric(labels, last.running)
        waiting.add_metric(labels, last.waiting)
        preemptions.add_metric(labels, last.preemptions)
        recomputed.add_metric(labels, last.recomputed_tokens)
        if not instance.leads:
            continue
        degree.add_metric(labels, instance.card.tp)
        usage.add_metric(labels, last.kv_used / last.kv_blocks if last.kv_blocks else 0.0)
        total.add_metric(labels, last.kv_blocks)
        used.add_metric(labels, last.kv_used)
        below.add_metric(labels, layers_below_full(last.layers))
        for precision, count in _layers(last.layers).items():
            layers.add_metric([*labels, precision], count)
        config.add_metric([*labels, str(instance.card.block_tokens), str(last.kv_blocks)], 1)
    yield from (running, waiting, usage, total, used, below, layers, config, preemptions, recomputed, degree)


def _layers(shape: Iterable[LayerShape]) -> dict[str, float]:
    """How many are in each precision, those in none too."""
    halves = Counter(half for layer in shape for half in (layer.attention, layer.ffn))
    return {precision: halves[precision] / 2 for precision in PRECISIONS}


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Cumulative, as the format wants them."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(distribution.bounds, distribution.counts, strict=False):
        total += count
        found.append((str(bound), total))
    return [*found, ("+Inf", total + distribution.counts[-1])]

"""/metrics in Prometheus' text format: vLLM's names and buckets under `instar_`.

A gauge whose report is stale is left out: a router that reads 0 takes a silent worker for an idle one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, product
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bus.leader import LeaderView
from bus.messages import (
    GpuTelemetry,
    InstanceCard,
    InstanceTelemetry,
    LayerShape,
    MetricEntry,
    layers_below_full,
)
from bus.morphs import MORPH_KINDS, MORPHS, MorphOutcome
from bus.precisions import PRECISIONS
from gateway.controller_failures import WORKS, ControllerFailures
from gateway.morphs import Morphs
from gateway.state import Gateway
from gateway.stats import Exported, GatewayStats, ModelStats, exported

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES: Final[tuple[MorphOutcome, ...]] = ("applied", "deferred", "stale", "conflict", "failed")


def exposition(gateway: Gateway) -> bytes:
    """Render the whole page."""
    registry = CollectorRegistry()
    registry.register(_Page(gateway))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        yield from _own(gateway)
        yield from _leader(gateway.leader)
        yield _controller_failures(gateway.controller_failures)
        yield from _morphs(gateway.morphs)
        yield from _models("instar_", gateway.stats.models)
        instances = list(_fresh(gateway))
        yield from (metric.family("instar_", instances) for metric in INSTANCE_METRICS)
        yield from _gpus(gateway)
        if gateway.settings.gateway.metrics_compat == "vllm":
            yield from (one.family("vllm:", instances) for one in INSTANCE_METRICS if one.entry.routers_read)
            yield from _models("vllm:", gateway.stats.models)


# The card of a worker's part of an instance, whether it leads the instance, and the worker's last report.
Reported = tuple[InstanceCard, bool, InstanceTelemetry]
Values = Mapping[tuple[str, ...], Any]  # value by the values of a metric's labels


@dataclass(frozen=True, slots=True)
class InstanceMetric:
    """A metric, and its value by a worker's last report, unsmoothed: with `labels` one for each of theirs."""

    entry: MetricEntry
    value: Callable[[InstanceCard, InstanceTelemetry], float | Mapping[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()

    def family(self, prefix: str, instances: Iterable[Reported]) -> Metric:
        """Return the metric with its samples of all instances."""
        entry, labels = self.entry, ["model_name", "engine", *self.labels]
        kind = CounterMetricFamily if entry.is_counter else GaugeMetricFamily
        family = kind(prefix + entry.name, entry.help, labels=labels)
        for card, leads, last in instances:
            if leads or not entry.of_leader:
                value = self.value(card, last)
                for more, number in (value if isinstance(value, Mapping) else {(): value}).items():
                    family.add_metric([card.model, card.id, *more], number)
        return family


def _declared(name: str, entry: MetricEntry) -> InstanceMetric:
    """Return the metric of a field of `InstanceTelemetry`."""
    return InstanceMetric(entry, lambda _, last: getattr(last, name))


def _of_leader(name: str, text: str, *, routers_read: bool = False) -> MetricEntry:
    return MetricEntry(name, text, of_leader=True, routers_read=routers_read)


INSTANCE_METRICS: Final = (
    *(_declared(one.name, one.metadata["metric"]) for one in fields(InstanceTelemetry) if one.metadata),
    InstanceMetric(
        _of_leader("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", routers_read=True),
        lambda _, last: last.kv_used / last.kv_blocks if last.kv_blocks else 0.0,
    ),
    InstanceMetric(
        _of_leader("layers_below_full", "Layers of which a half is below full precision."),
        lambda _, last: layers_below_full(last.layers),
    ),
    InstanceMetric(
        _of_leader("layers", "Layers by precision; attention and FFN count a half each."),
        lambda _, last: _by_precision(last.layers),
        labels=("precision",),
    ),
    InstanceMetric(
        _of_leader("cache_config_info", "The KV cache as it is now.", routers_read=True),
        lambda card, last: {(str(card.block_tokens), str(last.kv_blocks)): 1},
        labels=("block_size", "num_gpu_blocks"),
    ),
    InstanceMetric(
        _of_leader("expert_use_less_used_half", "Share of use of the less used half of experts, 0 to 0.5."),
        lambda _, last: {(): _mean_of_half(last.expert_use)} if last.expert_use else {},
    ),
    InstanceMetric(
        _of_leader("tensor_parallel_size", "Workers of the instance: changes while serving."),
        lambda card, _: card.tp,
    ),
)


def _by_precision(shape: Iterable[LayerShape]) -> dict[tuple[str, ...], float]:
    """Count the layers in each precision, those that none is in too."""
    halves = Counter(half for layer in shape for half in (layer.attention, layer.ffn))
    return {(precision,): halves[precision] / 2 for precision in PRECISIONS}


def _mean_of_half(use: Sequence[Sequence[float]]) -> float:
    """Return the mean over layers of the share that the less used half of their experts has."""
    return sum(half for _, half, _ in use) / len(use)


def _fresh(gateway: Gateway) -> Iterator[Reported]:
    now = time.monotonic()
    for worker in gateway.cluster.workers.values():
        for card in worker.instances:
            if metrics := gateway.cluster.instance_metrics(card.id, worker.epoch, now):
                yield card, card.members(worker.id)[0] == worker.id, metrics.last


def _leader(leader: LeaderView) -> Iterator[Metric]:
    leads = GaugeMetricFamily(
        "instar_controller_leads", "1 while a controller leads; 0: none does.", labels=["controller"]
    )
    leads.add_metric([leader.name], int(leader.lease_ms > 0))
    yield leads
    yield GaugeMetricFamily(
        "instar_controller_term", "Term of the controller that led last; it only grows.", leader.term
    )


def _controller_failures(failures: ControllerFailures) -> Metric:
    """Render what the controller failed at since this gateway listens; each work is there from 0 on."""
    family = CounterMetricFamily(
        "instar_controller_failures",
        "Decisions and orders at which the leading controller failed, by what it did.",
        labels=["work"],
    )
    for work in WORKS:
        family.add_metric([work], failures.counts[work])
    return family


def _gpus(gateway: Gateway) -> Iterator[Metric]:
    """Render the GPUs of workers, smoothed; nothing for a number that a GPU does not tell."""
    cluster, now = gateway.cluster, time.monotonic()
    reports = {one.id: cluster.worker_metrics(one.id, one.epoch, now) for one in cluster.workers.values()}
    gpus = {worker: report.gpu for worker, report in reports.items() if report and report.gpu}
    for one in fields(GpuTelemetry):
        if not one.metadata:
            continue
        entry: MetricEntry = one.metadata["metric"]
        kind = CounterMetricFamily if entry.is_counter else GaugeMetricFamily
        labels = ["worker", entry.label] if entry.label else ["worker"]
        family = kind(f"instar_{entry.name}", entry.help, labels=labels)
        for worker, gpu in gpus.items():
            value = getattr(gpu, one.name)
            by_label = {(key,): each for key, each in value.items()} if entry.label else {(): value}
            for more, number in by_label.items():
                if number is not None:
                    family.add_metric([worker, *more], number)
        if gpus:
            yield family


def _own(gateway: Gateway) -> Iterator[Metric]:
    admission = gateway.admission
    for name, text, value in (
        ("gateway_requests_inflight", "Sequences accepted and not ended.", admission.inflight),
        ("gateway_requests_queued", "Of those, not begun by a worker.", admission.queued),
        ("gateway_streams", "Open streams.", len(gateway.streams)),
        ("gateway_bus_up", "Whether Redis answers.", int(gateway.bus.up)),
        ("workers", "Workers with a lease.", len(gateway.cluster.workers)),
    ):
        yield GaugeMetricFamily(f"instar_{name}", text, value=value)
    for name, declared in exported(GatewayStats).items():
        yield _family(f"instar_{name}", declared, {(): getattr(gateway.stats, name)})
    if (tracer := gateway.tracer) is not None:
        made, sent = "Spans of traces made.", "Of those, taken by the collector; the rest waits, or is lost."
        yield CounterMetricFamily("instar_trace_spans_made", made, value=tracer.num_made)
        yield CounterMetricFamily("instar_trace_spans_sent", sent, value=tracer.num_sent)


def _models(prefix: str, models: Mapping[str, ModelStats]) -> Iterator[Metric]:
    for name, declared in exported(ModelStats).items():
        if prefix == "instar_" or declared.is_vllms:
            values: Values = {(model,): getattr(one, name) for model, one in models.items()}
            yield _family(prefix + name, declared, values, "model_name")


def _family(name: str, declared: Exported, values: Values, *labels: str) -> Metric:
    """Return the metric of a declared number; the keys of `values` are the values of `labels`."""
    if declared.bounds:
        return _histogram(name, declared.help, values, *labels)
    of_key = [declared.label] if declared.label else []
    counter = CounterMetricFamily(name, declared.help, labels=[*labels, *of_key])
    for key, value in values.items():
        counts = {(*key, one): count for one, count in sorted(value.items())} if of_key else {key: value}
        for label, count in counts.items():
            counter.add_metric(label, count)
    return counter


def _histogram(name: str, text: str, values: Values, *labels: str) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        bounds = [*map(str, value.bounds), "+Inf"]
        family.add_metric(key, list(zip(bounds, accumulate(value.counts), strict=True)), value.total)
    return family


def _morphs(morphs: Morphs) -> Iterator[Metric]:
    """Render the cluster's morphs since this gateway listens; all counters are there from 0 on."""
    ended = CounterMetricFamily("instar_morphs", "Morphs that ended, by outcome.", labels=["kind", "outcome"])
    for kind, outcome in product(MORPH_KINDS, OUTCOMES):
        ended.add_metric([kind, outcome], morphs.outcomes[kind, outcome])
    decisions = CounterMetricFamily(
        "instar_morph_decisions",
        "Morphs that ended, by why they were decided and by outcome.",
        labels=["kind", "cause", "outcome"],
    )
    known = {
        (entry.name, cause, outcome) for entry in MORPHS for cause in entry.causes for outcome in OUTCOMES
    }
    for labels in sorted({*known, *morphs.decisions}):
        decisions.add_metric(labels, morphs.decisions[labels])
    forecasts = CounterMetricFamily(
        "instar_forecasts", "Forecasts of pressure, by whether it came.", labels=["outcome"]
    )
    for score, is_right in (("right", True), ("wrong", False)):
        forecasts.add_metric([score], morphs.forecasts[is_right])
    yield from (ended, decisions, forecasts)
    for name, text, distributions in (
        ("morph_seconds", "From a morph's start to its end, whatever the outcome.", morphs.seconds),
        ("morph_pause_seconds", "What the engine spent on a morph between steps, in all.", morphs.pauses),
    ):
        by_kind: Values = {(kind,): one for kind, one in sorted(distributions.items())}
        yield _histogram(f"instar_{name}", text, by_kind, "kind")

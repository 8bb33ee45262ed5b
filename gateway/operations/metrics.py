"""/metrics in Prometheus' text format: vLLM's names and buckets under `instar_`.

Three sources: what this gateway measured itself; the workers' last reports, by way of the monitor; and the
process. A gauge whose report is stale is left out, since a router that reads 0 takes a silent worker for an
idle one. `metrics_compat = "vllm"` repeats the names that routers read under `vllm:`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bus.messages import (
    InstanceCard,
    InstanceMetrics,
    InstanceTelemetry,
    LayerShape,
    MorphOutcome,
    layers_below_full,
)
from bus.morphs import MORPH_KINDS, MORPHS
from bus.precisions import PRECISIONS
from gateway.morphs import Morphs
from gateway.state import Gateway
from gateway.stats import Distribution, Exported, GatewayStats, ModelStats, exported

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
        yield from _morphs(gateway.morphs)
        yield from _models("instar_", gateway.stats.models)
        instances = list(_fresh(gateway))
        yield from (metric.family("instar_", instances) for metric in INSTANCE_METRICS)
        if gateway.settings.gateway.metrics_compat == "vllm":
            yield from (one.family("vllm:", instances) for one in INSTANCE_METRICS if one.routers_read)
            yield from _models("vllm:", gateway.stats.models)


@dataclass(frozen=True, slots=True)
class Fresh:
    """A worker's part of an instance, by its last report. `leads`: its card stands for the instance."""

    card: InstanceCard
    leads: bool
    metrics: InstanceMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceMetric:
    """The declaration of a number of instances, by their workers' last reports, unsmoothed.

    `values`: by the values of `labels`. `of_leader`: a fact of the whole instance, such as its KV, which its
    first worker reports; other numbers are each worker's own, so that no counter falls when a group parts.
    `routers_read`: also under vLLM's name, for the Gateway API inference extension and other routers.
    """

    name: str
    help: str
    values: Callable[[InstanceCard, InstanceTelemetry], Mapping[tuple[str, ...], float]]
    labels: tuple[str, ...] = ()
    family_type: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily
    of_leader: bool = True
    routers_read: bool = False

    def family(self, prefix: str, instances: Iterable[Fresh]) -> Metric:
        """Return the metric with its samples of all instances."""
        family = self.family_type(
            prefix + self.name, self.help, labels=["model_name", "engine", *self.labels]
        )
        for one in instances:
            if one.leads or not self.of_leader:
                for more, value in self.values(one.card, one.metrics.last).items():
                    family.add_metric([one.card.model, one.card.id, *more], value)
        return family


def _just(value: Callable[[InstanceTelemetry], float]) -> Callable[..., Mapping[tuple[str, ...], float]]:
    return lambda card, last: {(): value(last)}


INSTANCE_METRICS: Final = (
    InstanceMetric(
        name="num_requests_running",
        help="Sequences in the batch.",
        values=_just(lambda last: last.running),
        of_leader=False,
        routers_read=True,
    ),
    InstanceMetric(
        name="num_requests_waiting",
        help="Sequences in the queue.",
        values=_just(lambda last: last.waiting),
        of_leader=False,
        routers_read=True,
    ),
    InstanceMetric(
        name="kv_cache_usage_perc",
        help="Share of KV blocks in use, 0 to 1.",
        values=_just(lambda last: last.kv_used / last.kv_blocks if last.kv_blocks else 0.0),
        routers_read=True,
    ),
    InstanceMetric(
        name="kv_blocks", help="KV blocks: changes while serving.", values=_just(lambda last: last.kv_blocks)
    ),
    InstanceMetric(name="kv_blocks_used", help="KV blocks in use.", values=_just(lambda last: last.kv_used)),
    InstanceMetric(
        name="layers_below_full",
        help="Layers of which a half is below full precision.",
        values=_just(lambda last: layers_below_full(last.layers)),
    ),
    InstanceMetric(
        name="layers",
        help="Layers by precision; attention and FFN count a half each.",
        values=lambda card, last: _by_precision(last.layers),
        labels=("precision",),
    ),
    InstanceMetric(
        name="cache_config_info",
        help="The KV cache as it is now.",
        values=lambda card, last: {(str(card.block_tokens), str(last.kv_blocks)): 1},
        labels=("block_size", "num_gpu_blocks"),
        routers_read=True,
    ),
    InstanceMetric(
        name="num_preemptions",
        help="Sequences put back.",
        values=_just(lambda last: last.preemptions),
        family_type=CounterMetricFamily,
        of_leader=False,
    ),
    InstanceMetric(
        name="recomputed_tokens",
        help="Tokens whose KV was lost or given away and made again.",
        values=_just(lambda last: last.recomputed_tokens),
        family_type=CounterMetricFamily,
        of_leader=False,
    ),
    InstanceMetric(
        name="tensor_parallel_size",
        help="Workers of the instance: changes while serving.",
        values=lambda card, last: {(): card.tp},
    ),
)


def _by_precision(shape: Iterable[LayerShape]) -> dict[tuple[str, ...], float]:
    """Count the layers in each precision, those that none is in too."""
    halves = Counter(half for layer in shape for half in (layer.attention, layer.ffn))
    return {(precision,): halves[precision] / 2 for precision in PRECISIONS}


def _fresh(gateway: Gateway) -> Iterator[Fresh]:
    now = time.monotonic()
    for worker in gateway.cluster.workers.values():
        for card in worker.instances:
            metrics = gateway.cluster.instance_metrics(card.id, worker.epoch, now)
            if metrics is not None:
                yield Fresh(card, not card.workers or card.workers[0] == worker.id, metrics)


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
    for declared in exported(GatewayStats):
        yield _family("instar_", declared, {(): gateway.stats})
    if (tracer := gateway.tracer) is not None:
        made, sent = "Spans of traces made.", "Of those, taken by the collector; the rest waits, or is lost."
        yield CounterMetricFamily("instar_trace_spans_made", made, value=tracer.num_made)
        yield CounterMetricFamily("instar_trace_spans_sent", sent, value=tracer.num_sent)


def _models(prefix: str, models: Mapping[str, ModelStats]) -> Iterator[Metric]:
    stats: dict[tuple[str, ...], ModelStats | GatewayStats] = {(model,): one for model, one in models.items()}
    for declared in exported(ModelStats):
        if prefix == "instar_" or declared.is_vllms:
            yield _family(prefix, declared, stats, "model_name")


def _family(
    prefix: str, declared: Exported, stats: Mapping[tuple[str, ...], ModelStats | GatewayStats], *labels: str
) -> Metric:
    """Return the metric of a declared number; the keys of `stats` are the values of `labels`."""
    name, values = (
        prefix + declared.name,
        {key: getattr(one, declared.attribute) for key, one in stats.items()},
    )
    if declared.is_distribution:
        histogram = HistogramMetricFamily(name, declared.help, labels=labels)
        for key, value in values.items():
            histogram.add_metric(key, _buckets(value), value.total)
        return histogram
    of_key = [declared.label] if declared.label else []
    counter = CounterMetricFamily(name, declared.help, labels=[*labels, *of_key])
    for key, value in values.items():
        counts = {(*key, one): count for one, count in sorted(value.items())} if of_key else {key: value}
        for label, count in counts.items():
            counter.add_metric(label, count)
    return counter


def _morphs(morphs: Morphs) -> Iterator[Metric]:
    """Render the morphs of the whole cluster, as reported while this gateway listened.

    Each gateway has the same. All counters are there from 0 on, since `increase` misses the first event of
    one that begins with it.
    """
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
    yield from (ended, decisions)
    for name, text, distributions in (
        ("morph_seconds", "From a morph's start to its end, whatever the outcome.", morphs.seconds),
        ("morph_pause_seconds", "What the engine spent on a morph between steps, in all.", morphs.pauses),
    ):
        family = HistogramMetricFamily(f"instar_{name}", text, labels=["kind"])
        for kind, distribution in sorted(distributions.items()):
            family.add_metric([kind], _buckets(distribution), distribution.total)
        yield family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return the cumulative counts that the format has."""
    total = 0
    found: list[tuple[str, float]] = []
    for bound, count in zip(distribution.bounds, distribution.counts, strict=False):
        total += count
        found.append((str(bound), total))
    return [*found, ("+Inf", total + distribution.counts[-1])]

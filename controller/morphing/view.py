"""What the policy sees of one instance: metrics, pages and card in one place. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bus.client import LiveWorker
from bus.messages import InstanceCard, InstanceMetrics, LayerShape, Metrics, WorkerMetrics
from bus.precisions import LOWEST, Precision, is_below


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One instance in one window. Pages are its worker's, blocks its own, seconds seconds."""

    instance: str
    worker: str
    epoch: int
    age_s: float = 0.0  # of the worker's report behind the metrics
    kv_blocks: int
    kv_used: float
    kv_usage: float  # 0..1
    waiting: float = 0.0
    waiting_blocks: int = 0  # what the queue needs to be admitted, spares for its decodes included
    blocks_free: int = 0
    queue_delay_s: float = 0.0
    preemptions_per_s: float = 0.0
    num_layers: int
    layers_below: int = 0  # hold fewer bits than at rest
    resting: Precision = "full"  # what layers go back to
    coarsest: Precision = LOWEST  # the fewest bits that they may be swapped to
    variants: tuple[Precision, ...] = ("full",)
    min_blocks: int = 0
    pages_free: int = 0
    pages_per_block: float = 0.0  # 0: unknown
    layer_pages: Mapping[Precision, int] = field(default_factory=dict)  # empty: unknown

    @property
    def kv_delay_s(self) -> float:
        """The queueing delay where blocks are what is missing. A queue that fits into the free blocks waits
        for a step or for a place in the batch: more blocks would not shorten it."""
        return self.queue_delay_s if self.waiting_blocks > self.blocks_free else 0.0

    @property
    def pages_spare(self) -> int:
        """Free pages beyond those the worker keeps so that a layer can always be swapped down: as many as
        the largest quantised variant of a layer takes. 0 where that is unknown."""
        quantised = [self.layer_pages.get(variant) for variant in self.variants if variant != "full"]
        known = [pages for pages in quantised if pages is not None]
        if len(known) < len(quantised):
            return 0
        return max(0, self.pages_free - max(known, default=0))

    def blocks_of(self, pages: float) -> int:
        """KV blocks that so many pages hold; the cache grows by a page in every layer."""
        if pages <= 0 or not self.pages_per_block:
            return 0
        return int(pages // self.num_layers * self.num_layers / self.pages_per_block)

    def blocks_for(self, pages: float) -> int:
        """KV blocks that must go for so many pages, at least."""
        if pages <= 0 or not self.pages_per_block:
            return 0
        return math.ceil(math.ceil(pages / self.num_layers) * self.num_layers / self.pages_per_block)


def views_of(
    metrics: Metrics, workers: Iterable[LiveWorker], lag_s: float = 0.0, rests: Rests | None = None
) -> list[View]:
    """A view of every instance that serves and whose metrics are of its worker's own epoch. `lag_s`: the
    age of the metrics themselves. What waits in a group waits at all its members. `rests`: of deployments;
    those that are not among them have no view."""
    reports = {report.worker: report for report in metrics.workers}
    found = {(instance.worker, instance.id): instance for instance in metrics.instances}
    views = []
    for card in (live.card for live in workers if live.card.state == "serving"):
        total_blocks = sum(one.last.kv_blocks for one in metrics.instances if one.worker == card.id)
        for instance in _led(card.id, card.instances):
            seen, report = found.get((card.id, instance.id)), reports.get(card.id)
            rest = rest_of(instance, rests or {})
            if seen and report and rest and seen.epoch == report.epoch == card.epoch:
                others = [one for one in metrics.instances if _is_member(one, instance, card.id)]
                views.append(_view(instance, rest, seen, [seen, *others], report, total_blocks, lag_s))
    return views


def _led(worker: str, instances: Iterable[InstanceCard]) -> Iterator[InstanceCard]:
    """The first of an instance's workers takes its commands."""
    return (one for one in instances if not one.workers or one.workers[0] == worker)


def _is_member(one: InstanceMetrics, card: InstanceCard, leader: str) -> bool:
    """Another one, of the same group."""
    return one.worker != leader and one.worker in card.workers and one.id == f"{card.model}@{one.worker}"


def _view(
    card: InstanceCard,
    rest: Rest,
    seen: InstanceMetrics,
    members: Sequence[InstanceMetrics],
    report: WorkerMetrics,
    total_blocks: int,
    lag_s: float,
) -> View:
    last = seen.last
    num_running = sum(one.last.running for one in members)
    num_waiting = sum(one.last.waiting for one in members)
    waiting_tokens = sum(one.last.waiting_tokens for one in members)
    waiting_blocks = math.ceil(waiting_tokens / card.block_tokens) + num_waiting + num_running
    return View(
        instance=seen.id,
        worker=seen.worker,
        epoch=seen.epoch,
        age_s=report.age_seconds + lag_s,
        kv_blocks=last.kv_blocks,
        kv_used=seen.kv_used,
        kv_usage=seen.kv_usage,
        waiting=sum(one.waiting for one in members),
        waiting_blocks=waiting_blocks if num_waiting else 0,
        blocks_free=last.kv_blocks - last.kv_used,
        queue_delay_s=max(one.queue_delay_seconds for one in members),
        preemptions_per_s=sum(one.preemptions_per_second for one in members),
        num_layers=card.num_layers,
        layers_below=sum(_is_below(shape, rest.precision) for shape in last.layers),
        resting=rest.precision,
        coarsest=rest.coarsest,
        variants=tuple(card.variants),
        min_blocks=card.min_blocks,
        pages_free=report.pages.free,
        # exact for a worker of one instance; of several it is their average, and the worker knows better
        pages_per_block=report.pages.kv / total_blocks if total_blocks else 0.0,
        layer_pages=card.layer_pages,
    )


def _is_below(shape: LayerShape, rest: Precision) -> bool:
    return is_below(shape.attention, rest) or is_below(shape.ffn, rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """`coarsest`: the fewest bits that layers may be swapped to meanwhile."""

    precision: Precision = "full"
    coarsest: Precision = LOWEST
    tp: int = 1


Rests = Mapping[str, Rest]  # by instance
Resting = Callable[[], Rests]  # as it is now
BY_SETTINGS = Rest()


def rest_of(card: InstanceCard, rests: Rests) -> Rest | None:
    """None: it was deployed, and not known how. Then it is left alone."""
    return rests.get(card.id) if card.deployed else BY_SETTINGS


def nobody() -> Rests:
    """No deployments."""
    return {}

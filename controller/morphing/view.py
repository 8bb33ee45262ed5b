"""The view that the policy has of one instance: metrics, pages and card in one place. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bus.client import LiveWorker
from bus.messages import InstanceCard, InstanceMetrics, Metrics, WorkerMetrics
from bus.precisions import LOWEST, Precision, is_below


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The shape of an instance without pressure, which the policy goes back to.

    What workers serve by their settings rests in full precision on one worker, a deployment in the
    configuration that its intent chose. Under pressure layers may be swapped down to `coarsest`.
    """

    precision: Precision = "full"
    coarsest: Precision = LOWEST
    tp: int = 1


Rests = Mapping[str, Rest]  # of deployments, by instance


def rest_of(card: InstanceCard, rests: Rests) -> Rest | None:
    """Return the shape at rest; None for a deployment that `rests` lacks: the policy leaves it alone."""
    return rests.get(card.id) if card.deployed else Rest()


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One instance in one window. Pages are those of its worker, blocks its own."""

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
    layers_below: int = 0  # with fewer bits than at rest
    resting: Precision = "full"  # what layers go back to
    coarsest: Precision = LOWEST  # the fewest bits that they may be swapped to
    variants: tuple[Precision, ...] = ("full",)
    min_blocks: int = 0
    pages_free: int = 0
    pages_per_block: float = 0.0  # 0: unknown
    layer_pages: Mapping[Precision, int] = field(default_factory=dict)  # empty: unknown

    @property
    def kv_delay_s(self) -> float:
        """The queueing delay if the queue does not fit into the free blocks, else 0: none are missing."""
        return self.queue_delay_s if self.waiting_blocks > self.blocks_free else 0.0

    def blocks_missing(self, kv_usage: float) -> int:
        """Return the blocks that what runs and waits lacks to fill no more than this share of the cache."""
        wanted = self.kv_used + max(0, self.waiting_blocks)
        return max(0, math.ceil(wanted / kv_usage) - self.kv_blocks)

    @property
    def pages_spare(self) -> int:
        """Free pages beyond a reserve for a swap of any layer, its largest quantised variant; 0: unknown."""
        quantised = [self.layer_pages.get(variant) for variant in self.variants if variant != "full"]
        known = [pages for pages in quantised if pages is not None]
        if len(known) < len(quantised):
            return 0
        return max(0, self.pages_free - max(known, default=0))

    def blocks_of(self, pages: float) -> int:
        """Return the KV blocks in so many pages; the cache grows by a page in every layer."""
        if pages <= 0 or not self.pages_per_block:
            return 0
        return int(pages // self.num_layers * self.num_layers / self.pages_per_block)

    def blocks_for(self, pages: float) -> int:
        """Return the least number of KV blocks that must go to free so many pages."""
        if pages <= 0 or not self.pages_per_block:
            return 0
        return math.ceil(math.ceil(pages / self.num_layers) * self.num_layers / self.pages_per_block)


def views_of(
    metrics: Metrics, workers: Iterable[LiveWorker], lag_s: float = 0.0, rests: Rests | None = None
) -> list[View]:
    """Return a view of every serving instance, by its leader. `lag_s`: the age of the metrics."""
    reports = {(one.worker, one.epoch): one for one in metrics.workers}
    found = {(one.worker, one.id, one.epoch): one for one in metrics.instances}
    views = []
    for card in (live.card for live in workers if live.card.state == "serving"):
        total_blocks = sum(one.last.kv_blocks for one in metrics.instances if one.worker == card.id)
        report = reports.get((card.id, card.epoch))
        for instance in card.instances:
            seen = found.get((card.id, instance.id, card.epoch))
            rest = rest_of(instance, rests or {})
            if seen and report and rest and instance.workers[:1] in ([], [card.id]):
                others = [one for one in metrics.instances if _is_member(one, instance, card.id)]
                views.append(_view(instance, rest, [seen, *others], report, total_blocks, lag_s))
    return views


def _is_member(one: InstanceMetrics, card: InstanceCard, leader: str) -> bool:
    return one.worker != leader and one.worker in card.workers and one.id == f"{card.model}@{one.worker}"


def _view(
    card: InstanceCard,
    rest: Rest,
    members: Sequence[InstanceMetrics],
    report: WorkerMetrics,
    total_blocks: int,
    lag_s: float,
) -> View:
    """Combine the members' metrics, the leader's first: what waits in a group waits at all of them."""
    leader, last = members[0], members[0].last
    num_running = sum(one.last.running for one in members)
    num_waiting = sum(one.last.waiting for one in members)
    waiting_tokens = sum(one.last.waiting_tokens for one in members)
    waiting_blocks = math.ceil(waiting_tokens / card.block_tokens) + num_waiting + num_running
    return View(
        instance=leader.id,
        worker=leader.worker,
        epoch=leader.epoch,
        age_s=report.age_seconds + lag_s,
        kv_blocks=last.kv_blocks,
        kv_used=leader.kv_used,
        kv_usage=leader.kv_usage,
        waiting=sum(one.waiting for one in members),
        waiting_blocks=waiting_blocks if num_waiting else 0,
        blocks_free=last.kv_blocks - last.kv_used,
        queue_delay_s=max(one.queue_delay_seconds for one in members),
        preemptions_per_s=sum(one.preemptions_per_second for one in members),
        num_layers=card.num_layers,
        layers_below=sum(
            is_below(one.attention, rest.precision) or is_below(one.ffn, rest.precision)
            for one in last.layers
        ),
        resting=rest.precision,
        coarsest=rest.coarsest,
        variants=tuple(card.variants),
        min_blocks=card.min_blocks,
        pages_free=report.pages.free,
        # Exact for a worker of one instance; an average over several, of which the worker knows better.
        pages_per_block=report.pages.kv / total_blocks if total_blocks else 0.0,
        layer_pages=card.layer_pages,
    )

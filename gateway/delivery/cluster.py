"""The gateway's view of the workers: leases and cards as last polled, and the monitor's metrics.

A worker counts as dead after its lease was missing for a while, and not after one early poll.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bus import histogram
from bus.client import LiveWorker
from bus.groups import longest_tokens, members_of
from bus.messages import InstanceCard, InstanceMetrics, Metrics, WorkerCard, WorkerMetrics, WorkerTelemetry
from bus.precisions import PRECISIONS, KVPrecision

# A worker seen this recently may be restarting: shapes that need it, and its precision, are still possible.
JOIN_GRACE_S = 10.0
# A worker that has been gone for so long is forgotten. Pods and hosts with new names come for ever.
FORGET_S = 600.0


class PlacedInstance(NamedTuple):
    """An instance, and a worker that serves it or takes part in it."""

    worker: WorkerCard
    card: InstanceCard

    @property
    def members(self) -> list[str]:
        return self.card.members(self.worker.id)


@dataclass(frozen=True, slots=True)
class ReadyInstance:
    """An instance that takes requests, and the worker that leads it."""

    card: InstanceCard
    worker: str
    epoch: int


@dataclass(slots=True)
class Cluster:
    """The view. Times are seconds of the process's monotonic clock."""

    stale_s: float
    workers: dict[str, WorkerCard] = field(default_factory=dict)
    # Worker, also one that died within FORGET_S -> its last card, and when its lease was last there.
    seen: dict[str, tuple[WorkerCard, float]] = field(default_factory=dict)
    served_at: dict[str, float] = field(default_factory=dict)  # model -> when an instance was last ready
    cards: dict[str, InstanceCard] = field(default_factory=dict)  # cards of every model served so far
    polled_at: float = float("-inf")
    metrics: Metrics | None = None
    metrics_at: float = float("-inf")
    awaited: dict[str, str] = field(default_factory=dict)  # models of deployments, with their progress
    max_tp: int = 0  # the policy's limit of a group; 0: none
    can_split: bool = True  # the policy forms and splits groups by itself
    free_share: float = 0.5  # free share of the KV at which a group may split
    _ready: dict[str, list[ReadyInstance]] = field(default_factory=dict)
    _instance_metrics: dict[tuple[str, int], InstanceMetrics] = field(default_factory=dict)
    _worker_metrics: dict[tuple[str, int], WorkerMetrics] = field(default_factory=dict)
    _newer: dict[tuple[str, int], WorkerTelemetry] = field(default_factory=dict)  # than the monitor's picture
    _steps: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)  # count, when it grew
    _degrees: dict[tuple[str, int], tuple[int, float]] = field(default_factory=dict)  # tp, since when
    _retired: set[str] = field(default_factory=set)
    _fenced: dict[str, int] = field(default_factory=dict)  # worker -> the epoch whose lease it lost

    def update(self, live: Iterable[LiveWorker], now: float) -> None:
        """Take a new poll of the registry."""
        self.workers = {worker.card.id: worker.card for worker in live}
        self.polled_at = now
        self._ready = {}
        for worker in self.workers.values():
            self._notice(worker)
            self.seen[worker.id] = (worker, now)
        for name in [name for name, (_, at) in self.seen.items() if now - at > FORGET_S]:
            del self.seen[name]
            self._fenced.pop(name, None)
        for worker, card in self.instances():
            if worker.state == "serving":
                self._ready.setdefault(card.model, []).append(ReadyInstance(card, worker.id, worker.epoch))
                self.served_at[card.model] = now
                self.cards[card.model] = card
        self._forget_retired()
        self._degrees = {
            (card.id, worker.epoch): self._degree_of(card, worker.epoch, now)
            for worker in self.workers.values()
            for card in worker.instances
        }

    def _degree_of(self, card: InstanceCard, epoch: int, now: float) -> tuple[int, float]:
        before = self._degrees.get((card.id, epoch))
        if before is None:
            return card.tp, float("-inf")
        return before if before[0] == card.tp else (card.tp, now)

    def _notice(self, card: WorkerCard) -> None:
        """Note what a worker lost since it was last seen: its lease, or models."""
        before, _ = self.seen.get(card.id, (card, 0.0))
        if before.epoch == card.epoch:
            self._retired |= {one.model for one in before.instances} - {one.model for one in card.instances}
        elif (before.host, before.pid) == (card.host, card.pid):  # same process in a new epoch: no death
            self._fenced[card.id] = before.epoch

    def _forget_retired(self) -> None:
        self._retired -= {one for one in self._retired if one in self._ready or self.is_coming(one)}
        for model in self._retired:
            self._forget(model)

    def was_retired(self, model: str) -> bool:
        """Return True if the model was served and is not coming back."""
        return model in self._retired and model not in self.awaited

    def is_coming(self, model: str) -> bool:
        """Return True if a serving worker loads the model beside others."""
        return any(model in worker.loading for worker in self.workers.values())

    def has_left(self, instance: str, worker: str, epoch: int, now: float) -> bool:
        """Return True if this epoch of the worker is there without the instance: it reads nothing for it."""
        card = self.workers.get(worker)
        if card is None or card.epoch != epoch or any(one.id == instance for one in card.instances):
            return False
        is_reported = (instance, epoch) in self._instance_metrics
        return not is_reported and self.worker_metrics(worker, epoch, now) is not None

    def forget_workers(self) -> None:
        """Drop all cards: Redis lost its data, and the workers have to register again."""
        self.workers = {}
        self._ready = {}

    def drop(self, worker: str, epoch: int) -> None:
        """Drop an epoch that is gone, though the last poll may still have seen it."""
        card = self.workers.get(worker)
        if card is not None and card.epoch <= epoch:
            del self.workers[worker]
            self._exclude(worker)

    def mark_draining(self, worker: str, epoch: int) -> None:
        """Send nothing more to a worker that was ordered to drain since the last poll."""
        card = self.workers.get(worker)
        if card is not None and card.epoch == epoch and card.state == "serving":
            self.workers[worker] = replace(card, state="draining")
            self._exclude(worker)

    def _exclude(self, worker: str) -> None:
        for model, instances in self._ready.items():
            self._ready[model] = [ready for ready in instances if ready.worker != worker]

    def forget_retired(self, active: set[str]) -> None:
        """Forget models that were deployed, are not among `active` and are not served.

        What still waits for them is refused. While no worker is known nothing is forgotten: Redis may have
        lost its data.
        """
        if not self.workers:
            return
        served = {card.model for worker in self.workers.values() for card in worker.instances}
        for model, card in list(self.cards.items()):
            if card.deployed and model not in active | served:
                self._forget(model)
                self._retired.add(model)

    def _forget(self, model: str) -> None:
        self.cards.pop(model, None)
        self.served_at.pop(model, None)

    def add_report(self, telemetry: WorkerTelemetry) -> None:
        """Show what a worker reported with the end of a morph before the monitor's next picture has it."""
        self._newer[telemetry.worker, telemetry.epoch] = telemetry
        if self.metrics is not None:
            self.add_metrics(self.metrics, self.metrics_at)

    def add_metrics(self, metrics: Metrics, now: float) -> None:
        self.metrics = metrics = self._updated(metrics)
        self.metrics_at = now
        self._instance_metrics = {(m.id, m.epoch): m for m in metrics.instances}
        self._worker_metrics = {(m.worker, m.epoch): m for m in metrics.workers}
        self._steps = {(m.id, m.epoch): self._stepped(m, now) for m in metrics.instances}

    def _updated(self, metrics: Metrics) -> Metrics:
        """Merge the numbers of newer reports; drop those that the monitor has by now."""
        known = {(one.worker, one.epoch): one.at_ms for one in metrics.workers}
        self._newer = {key: one for key, one in self._newer.items() if known.get(key, one.at_ms) < one.at_ms}
        if not self._newer:
            return metrics
        last = {(one.id, newer.epoch): one for newer in self._newer.values() for one in newer.instances}
        workers, instances = list(metrics.workers), list(metrics.instances)
        for i, one in enumerate(workers):
            if newer := self._newer.get((one.worker, one.epoch)):
                workers[i] = replace(one, pages=newer.pages)
        for i, instance in enumerate(instances):
            if report := last.get((instance.id, instance.epoch)):
                instances[i] = replace(instance, last=report, kv_blocks=report.kv_blocks)
        return replace(metrics, workers=workers, instances=instances)

    def _stepped(self, metrics: InstanceMetrics, now: float) -> tuple[int, float]:
        steps = histogram.count(metrics.last.step_seconds)
        before = self._steps.get((metrics.id, metrics.epoch))
        return before if before is not None and before[0] == steps else (steps, now)

    def ready(self, model: str) -> list[ReadyInstance]:
        return self._ready.get(model, [])

    def ready_models(self) -> dict[str, ReadyInstance]:
        """Return one ready instance of each model that has any, ordered by model."""
        return {model: instances[0] for model, instances in sorted(self._ready.items()) if instances}

    def known_models(self) -> list[str]:
        """Return the models served now, or before since this gateway started."""
        return sorted(self.cards)

    def instances(self) -> Iterator[PlacedInstance]:
        """Yield each instance with the worker that leads it."""
        for worker in self.workers.values():
            for card in worker.instances:
                if card.members(worker.id)[0] == worker.id:
                    yield PlacedInstance(worker, card)

    def is_joining(self, model: str, now: float) -> bool:
        """Return True if a worker loads the model, or one served it within JOIN_GRACE_S and may restart."""
        recently = now - self.served_at.get(model, float("-inf")) < JOIN_GRACE_S
        return recently or self.loader_of(model) is not None or self.is_coming(model)

    def loader_of(self, model: str) -> WorkerCard | None:
        """Return a worker that starts with the model, or does not say yet with which."""
        loading = (worker for worker in self.workers.values() if worker.state == "loading")
        names = ((worker, {card.model for card in worker.instances}) for worker in loading)
        return next((worker for worker, listed in names if model in listed or not listed), None)

    def instance_metrics(self, instance: str, epoch: int, now: float) -> InstanceMetrics | None:
        """Return fresh metrics of this epoch; None if there are none (absent is not zero)."""
        found = self._instance_metrics.get((instance, epoch))
        if found is None or self.worker_metrics(found.worker, epoch, now) is None:
            return None
        return found

    def worker_metrics(self, worker: str, epoch: int, now: float) -> WorkerMetrics | None:
        found = self._worker_metrics.get((worker, epoch))
        if found is None or now - self.metrics_at + found.age_seconds > self.stale_s:
            return None
        return found

    def was_idle_after(self, instance: str, epoch: int, moment: float, now: float) -> bool:
        """Return True if a report made after `moment` shows no running and no waiting request."""
        found = self.instance_metrics(instance, epoch, now)
        if found is None:
            return False
        return self._reported_at(found) > moment and found.last.running + found.last.waiting == 0

    def _reported_at(self, metrics: InstanceMetrics) -> float:
        return self.metrics_at - self._worker_metrics[metrics.worker, metrics.epoch].age_seconds

    def is_working(self, instance: str, epoch: int, now: float, within_s: float) -> bool:
        """Return True if a fresh report shows work, and steps within `within_s`."""
        found = self.instance_metrics(instance, epoch, now)
        has_work = found is not None and found.last.running + found.last.waiting > 0
        return has_work and now - self._steps[instance, epoch][1] <= within_s

    def is_of_shape(self, ready: ReadyInstance, metrics: InstanceMetrics) -> bool:
        """Return True if `metrics` are of the card's degree, and not of the one before a transform."""
        _, since = self._degrees.get((ready.card.id, ready.epoch), (0, float("-inf")))
        return self._reported_at(metrics) >= since

    def max_tokens(self, ready: ReadyInstance, now: float) -> int:
        """Return how many tokens of prompt and output one sequence may have there."""
        metrics = self.instance_metrics(ready.card.id, ready.epoch, now)
        return self.tokens_of(ready.card, metrics if metrics and self.is_of_shape(ready, metrics) else None)

    @staticmethod
    def tokens_of(card: InstanceCard, metrics: InstanceMetrics | None) -> int:
        """Return the model's context, or the whole KV cache if that is known to be less."""
        kv_tokens = metrics.kv_blocks * card.block_tokens if metrics else card.tokens_at.get(card.tp, 0)
        return min(card.max_model_len, kv_tokens or card.max_model_len)

    def usual_tokens(self, ready: ReadyInstance, now: float) -> int:
        """Return how many tokens one sequence may have on one worker: more needs a group."""
        alone, now_there = ready.card.tokens_at.get(1, 0), self.max_tokens(ready, now)
        return now_there if ready.card.tp == 1 or not alone else min(ready.card.max_model_len, alone)

    def longest_tokens(self, model: str, now: float) -> int:
        """Return how many tokens the largest shape of recently seen workers holds; 0 without workers."""
        recent = [card for card, at in self.seen.values() if now - at < JOIN_GRACE_S]
        shapes = longest_tokens([card for card in recent if card.state == "serving"], model, self.max_tp)
        return max([shapes, *(self.max_tokens(ready, now) for ready in self.ready(model))])

    def best_kv(self, model: str, now: float) -> KVPrecision:
        """Return the most bits that a KV cache of the model is in or rests in, at any instance.

        One that was converted by hand may be in more than it rests in. Workers seen within JOIN_GRACE_S count
        by what theirs rests in. "full" where that is possible and not known: no instance is ready, a worker
        loads the model, or a ready instance has no fresh report.
        """
        ready = self.ready(model)
        if not ready or self.is_coming(model) or self.loader_of(model) is not None:
            return "full"
        recent = [worker for worker, at in self.seen.values() if now - at < JOIN_GRACE_S]
        rests = [card.kv_dtype for worker in recent for card in worker.instances if card.model == model]
        return min([*rests, *(self._kv_of(one, now) for one in ready)], key=PRECISIONS.index)

    def _kv_of(self, ready: ReadyInstance, now: float) -> KVPrecision:
        """Return what its KV cache is in or rests in, whichever has more bits; "full" without a report."""
        metrics = self.instance_metrics(ready.card.id, ready.epoch, now)
        is_in: KVPrecision = metrics.last.kv_precision if metrics else "full"
        return min(is_in, ready.card.kv_dtype, key=PRECISIONS.index)

    def seats(self, ready: ReadyInstance) -> list[ReadyInstance]:
        """Return the members of a group that take requests, the leader first."""
        members = members_of(ready.worker, ready.card, self.workers)
        return [ReadyInstance(card, worker.id, worker.epoch) for worker, card in members]

    def has_other_epoch(self, worker: str, epoch: int) -> bool:
        """Return True if the worker has another epoch. It is lower if a clock was set back."""
        card = self.workers.get(worker)
        return card is not None and card.epoch != epoch

    def was_fenced(self, worker: str, epoch: int) -> bool:
        """Return True if this epoch ended because a live process lost its lease."""
        return self._fenced.get(worker) == epoch

    def missing_for(self, worker: str, epoch: int) -> float:
        """Return for how many seconds polls did not find this lease.

        Infinite if another epoch came since, or if the worker was forgotten.
        """
        if worker not in self.seen:
            return float("inf")
        card, at = self.seen[worker]
        return self.polled_at - at if card.epoch == epoch else float("inf")

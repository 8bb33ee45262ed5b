"""What is known of the ready instances, as the choice needs it: cards, metrics and our own flights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bus.messages import InstanceMetrics
from gateway.delivery.cluster import Cluster, Ready
from gateway.delivery.dispatch import Candidate, Seat
from gateway.delivery.inflight import InFlight, Place, Target
from gateway.delivery.precision import lowest_half


@dataclass(frozen=True, slots=True)
class _Worker:
    """One of an instance, with what it and we know of it now."""

    ready: Ready
    target: Target
    place: Place  # our flights there
    metrics: InstanceMetrics | None  # fresh ones
    of_shape: InstanceMetrics | None  # the same, unless they are of its degree before

    @property
    def num_measured(self) -> float | None:
        return self.metrics.running + self.metrics.waiting if self.metrics else None


class Candidates:
    """A view of one moment, `now` in seconds of the monotonic clock."""

    def __init__(self, cluster: Cluster, table: InFlight, now: float) -> None:
        self._cluster = cluster
        self._table = table
        self._now = now

    def of(self, model: str, refused_by: frozenset[Target] = frozenset()) -> list[Candidate]:
        """Ready instances, with their load as far as it is known."""
        return [self._candidate(ready, refused_by) for ready in self._cluster.ready(model)]

    def _candidate(self, ready: Ready, refused_by: frozenset[Target]) -> Candidate:
        """Of an instance whose requests are one worker's; what belongs to groups is asked for only there."""
        card, worker = ready.card, self._worker(ready)
        max_tokens = self._cluster.tokens_of(card, worker.of_shape)
        alone = Candidate(
            instance=card.id,
            worker=ready.worker,
            epoch=ready.epoch,
            max_tokens=max_tokens,
            num_measured=worker.num_measured,
            num_own=len(worker.place.flights),
            num_own_since=worker.place.num_since,
            kv_usage=worker.metrics.kv_usage if worker.metrics else 0.0,
            precision=lowest_half(worker.metrics.last.layers) if worker.metrics else None,
            is_below=worker.target in refused_by,
            low_tokens=max_tokens,
            free_tokens=_free_tokens(worker, [worker]),
            parts=self._cluster.parts_groups and bool(card.tokens_at),
        )
        is_group = card.tp > 1 and card.pp == 1  # of stages the leader alone has requests
        return self._group(alone, worker, refused_by) if is_group else alone

    def _group(self, leader: Candidate, leading: _Worker, refused_by: frozenset[Target]) -> Candidate:
        """With what its members have to do: each plans its own, and the KV cache is one."""
        cluster, ready = self._cluster, leading.ready
        members = [self._worker(one) for one in cluster.seats(ready)]
        usual_tokens = cluster.usual_tokens(ready, self._now)
        measured = [one.num_measured for one in members if one.num_measured is not None]
        kv_tokens = _kv_tokens(leading) or leader.max_tokens
        home_tokens = min(
            ready.card.tokens_at.get(1, usual_tokens), (1 - cluster.free_share) * kv_tokens / ready.card.tp
        )
        return replace(
            leader,
            num_measured=sum(measured) if measured else None,
            num_own=sum(len(one.place.flights) for one in members),
            num_own_since=sum(one.place.num_since for one in members),
            is_below=any(one.target in refused_by for one in members),
            tp=ready.card.tp,
            low_tokens=usual_tokens,
            free_tokens=_free_tokens(leading, members),
            stays=any(_longest(one) > usual_tokens for one in members) or not cluster.parts_groups,
            seats=tuple(_seat(one, usual_tokens, home_tokens) for one in members),
        )

    def _worker(self, ready: Ready) -> _Worker:
        target = Target(ready.card.id, ready.worker, ready.epoch)
        metrics = self._cluster.instance_metrics(ready.card.id, ready.epoch, self._now)
        return _Worker(
            ready=ready,
            target=target,
            place=self._table.places.get(target, _NOBODY),
            metrics=metrics,
            of_shape=metrics if metrics and self._cluster.is_of_shape(ready, metrics) else None,
        )


_NOBODY = Place()


def _free_tokens(leading: _Worker, members: Sequence[_Worker]) -> float | None:
    """Of KV, less the queues and what is on its way. Without metrics of this shape, less what this gateway
    has there."""
    card = leading.ready.card
    if leading.of_shape is None:
        on_their_way = sum(one.place.num_tokens for one in members)
        return _kv_tokens(leading) - on_their_way if card.tp in card.tokens_at else None
    last = leading.of_shape.last
    free_blocks = last.kv_blocks - last.kv_used
    return free_blocks * card.block_tokens - sum(map(_coming_tokens, members))


def _kv_tokens(leading: _Worker) -> int:
    """Of all, which may be more than one sequence may have; 0: unknown."""
    card = leading.ready.card
    if leading.of_shape is None:
        return card.tokens_at.get(card.tp, 0)
    return leading.of_shape.last.kv_blocks * card.block_tokens


def _coming_tokens(worker: _Worker) -> int:
    """It has no KV yet."""
    queued = worker.of_shape.last.waiting_tokens if worker.of_shape else 0
    return queued + worker.place.tokens_since


def _longest(worker: _Worker) -> int:
    told = worker.metrics.last.longest_tokens if worker.metrics else 0
    return max(told, worker.place.longest_tokens)


def _seat(worker: _Worker, usual_tokens: int, home_tokens: float) -> Seat:
    return Seat(
        instance=worker.target.instance,
        worker=worker.target.worker,
        epoch=worker.target.epoch,
        num_measured=worker.num_measured,
        num_own=len(worker.place.flights),
        num_own_since=worker.place.num_since,
        short_tokens=_short_tokens(worker, usual_tokens),
        home_tokens=home_tokens,
    )


def _short_tokens(worker: _Worker, usual_tokens: int) -> float:
    """Beside a long request of another gateway, whose share nobody tells: what we know of ourselves. Never
    too many: they end, and others get their seats."""
    place, metrics = worker.place, worker.of_shape
    is_any_long = place.longest_tokens > usual_tokens
    if metrics and not is_any_long and metrics.last.longest_tokens <= usual_tokens:
        return metrics.last.kv_own * worker.ready.card.block_tokens + _coming_tokens(worker)
    short = [one for one in place.flights.values() if one.num_tokens <= usual_tokens]
    return sum(one.num_known_tokens if one.is_running else one.num_tokens for one in short)

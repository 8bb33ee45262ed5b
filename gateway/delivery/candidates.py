"""The view of the ready instances that the choice needs: cards, metrics and this gateway's requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bus.messages import InstanceMetrics, lowest_precision
from bus.precisions import PRECISIONS
from bus.prefix_keys import num_blocks_found
from bus.schema import FIRST
from gateway.delivery.cluster import Cluster, ReadyInstance
from gateway.delivery.dispatch import Candidate, Seat
from gateway.delivery.request import InstanceAddress
from gateway.delivery.table import AssignedRequests, RequestTable


@lru_cache(maxsize=1024)  # called for every token, and there are few shapes
def lowest_named(fingerprint: str) -> str:
    """Return the precision with the fewest bits in a fingerprint (tp1-int8x1-int4x2: int4), or "unknown"."""
    return next((name for name in reversed(PRECISIONS) if name in fingerprint), "unknown")


@dataclass(frozen=True, slots=True)
class _Member:
    ready: ReadyInstance
    address: InstanceAddress
    own: AssignedRequests  # this gateway's requests there
    metrics: InstanceMetrics | None  # fresh ones
    shape_metrics: InstanceMetrics | None  # the same, unless they are of the degree before a transform

    @property
    def num_measured(self) -> float | None:
        return self.metrics.running + self.metrics.waiting if self.metrics else None

    @property
    def kv_tokens(self) -> int:
        """Tokens of the whole KV cache, which may be more than one sequence may have; 0: unknown."""
        if self.shape_metrics is None:
            return self.ready.card.tokens_at.get(self.ready.card.tp, 0)
        return self.shape_metrics.last.kv_blocks * self.ready.card.block_tokens

    @property
    def queued_tokens(self) -> int:
        """Tokens of requests that have no KV yet."""
        queued = self.shape_metrics.last.waiting_tokens if self.shape_metrics else 0
        return queued + self.own.tokens_since

    @property
    def longest_tokens(self) -> int:
        reported = self.metrics.last.longest_tokens if self.metrics else 0
        return max(reported, self.own.longest_tokens)

    def short_tokens(self, usual_tokens: int) -> float:
        """Return the KV of its short requests; of our own only beside another gateway's long request."""
        metrics = self.shape_metrics
        has_long = self.own.longest_tokens > usual_tokens
        if metrics and not has_long and metrics.last.longest_tokens <= usual_tokens:
            return metrics.last.kv_own * self.ready.card.block_tokens + self.queued_tokens
        short = [one for one in self.own.requests.values() if one.request.num_tokens <= usual_tokens]
        return sum(one.num_known_tokens if one.is_running else one.request.num_tokens for one in short)

    def cached_tokens(self, digests: Sequence[int]) -> int:
        """Return how many tokens of a prompt with these digests its prefix cache has, by its last report."""
        if not digests or not self.metrics:
            return 0
        return self.ready.card.block_tokens * num_blocks_found(digests, self.metrics.last.prefix_digests)

    def as_seat(self, usual_tokens: int, home_tokens: float, cached_tokens: int) -> Seat:
        load = self.num_measured, len(self.own.requests), self.own.num_since
        return Seat(*self.address, *load, self.short_tokens(usual_tokens), home_tokens, cached_tokens)


_NONE = AssignedRequests()
DigestsOf = Callable[[int], Sequence[int]]


class Candidates:
    """The view at one moment: `now` in seconds of the monotonic clock."""

    def __init__(self, cluster: Cluster, table: RequestTable, now: float) -> None:
        self._cluster = cluster
        self._table = table
        self._now = now

    def of(
        self,
        model: str,
        refused_by: frozenset[InstanceAddress] = frozenset(),
        digests_of: DigestsOf = lambda block_tokens: (),
        *,
        with_grammars: bool = False,
        version: int = FIRST,
    ) -> list[Candidate]:
        """Return the ready instances of `model`, with their load as far as it is known.

        digests_of: returns those of the request's prompt (`bus.prefix_keys`) for blocks of so many tokens.
        with_grammars: only those all of whose members take grammars. version: only those that read this
        version of the schema, or a newer one.
        """
        ready = self._cluster.ready(model)
        if with_grammars:
            ready = [one for one in ready if self._takes_grammars(one)]
        if version > FIRST:
            ready = [one for one in ready if version <= max(self._cluster.workers[one.worker].reads)]
        return [self._candidate(one, refused_by, digests_of) for one in ready]

    def _takes_grammars(self, ready: ReadyInstance) -> bool:
        members = self._cluster.seats(ready) if ready.card.tp > 1 and not ready.card.is_divided else ()
        return all(one.card.takes_grammars for one in (ready, *members))

    def _candidate(
        self, ready: ReadyInstance, refused_by: frozenset[InstanceAddress], digests_of: DigestsOf
    ) -> Candidate:
        """Return an instance with the load of all its members; of a pipeline only the leader has requests."""
        cluster, card, leader = self._cluster, ready.card, self._member(ready)
        is_group = card.tp > 1 and not card.is_divided
        members = [self._member(one) for one in cluster.seats(ready)] if is_group else [leader]
        measured = [one.num_measured for one in members if one.num_measured is not None]
        max_tokens = cluster.tokens_of(card, leader.shape_metrics)
        usual_tokens = cluster.usual_tokens(ready, self._now) if is_group else max_tokens
        kv_share = (1 - cluster.free_share) * (leader.kv_tokens or max_tokens) / card.tp
        home_tokens = min(card.tokens_at.get(1, usual_tokens), kv_share)
        digests = digests_of(card.block_tokens)
        cached_tokens = [one.cached_tokens(digests) for one in members]
        seats = (
            one.as_seat(usual_tokens, home_tokens, cached)
            for one, cached in zip(members, cached_tokens, strict=True)
        )
        has_long = any(one.longest_tokens > usual_tokens for one in members)
        return Candidate(
            *leader.address,
            num_measured=sum(measured) if measured else None,
            num_own=sum(len(one.own.requests) for one in members),
            num_own_since=sum(one.own.num_since for one in members),
            max_tokens=max_tokens,
            kv_usage=leader.metrics.kv_usage if leader.metrics else 0.0,
            precision=lowest_precision(leader.metrics.last) if leader.metrics else None,
            has_refused=any(one.address in refused_by for one in members),
            tp=card.tp if is_group else 1,
            low_tokens=usual_tokens,
            free_tokens=_free_tokens(leader, members),
            stays=not is_group or has_long or not cluster.can_split,
            can_split=cluster.can_split and bool(card.tokens_at),
            seats=tuple(seats) if is_group else (),
            cached_tokens=max(cached_tokens, default=0),
        )

    def _member(self, ready: ReadyInstance) -> _Member:
        address = InstanceAddress(ready.card.id, ready.worker, ready.epoch)
        metrics = self._cluster.instance_metrics(ready.card.id, ready.epoch, self._now)
        is_of_shape = metrics is not None and self._cluster.is_of_shape(ready, metrics)
        own = self._table.assigned.get(address, _NONE)
        return _Member(ready, address, own, metrics, metrics if is_of_shape else None)


def _free_tokens(leader: _Member, members: Sequence[_Member]) -> float | None:
    """Return the free KV in tokens, less what is queued and on its way; None if that is unknown."""
    if leader.shape_metrics is None:
        is_known = leader.ready.card.tp in leader.ready.card.tokens_at
        return leader.kv_tokens - sum(one.own.num_tokens for one in members) if is_known else None
    last = leader.shape_metrics.last
    free_tokens = (last.kv_blocks - last.kv_used) * leader.ready.card.block_tokens
    return free_tokens - sum(one.queued_tokens for one in members)

"""Metrics to moments: what a chart shows, with the members of a group as one instance. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from bus.messages import InstanceMetrics, InstanceMoment, Metrics, Moment, layers_below_full
from monitor.smoothing import group_of

BUSY_S = 2.0
IDLE_S = 10.0


class Rhythm:
    """The times at which moments are due: every 2 s under load, else every 10 s, and at its two ends."""

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._had_load = False

    def is_due(self, now_s: float, has_load: bool) -> bool:
        """Return True if a moment is to be written at `now_s` (monotonic); it then counts as written."""
        is_first = has_load and not self._had_load
        pause_s = BUSY_S if self._had_load or has_load else IDLE_S
        if not is_first and now_s - self._last_s < pause_s:
            return False
        self._last_s, self._had_load = now_s, has_load
        return True


def moment_of(metrics: Metrics) -> Moment:
    """Return the moment that `metrics` show. A group has the id of its first member that reported."""
    groups: dict[tuple[str, ...], list[InstanceMetrics]] = defaultdict(list)
    for one in metrics.instances:
        groups[group_of(one.worker, one.last)].append(one)
    leaders = {_leader(members).id: members for members in groups.values()}
    instances = {name: _together(members) for name, members in leaders.items()}
    return Moment(at=metrics.at_ms / 1000, instances=instances)


def _leader(members: list[InstanceMetrics]) -> InstanceMetrics:
    order = members[0].last.workers
    return min(members, key=lambda one: order.index(one.worker) if one.worker in order else 0)


def _together(members: list[InstanceMetrics]) -> InstanceMoment:
    leader = _leader(members)  # requests are each member's own; each member reports the group's shape and KV
    return InstanceMoment(
        running=round(sum(one.running for one in members), 2),
        waiting=round(sum(one.waiting for one in members), 2),
        queue_delay_s=round(max(one.queue_delay_seconds for one in members), 4),
        ttft_p95_s=_largest(one.ttft_p95 for one in members),
        tpot_p95_s=_largest(one.tpot_p95 for one in members),
        kv_blocks=leader.last.kv_blocks,
        kv_used=round(leader.kv_used, 1),
        layers_below_full=layers_below_full(leader.last.layers),
        tp=max(1, len(leader.last.workers)),
        tokens_per_s=round(sum(one.generation_tokens_per_second for one in members), 1),
    )


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(max(known), 5) if known else None

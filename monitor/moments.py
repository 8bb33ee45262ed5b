"""From metrics to moments: what a chart needs of them, a group's members as one instance. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bus.messages import InstanceMetrics, InstanceMoment, LayerShape, Metrics, Moment

BUSY_S = 2.0
IDLE_S = 10.0


class Rhythm:
    """When the next moment is due: every 2 s while there is load, every 10 s otherwise; the first one of a
    load at once, and the first one after it as if it still lasted, so that a chart shows both ends."""

    def __init__(self) -> None:
        self._last_s = float("-inf")
        self._had_load = False

    def is_due(self, now_s: float, has_load: bool) -> bool:
        """Whether to write one now; True counts as written. now_s: of a clock that only rises."""
        is_first = has_load and not self._had_load
        pause_s = BUSY_S if self._had_load or has_load else IDLE_S
        if not is_first and now_s - self._last_s < pause_s:
            return False
        self._last_s, self._had_load = now_s, has_load
        return True


def moment_of(metrics: Metrics) -> Moment:
    """Under the id of the member that leads, where a group has reported."""
    groups: dict[tuple[str, ...], list[InstanceMetrics]] = {}
    for one in metrics.instances:
        model = one.id.removesuffix(f"@{one.worker}")
        groups.setdefault((model, *(one.last.workers or [one.worker])), []).append(one)
    return Moment(
        at=metrics.at_ms / 1000,
        instances={leader.id: _together(leader, members) for leader, members in map(_led, groups.values())},
    )


def _led(members: list[InstanceMetrics]) -> tuple[InstanceMetrics, list[InstanceMetrics]]:
    """The leader, or who stands for it while it is silent, and all."""
    order = members[0].last.workers
    return min(members, key=lambda one: order.index(one.worker) if one.worker in order else 0), members


def _together(leader: InstanceMetrics, members: list[InstanceMetrics]) -> InstanceMoment:
    """Requests are each member's own; shape and KV are of the group, and each tells them."""
    return InstanceMoment(
        running=round(sum(one.running for one in members), 2),
        waiting=round(sum(one.waiting for one in members), 2),
        queue_delay_s=round(max(one.queue_delay_seconds for one in members), 4),
        ttft_p95_s=_worst(one.ttft_p95 for one in members),
        tpot_p95_s=_worst(one.tpot_p95 for one in members),
        kv_blocks=leader.last.kv_blocks,
        kv_used=round(leader.kv_used, 1),
        layers_below_full=sum(layer != LayerShape() for layer in leader.last.layers),
        tp=max(1, len(leader.last.workers)),
        tokens_per_s=round(sum(one.generation_tokens_per_second for one in members), 1),
    )


def _worst(values: Iterable[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return round(max(told), 5) if told else None

"""The loads of the demo, as the replay sends them, and its long request. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from bus import burst as bursts
from bus.burst import PlannedRequest
from instar.replay.schemas import Arrival
from instar.replay.traces import Workload


def at_once() -> Workload:
    """Return requests that are all due at once, which fill every KV cache."""
    return Workload("demo", "demo", _arrivals(bursts.at_once()), 0.0)


def burst(tokens_per_s: float, seconds: float) -> Workload:
    """Return the burst for a service that generates `tokens_per_s`."""
    return Workload("demo burst", "demo", _arrivals(bursts.burst(tokens_per_s, seconds)), seconds)


def _arrivals(planned: Iterable[PlannedRequest]) -> list[Arrival]:
    return [Arrival(*one) for one in planned]


def long_request(tokens_at: dict[str, int], context: int) -> int:
    """Return the tokens of a request that one worker cannot hold and two can; 0 if there is no such number.

    tokens_at: of KV that an instance would hold, by its degree of tensor parallelism, as JSON has it.
    """
    alone, together = tokens_at.get("1", 0), min(context, tokens_at.get("2", 0))
    return (alone + together) // 2 if 0 < alone < together else 0

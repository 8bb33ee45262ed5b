"""Which instance takes a request? A pure function: no clock, no I/O.

Load is counted in sequences. The monitor's smoothed number is behind by up to a window, and knows nothing of
what this gateway sent since, so both are joined; where the number is stale or missing, what this gateway has
there itself is all that is known (stale is not idle).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bus.messages import Precision
from gateway.delivery.precision import keeps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready instance of the model that is asked for."""

    instance: str
    worker: str  # the leading one
    epoch: int
    max_tokens: int  # prompt and output of one sequence: the context, or the whole KV cache if that is less
    num_measured: float | None  # running + waiting, smoothed, all gateways; None: no fresh metric
    num_own: int  # sequences of this gateway that are there now
    num_own_since: int  # of those, sent after the metric arrived
    kv_usage: float = 0.0  # 0..1
    precision: Precision | None = None  # of its lowest layer; None: no fresh metric
    is_below: bool = False  # it just refused: metrics may not know yet that it swapped layers


@dataclass(frozen=True, slots=True)
class NoneFits:
    """No instance can ever hold it; `limit` is the largest."""

    limit: int


@dataclass(frozen=True, slots=True)
class BelowFloor:
    """All that can hold it have layers below the precision that is asked for. That may change."""


def load(candidate: Candidate) -> float:
    """Sequences there, as far as known. Never fewer than our own: those we know of."""
    if candidate.num_measured is None:
        return float(candidate.num_own)
    return max(candidate.num_measured + candidate.num_own_since, float(candidate.num_own))


def choose(
    candidates: Iterable[Candidate], num_tokens: int, floor: Precision | Literal[""] = ""
) -> Candidate | NoneFits | BelowFloor | None:
    """The least loaded instance that can hold `num_tokens`; of equals the one with the emptier cache, then
    the first by name. None: there is no candidate at all.

    With a `floor` only those whose layers are all known to keep it, or else may keep it: a worker refuses
    what it must not run.
    """
    there = list(candidates)
    if not there:
        return None
    fitting = [candidate for candidate in there if num_tokens <= candidate.max_tokens]
    if not fitting:
        return NoneFits(max(candidate.max_tokens for candidate in there))
    keeping = [candidate for candidate in fitting if _may_keep(candidate, floor)]
    if not keeping:
        return BelowFloor()
    return min(keeping, key=lambda c: (bool(floor) and c.precision is None, load(c), c.kv_usage, c.instance))


def _may_keep(candidate: Candidate, floor: Precision | Literal[""]) -> bool:
    if candidate.is_below:
        return False
    return not floor or candidate.precision is None or keeps(candidate.precision, floor)

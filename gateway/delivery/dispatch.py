"""Which instance takes a request? A pure function: no clock, no I/O.

Load is counted in sequences. The monitor's smoothed number is behind by up to a window, and knows nothing of
what this gateway sent since, so both are joined; where the number is stale or missing, what this gateway has
there itself is all that is known (stale is not idle).

With groups of workers about, this is Algorithm 1 of Gyges (§5). A request is *long* if no instance of the
lowest degree holds it. Degrees change only for long requests, so these go where a group has to stay anyway,
and short ones keep away from a group that is to part, and from the room that a long one waits for:

====  ====================================================================
rank  a short request goes to the least loaded of the first rank that is not empty
====  ====================================================================
0     an instance of one worker that has room
1     a group that stays and has room beyond what is reserved
2     an instance of one worker, though the request will wait there
3     a group that is to part and can, with this request too
4     a group that stays, though the request will wait there, after a long one that waits (`Behind`)
5     a group that is to part, after some patience (`Parting`)
====  ====================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bus.messages import Precision
from gateway.delivery.precision import keeps


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready instance of the model that is asked for. Tokens are prompt and output, or the KV of them."""

    instance: str
    worker: str  # the leading one
    epoch: int
    max_tokens: int  # of one sequence: the context, or the whole KV cache if that is less
    num_measured: float | None  # running + waiting, smoothed, all gateways; None: no fresh metric
    num_own: int  # sequences of this gateway that are there now
    num_own_since: int  # of those, sent after the metric arrived
    kv_usage: float = 0.0  # 0..1
    precision: Precision | None = None  # of its lowest layer; None: no fresh metric
    is_below: bool = False  # it just refused: metrics may not know yet that it swapped layers
    tp: int = 1
    low_tokens: int = 0  # what one sequence may have at the lowest degree; 0: as `max_tokens`
    free_tokens: float | None = None  # less what this gateway sent since; None: no fresh metric
    stays: bool = True  # of a group: it does not part soon (a long request, or nothing parts by itself)
    part_tokens: float = 0.0  # with no more in its KV cache a group can part


@dataclass(frozen=True, slots=True)
class NoneFits:
    """No instance can ever hold it as they are now; `limit` is the largest."""

    limit: int


@dataclass(frozen=True, slots=True)
class BelowFloor:
    """All that can hold it have layers below the precision that is asked for. That may change."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """It is long, and the groups that can hold it are full. They empty, or another one is made."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Only groups that are to part could take it, which it would keep from that. It should wait a moment for
    the parts, and go to `candidate` if that does not happen."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Behind:
    """It is short and would take the room that a long one waits for: it goes after that one."""


Found = Candidate | NoneFits | BelowFloor | NoRoom | Parting | Behind


def load(candidate: Candidate) -> float:
    """Sequences there, as far as known. Never fewer than our own: those we know of."""
    if candidate.num_measured is None:
        return float(candidate.num_own)
    return max(candidate.num_measured + candidate.num_own_since, float(candidate.num_own))


def is_long(candidates: Iterable[Candidate], num_tokens: int) -> bool:
    """Whether no instance of the lowest degree holds so many tokens."""
    return all(num_tokens > (candidate.low_tokens or candidate.max_tokens) for candidate in candidates)


def choose(
    candidates: Iterable[Candidate],
    num_tokens: int,
    floor: Precision | Literal[""] = "",
    reserved_tokens: int = 0,
) -> Found | None:
    """The least loaded instance that can hold `num_tokens`, of the rank above for a short request, of the
    groups with room for a long one: first where another long one runs, so that other groups can part. Of
    equals the one with the emptier cache, then the first by name. None: there is no candidate at all.

    With a `floor` only those whose layers are all known to keep it, or else may keep it: a worker refuses
    what it must not run. `reserved_tokens`: what the longest request needs that came before and waits for a
    group.
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
    if not is_long(there, num_tokens):
        best = min(
            keeping,
            key=lambda c: (_is_doubtful(c, floor), _rank(c, num_tokens, reserved_tokens), *_by_load(c)),
        )
        if best.tp > 1 and 0 < reserved_tokens <= best.max_tokens:
            return best if _has_room(best, num_tokens + reserved_tokens) else Behind()
        return Parting(best) if _rank(best, num_tokens, reserved_tokens) == _PARTING else best
    roomy = [candidate for candidate in keeping if _has_room(candidate, num_tokens)]
    if not roomy:
        return NoRoom()
    return min(roomy, key=lambda c: (_is_doubtful(c, floor), not c.stays, *_by_load(c)))


_PARTING = 5


def _rank(candidate: Candidate, num_tokens: int, reserved_tokens: int) -> int:
    if candidate.tp == 1:
        return 0 if _has_room(candidate, num_tokens) else 2
    if candidate.stays:
        reserved = reserved_tokens if candidate.max_tokens >= reserved_tokens else 0
        return 1 if _has_room(candidate, num_tokens + reserved) else 4
    busy_tokens = 0.0 if candidate.free_tokens is None else candidate.max_tokens - candidate.free_tokens
    return 3 if busy_tokens <= 0 or busy_tokens + num_tokens <= candidate.part_tokens else _PARTING


def _has_room(candidate: Candidate, num_tokens: int) -> bool:
    return candidate.free_tokens is None or candidate.free_tokens >= num_tokens


def _by_load(candidate: Candidate) -> tuple[float, float, str]:
    """Of one worker's share: a group has that many."""
    return load(candidate) / candidate.tp, candidate.kv_usage, candidate.instance


def _is_doubtful(candidate: Candidate, floor: Precision | Literal[""]) -> bool:
    return bool(floor) and candidate.precision is None


def _may_keep(candidate: Candidate, floor: Precision | Literal[""]) -> bool:
    if candidate.is_below:
        return False
    return not floor or candidate.precision is None or keeps(candidate.precision, floor)

"""The choice of an instance for a request: one pure function, without clock or I/O.

With groups of workers this is Algorithm 1 of Gyges (§5). docs/structure.md has the rules, "The choice of an
instance". Load is counted in sequences. A prefix that an instance has cached counts as work saved there. So
conversations return to their instance unless it is busier by more than that. Each request counts as load as
soon as it is sent, so a common prefix does not gather all of them in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from bus.groups import natural
from bus.precisions import Precision, is_below
from gateway.delivery.request import Floor

# A short request waits this long for a group to split, or for a seat in it, counted from the last time that
# one of its model got a place. Then it goes to the group anyway.
SPLIT_PATIENCE_S: Final = 30.0

# Prompt tokens that need not be computed, counted as a sequence less; about a step's prefill.
CACHED_TOKENS_PER_SEQUENCE: Final = 512
MOST_SEQUENCES_SAVED: Final = 2.0


@dataclass(frozen=True, slots=True)
class Destination:
    """A place for requests, with its load in sequences."""

    instance: str
    worker: str  # worker, or leader of a group
    epoch: int
    num_measured: float | None  # running + waiting, smoothed, all gateways; None: no fresh metrics
    num_own: int  # requests of this gateway
    num_own_since: int  # own requests sent after the metrics arrived

    @property
    def load(self) -> float:
        """Sequences there, as far as known: at least this gateway's own."""
        if self.num_measured is None:
            return float(self.num_own)
        return max(self.num_measured + self.num_own_since, float(self.num_own))


@dataclass(frozen=True, slots=True)
class Seat(Destination):
    """A member of a group. Its load and tokens are its own."""

    short_tokens: float = 0.0  # KV of its short requests, those on their way included
    home_tokens: float = 0.0  # the most of these with which the group can still split
    cached_tokens: int = 0  # tokens of the request's prompt in the prefix cache

    def is_home(self, num_tokens: int) -> bool:
        """Return True if the member could keep the short request when the group splits."""
        return self.short_tokens <= 0 or self.short_tokens + num_tokens <= self.home_tokens


@dataclass(frozen=True, slots=True)
class Candidate(Destination):
    """A ready instance of the model. Tokens are prompt and output, or the KV of them."""

    max_tokens: int  # most of one sequence: its context, or the whole KV cache if less
    kv_usage: float = 0.0  # 0..1
    precision: Precision | None = None  # precision of its lowest layer; None: no fresh metrics
    has_refused: bool = False  # since the last poll: metrics may not show yet that it swapped layers
    tp: int = 1
    low_tokens: int = 0  # most of one sequence at the lowest degree; 0: `max_tokens`
    free_tokens: float | None = None  # less what this gateway sent since; None: no fresh metrics
    stays: bool = True  # a group: it does not split soon (a long request, or nothing splits by itself)
    can_split: bool = True  # groups form by themselves, and split without a long request
    seats: tuple[Seat, ...] = ()  # a group: its members that take requests
    cached_tokens: int = 0  # cached tokens of the prompt at the member that has most


@dataclass(frozen=True, slots=True)
class QueuesAhead:
    """The requests that wait at this gateway for the same model. Ahead means that they arrived earlier."""

    long_tokens: int = 0  # tokens of the first long request that waits for a group
    reserved_tokens: int = 0  # tokens of the longest one ahead
    has_long: bool = False  # there is one ahead
    short_floors: Iterable[Floor] = ()  # floors of short requests ahead that wait for a split or a seat
    now: float = 0.0  # seconds of any clock
    waits_since: float = 0.0  # when this request arrived, or a short one last got a place
    cluster_tokens: int = 0  # tokens of the largest shape that the cluster can take


@dataclass(frozen=True, slots=True)
class TooLong:
    """No shape of the cluster can hold the request; the largest holds `limit` tokens."""

    limit: int


class Wait(Enum):
    """The reasons for which a request waits at the gateway: no instance can take it now."""

    PRECISION = "precision"  # all instances that can hold it have layers below its floor
    GROUP = "group"  # a long request, and no group has room for it
    LONG = "long"  # a short request behind a long one whose room it would take


@dataclass(frozen=True, slots=True)
class WaitForSplit:
    """The request is short, and a group should split or form first; overdue, it goes to `candidate`."""

    candidate: Candidate
    is_overdue: bool = False


Decision = Candidate | TooLong | Wait | WaitForSplit


def choose(
    candidates: Iterable[Candidate], num_tokens: int, floor: Floor = "", ahead: QueuesAhead | None = None
) -> Decision | None:
    """Choose the instance for a request of `num_tokens`; None if there is no candidate.

    A short request goes to the least loaded instance of the first rank; a long one to a group with room,
    first where another long one runs, so that other groups can split. Among equals the emptiest cache
    decides, then the name. With a `floor`, instances known to keep it go before those that may keep it.
    """
    there, ahead = list(candidates), ahead or QueuesAhead()
    if not there:
        return None
    fitting = [candidate for candidate in there if num_tokens <= candidate.max_tokens]
    if not fitting:
        limit = max(ahead.cluster_tokens, *(candidate.max_tokens for candidate in there))
        return TooLong(limit) if num_tokens > limit else Wait.GROUP
    is_for_group = is_long(there, num_tokens)
    if is_for_group and ahead.has_long:
        return Wait.GROUP
    keeping = [candidate for candidate in fitting if may_keep(candidate, floor)]
    if not keeping:
        return Wait.PRECISION
    if is_for_group:
        roomy = [candidate for candidate in keeping if _has_room(candidate, num_tokens)]
        if not roomy:
            return Wait.GROUP
        return min(roomy, key=lambda c: (_is_doubtful(c, floor), not c.stays, *_by_load(c)))
    found = _choose_for_short(there, keeping, num_tokens, floor, ahead)
    if isinstance(found, Candidate) and found.can_split:
        # A request that waits for a precision that `found` lacks is not overtaken.
        is_overtaking = any(may_keep(found, other) for other in ahead.short_floors)
        return WaitForSplit(found) if is_overtaking else found
    return found


def _choose_for_short(
    there: list[Candidate], keeping: list[Candidate], num_tokens: int, floor: Floor, ahead: QueuesAhead
) -> Candidate | WaitForSplit | Wait:
    reserved_tokens = ahead.reserved_tokens
    rank, best = min(
        ((_rank(one, num_tokens, reserved_tokens), one) for one in keeping),
        key=lambda ranked: (_is_doubtful(ranked[1], floor), ranked[0], *_by_load(ranked[1])),
    )
    is_reserved = best.tp > 1 and 0 < reserved_tokens <= best.max_tokens
    if is_reserved and not _has_room(best, num_tokens + reserved_tokens):
        return Wait.LONG
    must_wait = (best.can_split and rank >= 4) or (rank == 2 and _is_group_needed(there, ahead.long_tokens))
    return WaitForSplit(best, ahead.now >= ahead.waits_since + SPLIT_PATIENCE_S) if must_wait else best


def is_long(candidates: Iterable[Candidate], num_tokens: int) -> bool:
    """Return True if no instance of the lowest degree holds so many tokens."""
    return all(num_tokens > (candidate.low_tokens or candidate.max_tokens) for candidate in candidates)


def member_for(chosen: Candidate, num_tokens: int) -> Destination:
    """Return the member with room at home and the least load; `chosen` itself if it is one worker.

    So a group splits into balanced parts, and a member that dies costs its share.
    """
    is_short = num_tokens <= (chosen.low_tokens or chosen.max_tokens)
    return min(
        chosen.seats,
        key=lambda seat: (
            is_short and not seat.is_home(num_tokens),
            seat.load - _saved(seat.cached_tokens),
            natural(seat.worker),
        ),
        default=chosen,
    )


def crowded(candidates: Sequence[Candidate], long_tokens: int) -> list[Seat]:
    """Return places with more short requests than they can keep when a group splits, or forms."""
    seats = [seat for one in candidates if one.can_split for seat in one.seats]
    if _is_group_needed(candidates, long_tokens):
        seats += [_as_seat(one) for one in candidates if not one.seats]
    return [seat for seat in seats if seat.short_tokens > seat.home_tokens]


def _as_seat(one: Candidate) -> Seat:
    taken = 0.0 if one.free_tokens is None else one.max_tokens - one.free_tokens
    place = one.instance, one.worker, one.epoch, one.num_measured, one.num_own, one.num_own_since
    return Seat(*place, short_tokens=taken, home_tokens=one.max_tokens)


def num_to_recall(seat: Seat, queued_tokens: Sequence[int]) -> int:
    """Return how many of the short requests queued at `seat` must wait here: the latest, which come last."""
    over, count = seat.short_tokens - seat.home_tokens, 0
    for tokens in reversed(queued_tokens):
        if over <= 0:
            break
        over -= tokens
        count += 1
    return count


def may_keep(candidate: Candidate, floor: Floor) -> bool:
    """Return True unless `candidate` is known to have a layer below `floor`."""
    if candidate.has_refused:
        return False
    return not floor or candidate.precision is None or not is_below(candidate.precision, floor)


def _rank(candidate: Candidate, num_tokens: int, reserved_tokens: int) -> int:
    """Return the rank of an instance for a short request, by the table in docs/structure.md."""
    if candidate.tp == 1:
        return 0 if _has_room(candidate, num_tokens) else 2
    is_home = not candidate.can_split or any(seat.is_home(num_tokens) for seat in candidate.seats)
    if candidate.stays:
        reserved = reserved_tokens if candidate.max_tokens >= reserved_tokens else 0
        return 1 if is_home and _has_room(candidate, num_tokens + reserved) else 4
    return 3 if is_home else 5


def _is_group_needed(candidates: Iterable[Candidate], long_tokens: int) -> bool:
    """Return True if a long request waits that none of the instances can hold."""
    return all(one.can_split and one.max_tokens < long_tokens for one in candidates)


def _has_room(candidate: Candidate, num_tokens: int) -> bool:
    return candidate.free_tokens is None or candidate.free_tokens >= num_tokens


def _by_load(candidate: Candidate) -> tuple[float, float, str]:
    """Return a sort key: load per worker less what its prefix cache saves, KV usage, name."""
    load = candidate.load / candidate.tp - _saved(candidate.cached_tokens)
    return load, candidate.kv_usage, candidate.instance


def _saved(cached_tokens: int) -> float:
    return min(cached_tokens / CACHED_TOKENS_PER_SEQUENCE, MOST_SEQUENCES_SAVED)


def _is_doubtful(candidate: Candidate, floor: Floor) -> bool:
    return bool(floor) and candidate.precision is None

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
1     a group that stays and has room beyond what is reserved, and at home
2     an instance of one worker, though the request will wait there
3     a group that is to part and has room at home
4     a group that stays, though the request will wait: there, if the group never parts by itself, else
      here (`Parting`); after a long one that waits (`Behind`)
5     a group that is to part: it waits here, with some patience (`Parting`)
====  ====================================================================

*Room at home*: everyone plans its own in a group, too, so a request goes to one of its members (`member_for`)
and stays with it when the group parts. While no member has more short requests than it could hold alone, the
group can part in the moment in which its last long one ends; what is above waits here meanwhile. Without
that a group which every worker is needed for, and which gets less done than comes, never parted again. For
the same reason no queue is brought into a group: while a long request waits for one to be made, short ones
wait here for room (`Parting`), and those that wait at a worker come back (`crowded`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from bus.precisions import Precision, is_below
from bus.shapes import natural


@dataclass(frozen=True, slots=True)
class Seat:
    """A member of a group, as a place for a request. Sequences and tokens are its own."""

    instance: str
    worker: str
    epoch: int
    num_measured: float | None
    num_own: int
    num_own_since: int
    short_tokens: float = 0.0  # KV of its short requests, those included that are on their way
    home_tokens: float = 0.0  # of so many short ones at most, so that the group can part

    def is_home(self, num_tokens: int) -> bool:
        """Whether it could take the short request along when the group parts."""
        return self.short_tokens <= 0 or self.short_tokens + num_tokens <= self.home_tokens


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
    parts: bool = True  # groups form by themselves, and part without a long request
    seats: tuple[Seat, ...] = ()  # of a group: its members that take requests


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
    """Only groups could take it, which it would keep from parting, now or when their long request is over. It
    should wait for a seat or the parts, and go to `candidate` if neither comes."""

    candidate: Candidate


@dataclass(frozen=True, slots=True)
class Behind:
    """It is short and would take the room that a long one waits for: it goes after that one."""


Found = Candidate | NoneFits | BelowFloor | NoRoom | Parting | Behind


def load(place: Candidate | Seat) -> float:
    """Sequences there, as far as known. Never fewer than our own: those we know of."""
    if place.num_measured is None:
        return float(place.num_own)
    return max(place.num_measured + place.num_own_since, float(place.num_own))


def is_long(candidates: Iterable[Candidate], num_tokens: int) -> bool:
    """Whether no instance of the lowest degree holds so many tokens."""
    return all(num_tokens > (candidate.low_tokens or candidate.max_tokens) for candidate in candidates)


def choose(
    candidates: Iterable[Candidate],
    num_tokens: int,
    floor: Precision | Literal[""] = "",
    reserved_tokens: int = 0,
    long_tokens: int = 0,
) -> Found | None:
    """The least loaded instance that can hold `num_tokens`, of the rank above for a short request, of the
    groups with room for a long one: first where another long one runs, so that other groups can part. Of
    equals the one with the emptier cache, then the first by name. None: there is no candidate at all.

    With a `floor` only those whose layers are all known to keep it, or else may keep it: a worker refuses
    what it must not run. `reserved_tokens`: what the longest request needs that came before and waits for a
    group; `long_tokens`: what the first needs that waits for one, whenever it came.
    """
    there = list(candidates)
    if not there:
        return None
    fitting = [candidate for candidate in there if num_tokens <= candidate.max_tokens]
    if not fitting:
        return NoneFits(max(candidate.max_tokens for candidate in there))
    keeping = [candidate for candidate in fitting if may_keep(candidate, floor)]
    if not keeping:
        return BelowFloor()
    if not is_long(there, num_tokens):
        best = min(
            keeping,
            key=lambda c: (_is_doubtful(c, floor), _rank(c, num_tokens, reserved_tokens), *_by_load(c)),
        )
        is_reserved = best.tp > 1 and 0 < reserved_tokens <= best.max_tokens
        if is_reserved and not _has_room(best, num_tokens + reserved_tokens):
            return Behind()
        rank = _rank(best, num_tokens, reserved_tokens)
        if best.tp == 1:
            return Parting(best) if rank == 2 and _is_to_form(there, long_tokens) else best
        return Parting(best) if best.parts and rank >= 4 else best
    roomy = [candidate for candidate in keeping if _has_room(candidate, num_tokens)]
    if not roomy:
        return NoRoom()
    return min(roomy, key=lambda c: (_is_doubtful(c, floor), not c.stays, *_by_load(c)))


def member_for(chosen: Candidate, num_tokens: int) -> Candidate | Seat:
    """Who of it takes the request: with room at home, with the fewest sequences, the first by name. So a
    group parts into balanced parts, and a death of one costs its share. Itself where it is one worker."""
    is_short = num_tokens <= (chosen.low_tokens or chosen.max_tokens)
    return min(
        chosen.seats,
        key=lambda seat: (is_short and not seat.is_home(num_tokens), load(seat), natural(seat.worker)),
        default=chosen,
    )


def crowded(candidates: Sequence[Candidate], long_tokens: int) -> list[Seat]:
    """Who has more of short requests than it could take along when a group parts, or than it has KV for where
    a group is to be made. `long_tokens`: what the first long request needs that waits; 0: none does."""
    seats = [seat for one in candidates if one.parts for seat in one.seats]
    if _is_to_form(candidates, long_tokens):
        seats += [_alone(one) for one in candidates if not one.seats]
    return [seat for seat in seats if seat.short_tokens > seat.home_tokens]


def _alone(one: Candidate) -> Seat:
    taken = 0.0 if one.free_tokens is None else one.max_tokens - one.free_tokens
    return Seat(
        one.instance,
        one.worker,
        one.epoch,
        one.num_measured,
        one.num_own,
        one.num_own_since,
        short_tokens=taken,
        home_tokens=one.max_tokens,
    )


def num_to_recall(seat: Seat, queued_tokens: Sequence[int]) -> int:
    """How many of the short requests that wait there, the latest last, must wait here instead."""
    over, count = seat.short_tokens - seat.home_tokens, 0
    for tokens in reversed(queued_tokens):
        if over <= 0:
            break
        over -= tokens
        count += 1
    return count


def _rank(candidate: Candidate, num_tokens: int, reserved_tokens: int) -> int:
    if candidate.tp == 1:
        return 0 if _has_room(candidate, num_tokens) else 2
    is_home = not candidate.parts or any(seat.is_home(num_tokens) for seat in candidate.seats)
    if candidate.stays:
        reserved = reserved_tokens if candidate.max_tokens >= reserved_tokens else 0
        return 1 if is_home and _has_room(candidate, num_tokens + reserved) else 4
    return 3 if is_home else 5


def _is_to_form(candidates: Iterable[Candidate], long_tokens: int) -> bool:
    """Whether a long request waits that only another group than there is now can hold."""
    return all(one.parts and one.max_tokens < long_tokens for one in candidates)


def _has_room(candidate: Candidate, num_tokens: int) -> bool:
    return candidate.free_tokens is None or candidate.free_tokens >= num_tokens


def _by_load(candidate: Candidate) -> tuple[float, float, str]:
    """Of one worker's share: a group has that many."""
    return load(candidate) / candidate.tp, candidate.kv_usage, candidate.instance


def _is_doubtful(candidate: Candidate, floor: Precision | Literal[""]) -> bool:
    return bool(floor) and candidate.precision is None


def may_keep(candidate: Candidate, floor: Precision | Literal[""]) -> bool:
    """As far as is known."""
    if candidate.is_below:
        return False
    return not floor or candidate.precision is None or not is_below(candidate.precision, floor)

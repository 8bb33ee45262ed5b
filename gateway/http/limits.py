"""Admission: bounds of the queue and of all requests (503), and limits per key (429).

A call reserves its slot before its prompt is tokenised, so that refusals stay cheap in a burst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bus.api_keys import ApiKey
from gateway.errors import ApiError, invalid, overloaded, too_many


class Slot:
    """One call's share of the gateway: `size` requests, of which a worker began `started`."""

    __slots__ = (
        "_admission",
        "_error",
        "_is_open",
        "_on_pushed_out",
        "_sure",
        "key",
        "num_bytes",
        "size",
        "started",
        "weight",
    )

    def __init__(self, admission: Admission, key: str, weight: float) -> None:
        self._admission = admission
        self.key, self.weight = key, weight
        self._is_open = True
        self._error: ApiError | None = None
        self._on_pushed_out: Callable[[ApiError], None] | None = None
        self.size = self.started = 0
        self.num_bytes = self._sure = 0

    @contextmanager
    def awaiting_body(self) -> Iterator[None]:
        """Let the call make room for any other while its body has not come."""
        self._admission.bodiless[self] = None
        try:
            yield
        finally:
            self._admission.bodiless.pop(self, None)

    def take_bytes(self, num_bytes: int) -> None:
        """Take memory that the call needs until its end. Raises ApiError 503."""
        self.raise_if_pushed_out()
        self._admission.take_bytes(self, num_bytes)
        self._sure += num_bytes

    def hold(self, num_bytes: int) -> None:
        """Have so much memory beside what was taken, more or less than before. Raises ApiError 503."""
        if self._is_open and (more := self._sure + num_bytes - self.num_bytes):
            self._admission.take_bytes(self, more)

    def grow(self, size: int) -> None:
        """Take room for `size` requests in all. Raises ApiError: 503, or 400 if that many can never fit."""
        self.raise_if_pushed_out()
        limit = self._admission.most_at_once
        if size > limit:
            raise invalid(f"this call has {size} sequences (prompts times n); the limit is {limit}", "n")
        self._admission.take(self, size - self.size)

    def watch(self, on_pushed_out: Callable[[ApiError], None]) -> None:
        """Have `on_pushed_out` called when the room goes to another key. Raises ApiError if it has."""
        self.raise_if_pushed_out()
        self._on_pushed_out = on_pushed_out

    def start_one(self) -> None:
        """Note that a worker began one request: it is not queued any more."""
        if self._is_open and self.started < self.size:
            self._admission.start_one(self)

    def push_out(self, error: ApiError) -> None:
        """Give the room back, and fail the call."""
        self._error = error
        self.release()
        if self._on_pushed_out is not None:
            self._on_pushed_out(error)

    def raise_if_pushed_out(self) -> None:
        """Raise the ApiError with which the room was taken away."""
        if self._error is not None:
            raise self._error

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._admission.give_back(self)


@dataclass(slots=True)
class _Share:
    """The part of one key in the two counts."""

    weight: float
    queued: int = 0
    inflight: int = 0
    num_bytes: int = 0
    waiting: dict[Slot, None] = field(default_factory=dict)  # slots without a begun request, oldest first

    @property
    def queued_by_weight(self) -> float:
        return self.queued / self.weight


MIB: Final = 1024 * 1024
MOST_OF_FREE: Final = 8  # a key's requests, as a multiple of what stays free of `max_inflight`


class Admission:
    """Owner of the counts. Integrity: 0 <= queued <= inflight, both within their bounds, and so the bytes.

    Where there is no room for a request, calls whose bodies have not come make room, the oldest first: a head
    costs a client nothing. Otherwise a key may fill whatever the others leave, and the youngest waiting call
    of the key that has most requests in the queue, by weight, makes room (longest queue drop: Suter et al.,
    "Buffer Management Schemes for Supporting TCP in Gigabit Routers with Per-Flow Queueing", 1999); the
    request is refused if that is its own key. What a worker began is never pushed out. So where several keys
    share the gateway (`is_shared`), a key that has requests leaves a ninth of `max_inflight` free, and one
    that has memory a ninth of `max_inflight_mb`: a dynamic threshold (Choudhury and Hahne, "Dynamic Queue
    Length Thresholds for Shared-Memory Packet Switches", 1998, with alpha 8).
    """

    def __init__(
        self,
        max_queue: int,
        max_inflight: int,
        is_shared: Callable[[], bool] = lambda: False,
        max_inflight_mb: int = 1024,
    ) -> None:
        self.max_queue, self.max_inflight, self.max_inflight_mb = max_queue, max_inflight, max_inflight_mb
        self.queued = self.inflight = self.num_bytes = 0
        self._is_shared = is_shared
        self._shares: dict[str, _Share] = {}  # by key; none without requests
        self.bodiless: dict[Slot, None] = {}  # slots of calls whose bodies have not come, oldest first
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    @property
    def most_at_once(self) -> int:
        """The most requests that one call may have."""
        return min(self.max_queue, self.max_inflight)

    def reserve(self, key: str = "", weight: float = 1.0) -> Slot:
        """Take room for one request. Raises ApiError 503."""
        slot = Slot(self, key, weight)
        self.take(slot, 1)
        return slot

    def take(self, slot: Slot, size: int) -> None:
        """Take room for `size` more requests of a slot. Raises ApiError 503."""
        share = self._shares.get(slot.key) or _Share(slot.weight)
        self._refuse_if_over(share, size)
        for victim in self._to_push_out(share, size):
            victim.push_out(self._pushed_out(victim))
        self._shares[slot.key] = share
        share.waiting[slot] = None
        slot.size += size
        for counts in (share, self):
            counts.queued += size
            counts.inflight += size
        self.is_empty.clear()

    def take_bytes(self, slot: Slot, more: int) -> None:
        """Take memory for a slot, or give some back. Raises ApiError 503."""
        share = self._shares[slot.key]
        free = self.max_inflight_mb * MIB - self.num_bytes - more
        if more > 0 and free < 0:
            what = f"prompts and answers take {self.num_bytes // MIB} MiB, and this one {-(-more // MIB)}"
            raise overloaded(f"{what} more; gateway.max_inflight_mb is {self.max_inflight_mb}")
        is_over = share.num_bytes > 0 and share.num_bytes + more > MOST_OF_FREE * free
        if more > 0 and is_over and self._is_shared():
            what = f"prompts and answers of this key take {share.num_bytes // MIB} MiB"
            raise overloaded(
                f"{what}, and {free // MIB} would stay free for other keys; "
                f"gateway.max_inflight_mb is {self.max_inflight_mb}"
            )
        for counts in (slot, share, self):
            counts.num_bytes += more

    def _refuse_if_over(self, share: _Share, size: int) -> None:
        own, free = share.inflight, self.max_inflight - self.inflight - size
        if own and own + size > MOST_OF_FREE * free and self._is_shared():
            raise overloaded(
                f"{own} requests of this key wait or run, and {max(0, free)} would stay free for other keys: "
                f"gateway.max_inflight is {self.max_inflight}"
            )

    def _to_push_out(self, share: _Share, size: int) -> list[Slot]:
        """Return the calls that make room for `size` requests of a share. Raises ApiError 503."""
        found: dict[Slot, None] = {}
        left = {id(one): one.queued_by_weight for one in self._shares.values()}
        missing = max(self.queued + size - self.max_queue, self.inflight + size - self.max_inflight)
        for slot in self.bodiless:
            if missing <= 0:
                break
            found[slot] = None
            left[id(self._shares[slot.key])] -= slot.size / slot.weight
            missing -= slot.size
        own = left.get(id(share), 0.0) + size / share.weight
        while missing > 0:
            others = (
                one
                for one in self._shares.values()
                if one is not share and not one.waiting.keys() <= found.keys()
            )
            longest = max(others, key=lambda one: left[id(one)], default=share)
            if longest is share or left[id(longest)] <= own:
                raise self._full(size)
            victim = next(slot for slot in reversed(longest.waiting) if slot not in found)
            found[victim] = None
            left[id(longest)] -= victim.size / longest.weight
            missing -= victim.size
        return list(found)

    def _full(self, size: int) -> ApiError:
        if self.queued + size > self.max_queue:
            return overloaded(f"{self.queued} requests are waiting; gateway.max_queue is {self.max_queue}")
        return overloaded(f"{self.inflight} requests run; gateway.max_inflight is {self.max_inflight}")

    def _pushed_out(self, slot: Slot) -> ApiError:
        own, bound = self._shares[slot.key].queued, f"(gateway.max_queue is {self.max_queue})"
        if slot in self.bodiless:
            return overloaded(f"another request took this one's place, whose body had not come {bound}")
        return overloaded(
            f"a key with fewer requests took this one's place: {own} of this key waited, the most of any key "
            f"{bound}"
        )

    def start_one(self, slot: Slot) -> None:
        """Note that a worker began one request of a slot."""
        share = self._shares[slot.key]
        share.waiting.pop(slot, None)
        slot.started += 1
        share.queued -= 1
        self.queued -= 1

    def give_back(self, slot: Slot) -> None:
        """Take all that is left of a slot out of the counts."""
        share = self._shares[slot.key]
        share.waiting.pop(slot, None)
        self.bodiless.pop(slot, None)
        for counts in (share, self):
            counts.inflight -= slot.size
            counts.queued -= slot.size - slot.started
            counts.num_bytes -= slot.num_bytes
        if not share.inflight:
            del self._shares[slot.key]
        if self.inflight == 0:
            self.is_empty.set()

    def check_integrity(self) -> None:
        if not 0 <= self.queued <= self.inflight <= self.max_inflight or self.queued > self.max_queue:
            raise AssertionError(f"admission counts: queued {self.queued}, inflight {self.inflight}")
        shares = self._shares.values()
        of_keys = sum(share.queued for share in shares), sum(share.inflight for share in shares)
        if of_keys != (self.queued, self.inflight):
            raise AssertionError(f"the keys have {of_keys} of ({self.queued}, {self.inflight})")
        if self.num_bytes != sum(share.num_bytes for share in shares):
            raise AssertionError(f"the keys do not have the {self.num_bytes} bytes of all")
        waiting = [slot.size for share in shares for slot in share.waiting]
        if sum(waiting) > self.queued:
            raise AssertionError(f"{sum(waiting)} requests could make room, and {self.queued} are queued")


def _header_names(unit: str) -> tuple[str, ...]:
    return tuple(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset"))


RATE_HEADERS: Final = (*_header_names("requests"), *_header_names("tokens"))


@dataclass(slots=True)
class _Bucket:
    """A bucket that refills evenly to `per_minute`. Its level may be below zero: then it has a debt."""

    per_minute: int
    level: float
    at: float

    def refill(self, per_minute: int, now: float) -> None:
        """Take a limit, which may have changed, and what has flowed in until `now`."""
        if per_minute != self.per_minute:
            self.level += per_minute - self.per_minute
            self.per_minute = per_minute
        self.level = min(float(per_minute), self.level + (now - self.at) * per_minute / 60)
        self.at = now

    def wait_s(self, amount: float) -> float:
        """Return in how many seconds it holds `amount`, or is full if it never holds so much."""
        if not self.per_minute:
            return 0.0
        return max(0.0, (min(amount, self.per_minute) - self.level) * 60 / self.per_minute)

    def headers(self, unit: str) -> dict[str, str]:
        """Return OpenAI's headers of a limit; none without one."""
        if not self.per_minute:
            return {}
        left, full_s = max(0, int(self.level)), self.wait_s(self.per_minute)
        return dict(
            zip(_header_names(unit), (str(self.per_minute), str(left), f"{full_s:.1f}s"), strict=True)
        )


@dataclass(slots=True)
class KeyUse:
    """The rest that a key has of its limits.

    A call takes the tokens of its prompts before it runs, and those of its answer when it has ended: so what
    a client asks for and does not get costs it nothing.
    """

    requests: _Bucket
    tokens: _Bucket
    max_running: int = 0
    running: int = 0

    def take_prompts(self, num_tokens: int) -> None:
        """Take the tokens of a call's prompts, once for each choice. Raises ApiError 429.

        More than a minute's tokens go through when the bucket is full, and leave a debt.
        """
        if wait_s := self.tokens.wait_s(num_tokens):
            what = f"over {self.tokens.per_minute} tokens per minute with the {num_tokens} of this prompt"
            raise too_many(f"this key sent {what}; wait and try again", wait_s, self.headers)
        self.tokens.level -= num_tokens

    def take_output(self, num_tokens: int) -> None:
        """Take the tokens of an answer. The bucket may be in debt then, and the next call waits for it."""
        self.tokens.level -= num_tokens

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's headers, for the limits that there are."""
        return self.requests.headers("requests") | self.tokens.headers("tokens")

    def refuse_if_over(self) -> None:
        """Raise ApiError 429 unless one more call may begin."""
        if self.max_running and self.running >= self.max_running:
            what, wait_s = f"{self.running} requests at once, the limit is {self.max_running}", 1.0
        elif wait_s := self.requests.wait_s(1):
            what = f"over {self.requests.per_minute} requests per minute"
        elif wait_s := self.tokens.wait_s(1):
            what = f"over {self.tokens.per_minute} tokens per minute"
        else:
            return
        raise too_many(f"this key sent {what}; wait and try again", wait_s, self.headers)


class RateLimiter:
    """Limits of each key: requests and tokens per minute, requests at once.

    rpm, concurrent: of keys that have no limit of their own; 0: none. Each gateway counts for itself.
    """

    def __init__(self, rpm: int, concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rpm, self.concurrent = rpm, concurrent
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}

    @contextmanager
    def enter(self, key: ApiKey) -> Iterator[KeyUse]:
        """Count one call of `key` while it runs. Raises ApiError 429."""
        use = self._refilled(key)
        use.refuse_if_over()
        use.requests.level -= 1
        use.running += 1
        try:
            yield use
        finally:
            use.running -= 1
            if not (use.running or use.requests.per_minute or use.tokens.per_minute):
                self._uses.pop(key.id, None)

    def _refilled(self, key: ApiKey) -> KeyUse:
        now, rpm = self._clock(), key.rpm or self.rpm
        use = self._uses.get(key.id)
        if use is None:
            use = KeyUse(_Bucket(rpm, float(rpm), now), _Bucket(key.tpm, float(key.tpm), now))
            self._uses[key.id] = use
        use.requests.refill(rpm, now)
        use.tokens.refill(key.tpm, now)
        use.max_running = key.concurrent or self.concurrent
        return use

"""Admission: bounds of the queue and of all requests (503), and limits per key (429).

A call reserves its slot before its prompt is tokenised, so that refusals stay cheap in a burst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from bus.api_keys import ApiKey
from gateway.errors import invalid, overloaded, too_many


class Slot:
    """One call's share of the gateway: `size` requests, of which a worker began `started`."""

    __slots__ = ("_admission", "_is_open", "key", "size", "started")

    def __init__(self, admission: Admission, key: str, size: int) -> None:
        self._admission = admission
        self.key = key
        self._is_open = True
        self.size = size
        self.started = 0

    def grow(self, size: int) -> None:
        """Take room for `size` requests in all. Raises ApiError: 503, or 400 if that many can never fit."""
        limit = self._admission.most_at_once
        if size > limit:
            raise invalid(f"this call has {size} sequences (prompts times n); the limit is {limit}", "n")
        self._admission.take(self.key, size - self.size)
        self.size = size

    def start_one(self) -> None:
        """Note that a worker began one request: it is not queued any more."""
        if self._is_open and self.started < self.size:
            self.started += 1
            self._admission.start_one(self.key)

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._admission.give_back(self.key, self.size, self.size - self.started)


@dataclass(slots=True)
class _Share:
    """The part of one key in the two counts."""

    queued: int = 0
    inflight: int = 0


class Admission:
    """Owner of the two counts. Integrity: 0 <= queued <= inflight, both within their bounds.

    Where several keys share the gateway (`is_shared`), a key may have as many as would stay free beside it: a
    dynamic threshold (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet
    Switches", 1998, with alpha 1). One key alone gets half, a second a quarter, and there is room for the
    next, whatever the load of the first.
    """

    def __init__(
        self, max_queue: int, max_inflight: int, is_shared: Callable[[], bool] = lambda: False
    ) -> None:
        self.max_queue, self.max_inflight = max_queue, max_inflight
        self.queued = self.inflight = 0
        self._is_shared = is_shared
        self._shares: dict[str, _Share] = {}  # by key; none without requests
        self.is_empty = asyncio.Event()
        self.is_empty.set()

    @property
    def most_at_once(self) -> int:
        """The most requests that one call may have."""
        most = min(self.max_queue, self.max_inflight)
        return max(1, most // 2) if self._is_shared() else most

    def reserve(self, key: str = "") -> Slot:
        """Take room for one request. Raises ApiError 503."""
        self.take(key, 1)
        return Slot(self, key, 1)

    def take(self, key: str, size: int) -> None:
        """Take room for more requests of `key`. Raises ApiError 503."""
        if self.queued + size > self.max_queue:
            raise overloaded(f"{self.queued} requests are waiting; gateway.max_queue is {self.max_queue}")
        if self.inflight + size > self.max_inflight:
            raise overloaded(f"{self.inflight} requests run; gateway.max_inflight is {self.max_inflight}")
        share = self._shares.get(key) or _Share()
        if self._is_shared():
            self._refuse_if_over(share, size)
        share.queued += size
        share.inflight += size
        self._shares[key] = share
        self.queued += size
        self.inflight += size
        self.is_empty.clear()

    def _refuse_if_over(self, share: _Share, size: int) -> None:
        for name, own, total, most in (
            ("max_queue", share.queued, self.queued, self.max_queue),
            ("max_inflight", share.inflight, self.inflight, self.max_inflight),
        ):
            if own and own + size > most - total - size:
                what = "wait" if name == "max_queue" else "wait or run"
                raise overloaded(
                    f"{own} requests of this key {what}, as many as stay free for other keys: gateway.{name} "
                    f"is {most}"
                )

    def start_one(self, key: str) -> None:
        """Note that a worker began one request of `key`."""
        self.queued -= 1
        self._shares[key].queued -= 1

    def give_back(self, key: str, size: int, queued: int) -> None:
        share = self._shares[key]
        share.inflight -= size
        share.queued -= queued
        if not share.inflight:
            del self._shares[key]
        self.inflight -= size
        self.queued -= queued
        if self.inflight == 0:
            self.is_empty.set()

    def check_integrity(self) -> None:
        if not 0 <= self.queued <= self.inflight <= self.max_inflight or self.queued > self.max_queue:
            raise AssertionError(f"admission counts: queued {self.queued}, inflight {self.inflight}")
        shares = self._shares.values()
        of_keys = sum(share.queued for share in shares), sum(share.inflight for share in shares)
        if of_keys != (self.queued, self.inflight):
            raise AssertionError(f"the keys have {of_keys} of ({self.queued}, {self.inflight})")


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
        return {
            f"x-ratelimit-limit-{unit}": str(self.per_minute),
            f"x-ratelimit-remaining-{unit}": str(max(0, int(self.level))),
            f"x-ratelimit-reset-{unit}": f"{self.wait_s(self.per_minute):.1f}s",
        }


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


RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)


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

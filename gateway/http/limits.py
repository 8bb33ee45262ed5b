"""Admission: bounds of the queue and of all requests (503), and limits per key (429).

A call reserves its slot before its prompt is tokenised, so that refusals stay cheap in a burst.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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
    tokens: float
    at: float
    running: int = 0


class RateLimiter:
    """Limits of calls per minute (a bucket that refills evenly) and at once, for each key; 0: no limit."""

    def __init__(self, rpm: int, concurrent: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.rpm, self.concurrent = rpm, concurrent
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    @contextmanager
    def enter(self, key: str) -> Iterator[dict[str, str]]:
        """Count one call and yield the x-ratelimit headers of its answer. Raises ApiError 429."""
        if not self.rpm and not self.concurrent:
            yield {}
            return
        bucket = self._refilled(key)
        self._refuse_if_over(bucket)
        bucket.tokens -= 1
        bucket.running += 1
        try:
            yield self._headers(bucket)
        finally:
            bucket.running -= 1

    def _refilled(self, key: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(tokens=float(self.rpm), at=now))
        bucket.tokens = min(float(self.rpm), bucket.tokens + (now - bucket.at) * self.rpm / 60)
        bucket.at = now
        return bucket

    def _refuse_if_over(self, bucket: _Bucket) -> None:
        if self.concurrent and bucket.running >= self.concurrent:
            what, wait_s = f"{bucket.running} requests at once, the limit is {self.concurrent}", 1.0
        elif self.rpm and bucket.tokens < 1:
            what, wait_s = f"over {self.rpm} requests per minute", (1 - bucket.tokens) * 60 / self.rpm
        else:
            return
        raise too_many(f"this key sent {what}; wait and try again", wait_s, self._headers(bucket))

    def _headers(self, bucket: _Bucket) -> dict[str, str]:
        if not self.rpm:
            return {}
        full_in_s = (self.rpm - bucket.tokens) * 60 / self.rpm
        return {
            "x-ratelimit-limit-requests": str(self.rpm),
            "x-ratelimit-remaining-requests": str(max(0, int(bucket.tokens))),
            "x-ratelimit-reset-requests": f"{full_in_s:.1f}s",
        }

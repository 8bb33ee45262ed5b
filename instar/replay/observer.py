"""KV, layers, degrees and morphs of an Instar server during a replay, once a second.

A connection of its own asks for the state. An answer that does not come in time is a missing sample and does
not stop the run.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from instar.errors import ServerError
from instar.replay.wire import ServerAddress, fetch

EVERY_S: Final = 1.0
TIMEOUT_S: Final = 5.0
LAG_S: Final = 2.0  # a window begins with the report before it and is shown a little after its end
# Counters of /metrics whose growth over a run is kept.
COUNTED: Final = (
    "instar_generation_tokens_by_precision_total",
    "instar_num_preemptions_total",
    "instar_recomputed_tokens_total",
    "instar_request_replays_total",
)
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", re.MULTILINE)


class _Kv(msgspec.Struct, frozen=True):
    blocks: int | None = None
    used: int | None = None


class _Instance(msgspec.Struct):
    id: str
    kv: _Kv = _Kv()
    running: int | None = None
    waiting: int | None = None
    layers_below_full: int | None = None
    tp: int = 1


class _Report(msgspec.Struct, frozen=True):
    oldest_wait_seconds: float | None = None


class _Measured(msgspec.Struct):
    id: str
    queue_delay_seconds: float | None = None
    last: _Report = _Report()

    def queue_delay_s(self, *, is_of_run: bool) -> float | None:
        """Return the delay over the metric's window; before that is in the run, of the queue's head."""
        return self.queue_delay_seconds if is_of_run else self.last.oldest_wait_seconds


class _Metrics(msgspec.Struct, frozen=True):
    instances: list[_Measured] = []
    window_seconds: float = 0.0
    age_seconds: float = 0.0


class _State(msgspec.Struct):
    """The fields of GET /admin/state that a run keeps."""

    instances: list[_Instance]
    metrics: _Metrics = _Metrics()
    morphs: list[dict[str, Any]] = []


class Observer:
    """Samples over time, the last state of each morph by id, and the growth of the counters."""

    def __init__(self, server: ServerAddress) -> None:
        self.samples: list[dict[str, Any]] = []
        self.morphs: dict[str, dict[str, Any]] = {}
        self.counted: dict[str, float] = {}
        self.num_missed = 0
        self._server = server
        self._before: dict[str, float] = {}
        self._old: set[str] = set()  # morphs that ended before the run

    async def begin(self) -> str:
        """Return "" or why there is nothing to observe."""
        try:
            status, answer = await fetch(self._server, "GET", "/admin/state", within_s=TIMEOUT_S)
        except ServerError as problem:
            return f"its state cannot be read: {problem}"
        if status in (401, 403):
            return "its state needs a key: --admin-key"
        try:
            state = msgspec.json.decode(answer, type=_State)
        except msgspec.DecodeError:
            return "it is not an Instar server: KV, layers and morphs are not reported"
        if status != 200:
            return f"/admin/state answers {status}"
        self._old = {one["id"] for one in state.morphs if one.get("state") != "running"}
        self._before = await self._counters()
        return ""

    async def follow(self, now_s: Callable[[], float]) -> None:
        """Take samples until cancelled."""
        while True:
            await self.sample(now_s)
            await asyncio.sleep(EVERY_S - now_s() % EVERY_S)

    async def sample(self, now_s: Callable[[], float]) -> None:
        try:
            status, answer = await fetch(self._server, "GET", "/admin/state", within_s=TIMEOUT_S)
            state = msgspec.json.decode(answer, type=_State) if status == 200 else None
        except (ServerError, msgspec.DecodeError):
            state = None
        if state is None:
            self.num_missed += 1
            return
        metrics = state.metrics
        is_of_run = now_s() > metrics.age_seconds + metrics.window_seconds + LAG_S
        delays = {one.id: one.queue_delay_s(is_of_run=is_of_run) for one in metrics.instances}
        shapes = {one.id: _shape(one, delays.get(one.id)) for one in state.instances}
        self.samples.append({"at_s": round(now_s(), 3), "instances": shapes})
        self.morphs |= {one["id"]: one for one in state.morphs if one["id"] not in self._old}

    async def end(self, now_s: Callable[[], float]) -> None:
        await self.sample(now_s)
        after = await self._counters()
        self.counted = {name: _grown(after[name], self._before.get(name, 0.0)) for name in sorted(after)}

    def as_json(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "missed": self.num_missed,
            "morphs": list(self.morphs.values()),
            "counted": self.counted,
        }

    async def _counters(self) -> dict[str, float]:
        """Return the counters, {} if they cannot be read."""
        try:
            _, answer = await fetch(self._server, "GET", "/metrics", within_s=TIMEOUT_S)
        except ServerError:
            return {}
        return counters(answer.decode(errors="replace"))


def _grown(after: float, before: float) -> float:
    """Return the growth of a counter, which restarts at 0 with its process."""
    return after - before if after >= before else after


def _shape(one: _Instance, queue_delay_s: float | None) -> dict[str, Any]:
    return {
        "kv_blocks": one.kv.blocks,
        "kv_used": one.kv.used,
        "running": one.running,
        "waiting": one.waiting,
        "layers_below_full": one.layers_below_full,
        "tp": one.tp,
        "queue_delay_s": queue_delay_s,
    }


def counters(page: str) -> dict[str, float]:
    """Return `name{labels}` -> value of the kept counters on a page of /metrics."""
    return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(page) if name in COUNTED}

"""What an Instar says of itself while it is replayed against, once a second: KV, layers, degrees, morphs.

The state is asked over a connection of its own. An answer that does not come in time is a sample less, never
a reason to stop; absent is not zero.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from instar.errors import BenchProblem
from instar.replay.wire import Server, fetch

EVERY_S: Final = 1.0
PATIENCE_S: Final = 5.0
LAG_S: Final = 2.0  # a window begins with the report before it, and is shown a little after its end
# Counters of /metrics whose growth over a run is told, by their labels.
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
        """The metric looks back over a window. While that began before the run, how long the head of the
        queue has waited, which is of now."""
        return self.queue_delay_seconds if is_of_run else self.last.oldest_wait_seconds


class _Metrics(msgspec.Struct, frozen=True):
    instances: list[_Measured] = []
    window_seconds: float = 0.0
    age_seconds: float = 0.0


class _State(msgspec.Struct):
    """Of GET /admin/state what a run keeps; without `instances` it is no Instar."""

    instances: list[_Instance]
    metrics: _Metrics = _Metrics()
    morphs: list[dict[str, Any]] = []


class Observer:
    """`samples` over time; `morphs` by id, as last told; `counted` what the counters grew by."""

    def __init__(self, server: Server) -> None:
        self.samples: list[dict[str, Any]] = []
        self.morphs: dict[str, dict[str, Any]] = {}
        self.counted: dict[str, float] = {}
        self.num_missed = 0
        self._server = server
        self._before: dict[str, float] = {}
        self._old: set[str] = set()  # morphs that ended before the run

    async def begin(self) -> str:
        """Why there is nothing to observe, "" where there is."""
        try:
            status, answer = await fetch(self._server, "GET", "/admin/state", within_s=PATIENCE_S)
        except BenchProblem as problem:
            return f"its state cannot be read: {problem}"
        if status in (401, 403):
            return "its state needs a key: --admin-key"
        try:
            state = msgspec.json.decode(answer, type=_State)
        except msgspec.DecodeError:
            return "it is no Instar: KV, layers and morphs are not told"
        if status != 200:
            return f"/admin/state answers {status}"
        self._old = {one["id"] for one in state.morphs if one.get("state") != "running"}
        self._before = await self._counters()
        return ""

    async def follow(self, now_s: Callable[[], float]) -> None:
        """Until it is cancelled."""
        while True:
            await self.look(now_s)
            await asyncio.sleep(EVERY_S - now_s() % EVERY_S)

    async def look(self, now_s: Callable[[], float]) -> None:
        try:
            status, answer = await fetch(self._server, "GET", "/admin/state", within_s=PATIENCE_S)
            state = msgspec.json.decode(answer, type=_State) if status == 200 else None
        except (BenchProblem, msgspec.DecodeError):
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
        await self.look(now_s)
        after = await self._counters()
        self.counted = {name: _grown(after[name], self._before.get(name, 0.0)) for name in sorted(after)}

    async def _counters(self) -> dict[str, float]:
        """{} where they cannot be read."""
        try:
            _, answer = await fetch(self._server, "GET", "/metrics", within_s=PATIENCE_S)
        except BenchProblem:
            return {}
        return counters(answer.decode(errors="replace"))


def _grown(after: float, before: float) -> float:
    """A counter that fell began anew, with its process."""
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
    """`name{labels}` -> value, of those that are told of."""
    return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(page) if name in COUNTED}

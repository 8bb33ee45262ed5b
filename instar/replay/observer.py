"""KV, layers, degrees and morphs of an Instar server during a replay, sampled once a second."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
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
# What is kept of each instance once: what it can become, for a simulation of it.
FACTS: Final = (
    *("model", "num_layers", "max_model_len", "min_blocks", "variants", "order"),
    *("layer_pages", "attention_pages", "max_num_seqs", "max_num_batched_tokens"),
)
_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", re.MULTILINE)


class Observer:
    """Samples over time, the last state of each morph by id, and the growth of the counters."""

    def __init__(self, server: ServerAddress) -> None:
        self.samples: list[dict[str, Any]] = []
        self.morphs: dict[str, dict[str, Any]] = {}
        self.counted: dict[str, float] = {}
        self.facts: dict[str, dict[str, Any]] = {}  # facts of each instance at the beginning of the run
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
        if (state := _state(answer)) is None:
            return "it is not an Instar server: KV, layers and morphs are not reported"
        if status != 200:
            return f"/admin/state answers {status}"
        self.facts = facts_of(state)
        self._old = {one["id"] for one in state.get("morphs", []) if one.get("state") != "running"}
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
            state = _state(answer) if status == 200 else None
        except ServerError:
            state = None
        if state is None:
            self.num_missed += 1
            return
        metrics = state.get("metrics") or {}
        window_s = metrics.get("age_seconds", 0.0) + metrics.get("window_seconds", 0.0) + LAG_S
        # Until the metric's window is in the run, the wait of the queue's head stands for it.
        is_in_run = now_s() > window_s
        delays = {
            one["id"]: one.get("queue_delay_seconds")
            if is_in_run
            else (one.get("last") or {}).get("oldest_wait_seconds")
            for one in metrics.get("instances", [])
        }
        last = {one["id"]: one.get("last") or {} for one in metrics.get("instances", [])}
        shapes = {
            one["id"]: _shape(one, delays.get(one["id"])) | work_done(last.get(one["id"], {}))
            for one in state["instances"]
        }
        self.samples.append({"at_s": round(now_s(), 3), "instances": shapes})
        self.morphs |= {one["id"]: one for one in state.get("morphs", []) if one["id"] not in self._old}

    async def end(self, now_s: Callable[[], float]) -> None:
        await self.sample(now_s)
        after = await self._counters()
        self.counted = {name: _grown(after[name], self._before.get(name, 0.0)) for name in sorted(after)}

    def as_json(self) -> dict[str, Any]:
        morphs = list(self.morphs.values())
        found = {"samples": self.samples, "missed": self.num_missed, "morphs": morphs}
        return found | {"counted": self.counted, "instances": self.facts}

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


def _state(answer: bytes) -> dict[str, Any] | None:
    """Return the state of an Instar server, None for the answer of another."""
    try:
        state = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    return state if isinstance(state, dict) and isinstance(state.get("instances"), list) else None


def _shape(one: dict[str, Any], queue_delay_s: float | None) -> dict[str, Any]:
    kv = one.get("kv") or {}
    sizes = {"kv_blocks": kv.get("blocks"), "kv_used": kv.get("used"), "tp": one.get("tp", 1)}
    numbers = {name: one.get(name) for name in ("running", "waiting", "layers_below_full")}
    return sizes | numbers | {"queue_delay_s": queue_delay_s}


def work_done(last: dict[str, Any]) -> dict[str, Any]:
    """Return what an instance has done since its epoch began, by its last report; {} without one."""
    steps = last.get("step_seconds")
    if not steps:
        return {}
    halves = Counter(layer[part] for layer in last.get("layers", []) for part in ("attention", "ffn"))
    return {
        "steps": sum(steps["counts"].values()),
        "step_s": steps["total"],
        "prompt_tokens": last["prompt_tokens"],
        "output_tokens": last["generation_tokens"],
        "preemptions": last["preemptions"],
        "halves": dict(halves),
    }


def facts_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return FACTS of each instance, and the pages of its worker at that time."""
    workers = {one.get("id"): one for one in state.get("workers", [])}
    found = {}
    for one in state["instances"]:
        worker = workers.get((one.get("workers") or [None])[0], {})
        found[one["id"]] = {name: one[name] for name in FACTS if name in one} | {
            "block_tokens": (one.get("kv") or {}).get("block_tokens"),
            "kv_blocks": (one.get("kv") or {}).get("blocks"),
            "pages": worker.get("pages"),
            "page_bytes": worker.get("page_bytes"),
        }
    return found


def counters(page: str) -> dict[str, float]:
    """Return `name{labels}` -> value of the kept counters on a page of /metrics."""
    return {name + labels: float(value) for name, labels, value in _SAMPLE.findall(page) if name in COUNTED}
